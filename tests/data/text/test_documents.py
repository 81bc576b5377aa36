"""What is read of files, and what happens with those that are broken: file and line are named."""

from __future__ import annotations

import bz2
import gzip
import json
import logging
import lzma
import re
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.boundary import archives
from penstock.boundary.text import LINE_BYTES, read_json_texts, read_lines
from penstock.config.run import DataConfig
from penstock.data.splits import split_files
from penstock.data.text.build import Bad, RowOrBad, Shape, TextRow
from penstock.data.text.columns import TextColumns
from penstock.data.text.documents import files_of, read_files
from penstock.data.text.rows import open_rows
from penstock.data.text.sources import TextPacking, pack_text
from penstock.data.text.tokenizers import Bytes
from penstock.data.text.tokens import open_tokens
from penstock.errors import ConfigError, DataError, EnvironmentProblem

DOCUMENTS = TextColumns("document", (), Shape(form="documents"))
PAIRS = TextColumns("pair", (), Shape(form="rows", fields=2, labels=True))
SINGLE = TextColumns("single", (), Shape(form="rows", labels=True))


def found(path: Path, columns: TextColumns = DOCUMENTS) -> list[RowOrBad]:
    return list(read_files([path], columns))


def texts(path: Path, columns: TextColumns = DOCUMENTS) -> list[tuple[str, ...]]:
    return [row.texts for row in found(path, columns) if isinstance(row, TextRow)]


def problems(path: Path, columns: TextColumns = DOCUMENTS) -> list[tuple[int, str]]:
    return [(row.line, row.why) for row in found(path, columns) if isinstance(row, Bad)]


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_files_are_read_plain_and_compressed(tmp_path: Path, pack: object) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(pack("\ufeffeins\r\nzwei ü\n".encode()))  # type: ignore[operator]
    assert texts(path) == [("eins\nzwei ü\n",)]


def test_a_long_file_comes_in_pieces_of_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a line of text\n" * 30_000)
    rows = [row for row in found(path) if isinstance(row, TextRow)]
    assert len(rows) > 2
    assert [row.more for row in rows] == [True] * (len(rows) - 1) + [False]
    assert "".join(row.texts[0] for row in rows) == path.read_text()
    assert all(len(row.texts[0]) < 1 << 18 for row in rows)


def test_folders_patterns_and_splits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = "b/train-2.txt a/train-1.jsonl.gz dev.txt test.txt .hidden.txt c.png notes.md"
    for name in names.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    caplog.set_level(logging.INFO)
    files = files_of(str(tmp_path))
    assert " ".join(file.name for file in files) == "train-1.jsonl.gz train-2.txt dev.txt notes.md test.txt"
    assert "1 files of other kinds were left out" in caplog.text
    train, val = split_files(files, str(tmp_path))
    assert [file.name for file in train] == ["train-1.jsonl.gz", "train-2.txt"]
    assert [file.name for file in val] == ["dev.txt"]
    assert [file.name for file in files_of(f"{tmp_path}/*/*.txt")] == ["train-2.txt"]
    assert split_files([tmp_path / "training.txt"], str(tmp_path)) == [[tmp_path / "training.txt"]]
    with pytest.raises(DataError, match="No file in"):
        files_of(f"{tmp_path}/*.tsv")


def test_broken_utf_8_is_named_by_line_and_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"good\nbad \xc3\x28\ngood\nNUL \0\n")
    assert problems(path) == [
        (
            2,
            "it is not text in UTF-8: byte 5 is 0xc3, which is Ã in Latin-1; if that is right, set data.encoding to "
            "latin-1 or cp1252",
        ),
        (4, "it holds the character NUL, so it is no text"),
    ]
    assert texts(path) == [("good\ngood\n",)]


def test_a_line_that_is_too_long_is_passed_over_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "one"}\n{"text": "')
        for _ in range(40):
            file.write(b"x" * (1 << 20))
        file.write(b'"}\n{"text": "three"}\n')
    peak = _peak_of(lambda: found(path))
    assert peak < 3 * LINE_BYTES
    assert texts(path) == [("one",), ("three",)]
    (problem,) = problems(path)
    assert problem[0] == 2
    assert "it has 41,943,0" in problem[1]
    assert "at most 16,777,216 are read of a line" in problem[1]


@pytest.mark.sweep
def test_a_line_of_two_gigabytes_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with path.open("wb") as file:
        file.write(b"one\n")
        file.truncate(2 << 30)
    assert _peak_of(lambda: found(path)) < 3 * LINE_BYTES
    assert [line.number for line in read_lines(path, "The text file")] == [1, 2]


@pytest.mark.parametrize("separator", [";", "|", "tab", ":"])
def test_cells_are_separated_as_is_said(tmp_path: Path, separator: str) -> None:
    path, data = tmp_path / "a.csv", DataConfig(separator=separator)
    mark = "\t" if separator == "tab" else separator
    quoted = "Is it, now?" if separator == "tab" else f'"Is it{mark} now?"'
    path.write_text(f"text{mark}label\nAll is well.{mark}good\n{quoted}{mark}bad\n")
    columns = replace(SINGLE, separator=data.separator)
    rows = [row for row in read_files([path], columns) if isinstance(row, TextRow)]
    assert [row.label for row in rows] == ["good", "bad"]
    assert rows[1].texts[0] == quoted.strip('"')
    with pytest.raises(
        DataError, match=f"set data.separator to '{re.escape(separator)}'" if mark != ":" else "Name 2"
    ):
        list(read_files([path], replace(columns, separator="auto")))


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "utf-16-le", "cp1252", "shift_jis", "utf-8-sig"])
def test_files_in_other_encodings_are_read(tmp_path: Path, encoding: str) -> None:
    lines = [
        "Grüße aus Köln" if encoding != "shift_jis" else "日本語の文",
        "ĊĀ" if "utf" in encoding else "x",
        "end",
    ]
    for name, content in (("a.txt", (t := "\r\n".join(lines))), ("b.txt.gz", t)):
        raw = content.encode(encoding)
        (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
        read = list(read_lines(tmp_path / name, "The text file", encoding=encoding))
        assert [line.text for line in read] == lines
        assert [line.number for line in read] == [1, 2, 3]


@pytest.mark.parametrize(
    ("raw", "hint"),
    [("grün".encode("latin-1"), "0xfc, which is ü in Latin-1; if that is right, set data.encoding to latin-1"),
     ("grün".encode("utf-16"), "begins as UTF-16 does; set data.encoding to utf-16"),
     ("grn".encode("utf-16-le"), "the character NUL, as UTF-16 does")],
)  # fmt: skip
def test_the_likely_encoding_is_named(tmp_path: Path, raw: bytes, hint: str) -> None:
    (tmp_path / "a.txt").write_bytes(raw)
    assert hint in next(read_lines(tmp_path / "a.txt", "The text file")).problem


def test_what_another_encoding_lacks_ends_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc")  # half a letter at its end
    (line,) = read_lines(tmp_path / "a.txt", "The text file", encoding="utf-16-le")
    assert "it is not text in utf-16-le" in line.problem
    with pytest.raises(ConfigError, match="must be a text encoding that Python knows"):
        DataConfig(encoding="zip")
    with pytest.raises(ConfigError, match="must be auto, tab, or one character"):
        DataConfig(separator="; ")


def _peak_of(action: object) -> int:
    tracemalloc.start()
    action()  # type: ignore[operator]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_a_decompression_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "_FREE_BYTES", 1 << 20)
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"x" * 100 + b"\n" + bytes(30 << 20)))
    (problem,) = problems(path)
    assert problem[0] == 2
    assert "as only a zip bomb does" in problem[1]
    path.write_bytes(gzip.compress(b"some text\n" * 1000)[:-20])
    (problem,) = problems(path)
    assert "cannot be read further: it ends inside its compressed data" in problem[1]


def test_an_empty_file_is_bad(tmp_path: Path) -> None:
    for name in ("a.txt", "b.jsonl", "c.tsv", "d.txt.gz"):
        path = tmp_path / name
        path.write_bytes(gzip.compress(b"") if name.endswith("gz") else b"")
        assert problems(path) == [(0, "it is empty")]
    with pytest.raises(DataError, match=r"a.txt cannot be used: it is empty.*bad_rows"):
        pack_text(f"text:{tmp_path}/a.txt", tmp_path / "packed")


def test_json_lines_with_holes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"text": "a"}\n[1]\n{"label": 1}\n{"text": 5}\n{"text": null}\n{"text": "b"\n{"text": "c", "x": 1}\n'
    )
    assert texts(path) == [("a",), ("c",)]
    lines = problems(path)
    assert [line for line, _ in lines] == [2, 3, 4, 5, 6]
    assert [why for _, why in lines[1:4]] == [
        "the column 'text' is missing",
        "the column 'text' is int, not text",
        "the column 'text' is empty",
    ]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 1 << 16])
@pytest.mark.parametrize("indent", [None, 1])
def test_a_list_in_json_is_read_element_by_element(
    chunk: int, indent: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As data sets of instructions are stored: one list in a file, on one line or on many."""
    monkeypatch.setattr("penstock.boundary.text._CHUNK", chunk)
    said = ['a "quoted" word', "[, {", "\\", 'ends with \\"', "ü, 雪", "]}"]
    rows = [{"text": text, "of": [{"a": [1, {}]}, "]"]} for text in said]
    for name, encoding in (("a.json", "utf-8-sig"), ("b.json", "utf-16"), ("c.jsonl", "utf-8")):
        (tmp_path / name).write_text(json.dumps(rows, indent=indent, ensure_ascii=False), encoding=encoding)
        columns = replace(DOCUMENTS, encoding="utf-16" if encoding == "utf-16" else "utf-8")
        assert texts(tmp_path / name, columns) == [(text,) for text in said]
    (tmp_path / "d.json.gz").write_bytes(
        gzip.compress(json.dumps([rows[0], 5, rows[1]], indent=indent).encode())
    )
    assert texts(tmp_path / "d.json.gz") == [(said[0],), (said[1],)]
    assert [line for line, _ in problems(tmp_path / "d.json.gz")] == [2]


def test_lists_in_json_that_are_broken_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for content, expected in (
        ('[{"text": "a"}, {"text": "b"', "the list that the file begins with does not end"),
        ('[{"text": "a"}]\n{"text": "b"}', "text follows the list"),
        ('[{"text": "a"}, {"text": "b}]', "does not end"),
        ("[]", "it is empty"),
    ):
        path.write_text(content)
        assert expected in problems(path)[-1][1]
        assert texts(path) == [("a",)] * (content != "[]")
    path.write_text('[{"text": "' + "x" * 200_000 + '"}, {"text": "b"}]')
    long, short = read_json_texts(path, "The text file", longest=1000)
    assert (long.number, long.text, short.text) == (1, "", '{"text": "b"}')
    assert "it has 200,012 bytes, and at most 1,000 are read" in long.problem


def test_tables_with_missing_columns_and_labels(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text(
        "premise\thypothesis\tlabel\na\tb\tyes\na\tb\na\t\tno\na\tb\t-\na\tb\tno\tmore\nc\td\tno\n"
    )
    assert texts(path, PAIRS) == [("a", "b"), ("c", "d")]
    assert problems(path, PAIRS) == [
        (3, "it has 2 columns instead of 3"),
        (4, "the column 'hypothesis' is empty"),
        (5, "the column 'label' holds no label: '-'; if that is a class, set data.all_labels to true"),
        (6, "it has 4 columns instead of 3"),
    ]
    path.write_text("one\ttwo\n1\t2\n")
    with pytest.raises(
        DataError,
        match=r"no known columns of text and second text and label; its columns are 'one, two'\. Name 3 with "
        r"data\.columns; where the first line holds no names, by number: data\.columns=1,2,3\.",
    ):
        found(path, PAIRS)


def test_csv_with_quotes(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('text,label\n"two\nlines, ""quoted""",1\n"never closed,2\nb,3\n')
    assert texts(path, SINGLE) == [('two\nlines, "quoted"',)]
    assert problems(path, SINGLE) == [(4, "a quotation mark is opened and never closed")]
    path.write_text('text,label\n5" pipe,1\n"a, b",2\n')
    assert texts(path, SINGLE) == [('5" pipe',), ("a, b",)]


def test_names_with_dots_are_columns_or_lead_into_tables(tmp_path: Path) -> None:
    columns, path = replace(SINGLE, wanted=("text.en", "label")), tmp_path / "a.csv"
    path.write_text("text.en,label\na,1\n")
    (tmp_path / "a.jsonl").write_text('{"text.en": "a", "label": 1}\n{"text": {"en": "b"}, "label": 1}\n')
    assert (texts(path, columns), texts(tmp_path / "a.jsonl", columns)) == ([("a",)], [("a",), ("b",)])
    path.write_text("text,label\na,1\n")
    for wanted in ("text.en", "0", "²"):
        with pytest.raises(DataError, match=f"lacks '{wanted}', '1'; its columns are 'text, label'"):
            texts(path, replace(SINGLE, wanted=(wanted, "1")))


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(
        pyarrow.table({"text": ["a", None, "c"], "label": [1, 2, None], "other": [1, 2, 3]}), path
    )
    assert texts(path) == [("a",), ("c",)]
    assert problems(path) == [(2, "the column 'text' is empty")]
    assert problems(path, SINGLE) == [
        (2, "the column 'text' is empty"),
        (3, "the column 'label' holds no label: 'None'"),
    ]
    path.write_bytes(path.read_bytes()[:-30])
    assert "the file cannot be read further" in problems(path)[0][1]


def test_parquet_without_pyarrow_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(EnvironmentProblem, match=r"pip install 'penstock\[hf\]'"):
        found(tmp_path / "a.parquet")


def test_bad_rows_are_left_out_up_to_one_percent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.jsonl"
    good = '{"text": "some text"}\n'
    path.write_text(good * 150 + "broken\n" + good * 150)
    manifest = pack_text(f"text:{path}", tmp_path / "packed", TextPacking(bad_rows="skip"))
    assert (manifest.parts[0].rows, manifest.parts[0].skipped) == (300, 1)
    assert f"Left out {path}, line 151: " in caplog.text
    with pytest.raises(DataError, match=r"a.jsonl, line 151 cannot be used.*out with data\.bad_rows=skip"):
        pack_text(f"text:{path}", tmp_path / "other")
    path.write_text((good * 9 + "broken\n") * 10)
    with pytest.raises(DataError, match=r"10 of 100 rows are bad, more than 1%"):
        pack_text(f"text:{path}", tmp_path / "other", TextPacking(bad_rows="skip"))


def test_a_dataset_that_was_saved_and_one_that_streams(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])}
    )
    rows = {"text": [f"text {n}" for n in range(300)], "label": [n % 2 for n in range(300)]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "saved")
    data = DataConfig(source=f"hf:{tmp_path / 'saved'}")
    source = open_rows(data, Bytes(), "train", form="single", length=16)
    assert source.classes == ("bad", "good")
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(f'{{"text": "text {n}"}}\n' for n in range(300)))
    data = DataConfig(source=f"hf:{folder}", streaming=True, limit=40)
    tokens = open_tokens(data, Bytes(), "train", length=8)
    assert tokens.tokens == 10 * 7 + 30 * 8 - (10 * 7 + 30 * 8) // 20
