"""What trees of values from outside may hold. Each case once hung, flooded or ended in a traceback."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.boundary.trees import LEVELS, Bounds, parse_json, parse_tree, read_tree
from penstock.errors import CheckpointError, ConfigError

LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 40))
Parser = Callable[..., dict[str, Any]]


def _refused(parse: Parser, raw: bytes | str, said: str, **options: Any) -> None:
    begun = time.process_time()
    with pytest.raises(ConfigError) as caught:
        parse(raw, "The file a", **options)
    assert said in str(caught.value)
    assert str(caught.value).startswith("The file a ")
    assert len(str(caught.value)) < 600
    assert str(caught.value).isprintable()
    assert time.process_time() - begun < 2


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        pytest.param('{"a":' * 10_000, "64 levels deep", id="deep JSON"),
        ('{"a":' + "[" * LEVELS + "]" * LEVELS + "}", "64 levels deep"),
        ('{"a":[' + "[]," * 300_000 + "1]}", "more than 100,000 values"),
        ('{"a": ' + "1" * 1_000_000 + "}", "thousands of digits"),
        ('{"a": {"b": 18446744073709551616}}', "a.b is a whole number of more than 64 bits"),
        ('{"a": [1, NaN]}', "a.1 is nan, but must be a finite number"),
        ('{"a": -1e400}', "a is -inf"),
        ('{"a": 1, "a": 2}', "the key 'a' twice"),
        ('{"a": "\\u001b[2J"}', "the control character '\\x1b' in the text"),
        ('{"\\u0000": 1}', "the control character"),
        ('{"a": "\\ud800"}', "half a character"),
        ("[1]", "must hold a table of settings, not list"),
        (b'{"a": "\xff"}', "is not valid JSON: 'utf-8'"),
        ("{", "is not valid JSON"),
        ("x" * (1 << 20) + "x", "at most 1,048,576 are read"),
    ],
    ids=lambda given: repr(given)[:24],
)
def test_json_that_could_hurt_is_refused(raw: bytes | str, said: str) -> None:
    _refused(parse_json, raw, said)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ("a = " + "[" * 10_000, "64 levels deep"),
        ("a = " + "{a=" * 400 + "1" + "}" * 400, "64 levels deep"),
        ("a." * 400_000 + "a = 1", "64 levels deep"),
        ("[" + "a." * LEVELS + "a]", "64 levels deep"),
        ("a = [" + "1," * 200_000 + "]", "more than 100,000 values"),
        ("[[a]]\n" * 170_000, "more than 100,000 values"),
        ("a = 0x" + "f" * 800_000, "a is a whole number of more than 64 bits"),
        ("a = " + "9" * 9_000, "thousands of digits"),
        ("a = nan", "a is nan"),
        ("a = 1e400", "a is inf"),
        ("a = 1979-05-27", "a is a date; write it in quotes"),
        ('a = "\\u001b[2J"', "the control character"),
        ("a = 1\na = 2", "not valid TOML: Cannot overwrite a value"),
    ],
    ids=lambda given: given[:24],
)
def test_toml_that_could_hurt_is_refused(raw: str, said: str) -> None:
    _refused(partial(parse_tree, "TOML"), raw, said)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        pytest.param(LAUGHS, "more than 10,000 values", id="YAML aliases"),
        (MERGES, "more than 10,000 values"),
        ("a: &a [*a]", "the alias 'a' inside the value that it repeats"),
        ("a0: &a0 1\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 99)), "64 levels deep"),
        ("[" * 60_000, "64 levels deep"),
        ("- " * 1_000, "64 levels deep"),
        ("a: " + "9" * 60_000, "more than 64 bits"),
        ("a: 1" + ":1" * 400 + ".5", "not valid YAML"),
        ("a: 0b_", "not valid YAML"),
        ("a: !!int ''", "write the value without it"),
        ("a: !!python/object/apply:os.system [x]", "write the value without it"),
        ("a: 2001-12-14", "a is a date"),
        ("a: 2001-13-45", "not valid YAML"),
        ("a: .inf", "a is inf"),
        ("a: 1\na: 2", "the key 'a' twice"),
        ("1: 2", "is no text, as a key must be; write it in quotes"),
        ('a: "\\0"', "the control character"),
        ("a: \0", "not valid YAML"),
        ("--- 1\n--- 2", "not valid YAML"),
        ("a: " + "x" * (1 << 16), "at most 65,536 are read"),
    ],
    ids=lambda given: given[:24],
)
def test_yaml_that_could_hurt_is_refused(raw: str, said: str) -> None:
    _refused(partial(parse_tree, "YAML"), raw, said)


def test_brackets_in_text_are_no_levels() -> None:
    text = "[{" * 50
    assert parse_json(f'{{"a\\\\": ["\\"{text}", "\\\\\\"{text}\\n"]}}', "x") == {
        "a\\": ['"' + text, '\\"' + text + "\n"]
    }
    toml = f'a = "\\"{text}"  # {text}\nb = \'{text}\'\nc = """\n{text}"{text}"""""\nd = \'\'\'{text}\'\'\'\n'
    assert parse_tree("TOML", toml, "x") == {"a": '"' + text, "b": text, "c": f'{text}"{text}""', "d": text}
    assert parse_tree("TOML", "a.'" + "b." * 99 + "' = 1", "x") == {"a": {"b." * 99: 1}}
    assert parse_tree("YAML", f"a: '{text}'", "x") == {"a": text}


def test_what_people_write_is_read() -> None:
    assert parse_tree(
        "YAML", "a: &a {x: 1e-3, y: no}\nb: {<<: *a, y: 2}\nc: {<<: *a}\nd: [~, '1', 1_000]\ne: *a", "x"
    ) == {
        "a": {"x": 0.001, "y": False},
        "b": {"x": 0.001, "y": 2},
        "c": {"x": 0.001, "y": False},
        "d": [None, "1", 1000],
        "e": {"x": 0.001, "y": False},
    }
    assert parse_tree("YAML", "", "x") == {}
    assert parse_json(b'\xef\xbb\xbf{"a": [18446744073709551615, "\\t\xc3\xa4\\n"]}', "x") == {
        "a": [2**64 - 1, "\tä\n"]
    }


def test_bounds_of_the_caller() -> None:
    assert parse_json('{"a": Infinity}', "x", bounds=Bounds(infinite=True)) == {"a": float("inf")}
    assert parse_json('{"a": "\\u001b"}', "x", bounds=Bounds(control=True)) == {"a": "\x1b"}
    _refused(parse_json, '{"a": "\\ud800"}', "half a character", bounds=Bounds(control=True))
    assert parse_json('{"a": 1000000000000000019884624838656}', "x", bounds=Bounds(wide=True)) == {
        "a": int(1e30)
    }
    _refused(parse_json, '{"a": [1, 2]}', "more than 2 values", bounds=Bounds(values=2))
    _refused(parse_json, '{"a": 1, "b": 2, "c": 3}', "more than 3 values", bounds=Bounds(values=3))
    with pytest.raises(CheckpointError, match=r"^The index is not valid JSON: .*\. Write it again\.$"):
        parse_json("{", "The index", error=CheckpointError, remedy="Write it again.")


def test_a_file_is_read_in_the_language_of_its_ending(tmp_path: Path) -> None:
    for name, text in (("a.json", '{"a": 1}'), ("a.toml", "a = 1"), ("a.yaml", "a: 1"), ("a.yml", "a: 1")):
        (tmp_path / name).write_text(text)
        assert read_tree(tmp_path / name, "The settings") == {"a": 1}
    with pytest.raises(ConfigError, match=r"The settings .*a\.txt ends in \.txt; use a name that ends in"):
        read_tree(tmp_path / "a.txt", "The settings")
    with pytest.raises(CheckpointError, match=r"The settings .*/b\.json cannot be read: it does not exist"):
        read_tree(tmp_path / "b.json", "The settings", error=CheckpointError)
