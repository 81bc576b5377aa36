"""A new kind of input from outside needs a door: what reads files or parses text stands in `boundary/`, or here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "penstock"

READS = {
    "open", "io.open", "os.open", "io.open_code", "read_text", "read_bytes", "json.load", "json.loads", "tomllib.load",
    "tomllib.loads", "yaml.load", "yaml.safe_load", "safe_open", "load_file", "tarfile.open", "zipfile.ZipFile",
    "Image.open", "np.load", "np.memmap", "np.fromfile", "numpy.load", "numpy.memmap", "np.loadtxt", "mmap.mmap",
    "torch.load", "gzip.open", "bz2.open", "lzma.open", "csv.reader", "pickle.load", "pickle.loads",
}  # fmt: skip
"""Calls that take something in, by their last one or two words; a method `open` is one unless it is told to write."""

ELSEWHERE = {
    "checkpoint/commit.py": "the name that `latest` holds is compared with the one to be written",
    "checkpoint/manifest.py": "a manifest, whose own fields and seal are checked where it is read",
    "checkpoint/reader.py": "documents of a checkpoint, after every byte of it was checked against its manifest",
    "checkpoint/rewrite.py": "documents of a checkpoint, after every byte of it was checked against its manifest",
    "checkpoint/storage.py": "tensors of a checkpoint, after every byte of it was checked against its manifest",
    "kernels/native/__init__.py": "this package's own C++ source, for its hash",
    "cli/__init__.py": "opens /dev/null",
    "cli/_script.py": "the user's own script, which is read as Python reads it, and is run",
    "cli/retrieve.py": "images that were checked when they were read, to be drawn",
    "compress/data.py": "opens a task's samples",
    "compress/measure.py": "opens a model's folder by `from_pretrained`",
    "compress/steps.py": "opens models' folders by `from_pretrained`",
    "compress/run.py": "opens models' folders by `from_pretrained`",
    "config/load.py": "parses what the reader of files has read",
    "config/machine.py": "machines that come with the package",
    "config/shipped.py": "tables that come with the package",
    "config/plan.py": "parses text that is given in the call",
    "data/decode.py": "decoders, after `check_image`",
    "data/toy/digits.py": "images that come with the package",
    "data/pack.py": "files whose sizes and sums the pack's manifest gives, which is checked first",
    "data/pool.py": "its own worker's pipe",
    "data/text/build.py": "conversations that it has written itself",
    "data/text/chat.py": "a cell of a row whose length is limited",
    "data/text/documents.py": "cells of a row whose length is limited",
    "data/text/messages.py": "a cell of a row whose length is limited",
    "data/text/sources.py": "a lock of its own",
    "disk.py": "files to be hashed, which must be regular",
    "ladder/arena.py": "/proc/stat",
    "ladder/result.py": "JSON that it has written itself",
    "ladder/rank.py": "its own climb's pipe",
    "ladder/team.py": "its own ranks' pipe and log",
    "launch/local.py": "messages of a process that this one has started, or that has started this one",
    "launch/heartbeat.py": "the launcher's own file, of a fixed size",
    "launch/meeting.py": "what the launchers of the run's other nodes say",
    "launch/ranks.py": "what its own ranks wrote, and /proc",
    "launch/report.py": "what its own rank wrote",
    "launch/worker.py": "a file to write to",
    "leftovers.py": "locks of its own runs",
    "models/convert/files.py": "weights, whose names and shapes are compared with the model's",
    "planner/prediction.py": "figures that come with the package",
    "precision/settings.py": "/proc/cpuinfo",
    "probe/rates.py": "anonymous memory",
    "report/page.py": "a style and a script that come with the package",
    "report/record.py": "/proc and /sys",
    "serve/backend.py": "messages of its own worker",
    "train/lock.py": "its own lock: at most 4,096 bytes",
    "train/metrics.py": "what its own run wrote before",
    "train/step_table.py": "a trace that torch's profiler has just written",
    "tune/process.py": "messages and the output of a process that it has started itself",
}
"""Where something is read outside `boundary/`, and why that is no door of its own."""


def _readers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        last = called.rpartition(".")[2]
        two = ".".join(called.split(".")[-2:])
        mode = next((k.value for k in node.keywords if k.arg == "mode"), None)
        given = [*node.args, *([mode] if mode else [])]
        writes = any(
            isinstance(a, ast.Constant) and a.value in ("w", "a", "x", "wb", "ab", "xb") for a in given
        )
        attribute = isinstance(node.func, ast.Attribute)
        own = (
            last in ("read_text", "read_bytes") and not attribute
        )  # those of the boundary are called by name
        method = attribute and last == "open" and not called.endswith("task.open")
        if (
            (called == "open" or two in READS - {"open"} or last in READS - {"open"} or method)
            and not writes
            and not own
        ):
            yield node.lineno, called


def test_whatever_reads_stands_in_the_boundary_or_says_why_not() -> None:
    found = {}
    for path in SOURCE.rglob("*.py"):
        where = path.relative_to(SOURCE).as_posix()
        if not where.startswith("boundary/"):
            found[where] = list(_readers(ast.parse(path.read_text(encoding="utf-8"))))
    new = {where: calls for where, calls in found.items() if calls and where not in ELSEWHERE}
    assert not new, f"read through penstock.boundary, or say in ELSEWHERE why this is no door: {new}"
    assert set(ELSEWHERE) <= set(found), "a file of that name is gone"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("open(path)", 1), ("open(path, 'rb')", 1), ("open(path, 'w')", 0), ("Path(x).open()", 1),
        ("path.open('ab')", 0), ("path.read_text(encoding='utf-8')", 1), ("json.loads(text)", 1),
        ("json.dumps(text)", 0), ("numpy.load(path)", 1), ("np.load(path)", 1), ("Image.open(path)", 1),
        ("read_bytes(path, 'The file', limit=3)", 0),
    ],
)  # fmt: skip
def test_the_check_sees(text: str, count: int) -> None:
    assert len(list(_readers(ast.parse(text)))) == count
