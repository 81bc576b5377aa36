"""A vocabulary cut short: texts are those of the whole one with the logits of all others at −∞."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.generation import WORDS, tiny
from penstock.cli import main
from penstock.data.text.tokenizers import Bytes
from penstock.errors import ConfigError
from penstock.infer.generator import Generator
from penstock.models.convert import save_pretrained
from penstock.products.shortlist import read_shortlist

END = 7
LISTED = tuple(range(10, 34))
ROWS = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]


def forbidding(generator: Generator) -> Generator:
    """The same, whose logits of all tokens that are not on the list are −∞."""
    more = torch.full((WORDS,), -math.inf)
    more[[*LISTED, END]] = 0.0
    head: Any = generator.model.head
    head.register_forward_hook(lambda _, given, logits: logits + more)
    return generator


@pytest.mark.parametrize("name", ["gpt", "t5-tiny", "marian-tiny"])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"beams": 4, "best": 2},
        {"beams": 4, "no_repeat_ngram": 2, "length_penalty": 0.5},
        {"temperature": 1.0, "seed": 1},
        {"speculate": 3},
    ],
)
def test_texts_are_those_with_all_other_tokens_forbidden(name: str, given: dict[str, Any]) -> None:
    whole = Generator(tiny(name), start=0, ends=(END,))
    free = whole.generate(ROWS, max_tokens=12, **given)
    expected = forbidding(whole).generate(ROWS, max_tokens=12, **given)
    short = Generator(tiny(name), start=0, ends=(END,), shortlist=LISTED)
    found = short.generate(ROWS, max_tokens=12, **given)
    assert [each.ids for each in found] == [each.ids for each in expected]
    assert [each.score or 0.0 for each in found] == pytest.approx([each.score or 0.0 for each in expected])
    assert {token for each in found for token in each.ids} <= set(LISTED)
    assert free != expected


@pytest.mark.parametrize("weights", ["plain", "packed", "int8"])
def test_the_product_is_taken_over_the_list_alone(weights: Any, tmp_path: Path) -> None:
    save_pretrained(tiny("marian-tiny", dtype=torch.float32), tmp_path)
    short = Generator(tmp_path, weights=weights, start=0, ends=(END,), shortlist=LISTED)
    head: Any = short.model.head
    assert head.rows.out_features == len(LISTED) + 1
    whole = forbidding(Generator(tmp_path, weights=weights, start=0, ends=(END,)))
    expected = whole.generate(ROWS, max_tokens=8, beams=3)
    assert [each.ids for each in short.generate(ROWS, max_tokens=8, beams=3)] == [
        each.ids for each in expected
    ]


def test_a_list_comes_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers")
    save_pretrained(tiny("gpt", words=Bytes.size, dtype=torch.float32), tmp_path / "model")
    Bytes().save(tmp_path / "model")
    file = tmp_path / "list"
    file.write_text("\n".join(str(ord(letter)) for letter in "abcdef "))
    assert read_shortlist(file) == tuple(map(ord, "abcdef "))
    words = ["generate", str(tmp_path / "model"), "hello", "--max_tokens", "20", "--shortlist", str(file)]
    assert main(words) == 0
    assert set(capsys.readouterr().out) <= set("abcdef \n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1 2 x", "'x' as its entry 3"), ("-1", "entry 1"), ("", "is empty"), ("1 999", "token 999"),
        ("٣", "entry 1"),
    ],
)  # fmt: skip
def test_a_list_that_is_none_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "list").write_text(text)
    with pytest.raises(ConfigError, match=said):
        Generator(tiny("gpt"), shortlist=tmp_path / "list")
