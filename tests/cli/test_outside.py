"""Every verb against inputs that are no files and outputs that take none: a sentence with the path, and its code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.images import write_folder
from penstock.boundary.files import explained, printable, require_folder, write_text
from penstock.cli import _VERBS, main
from penstock.errors import EnvironmentProblem, ExitCode

KINDS: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo, "dangling": lambda path: path.symlink_to("nowhere"),
    "zero": lambda path: path.symlink_to("/dev/zero"), "circle": lambda path: path.symlink_to(path.name),
}  # fmt: skip
INPUTS = [
    "train vit-digits --data.source imagefolder:it", "train vit-digits --data.source pack:it",
    "train vit-digits --init_from it.safetensors", "scale vit-digits --init_from it.safetensors", "pack it.tar made",
    "pack it made", "pack it --verify", "checkpoint verify it", "checkpoint list it", "checkpoint export it made",
    "launch -- it.py", "train --config it.toml", "ladder --config it.yaml", "scale --config it.json",
    "plan --config it.json", "plan gpt2 --gpus 8 --machine it.toml",
    "plan mixtral-8x7b --gpus 8 --machine h100 --loads it.json", "experts it.json", "deploy gpt2 --machine it.toml",
    "deploy gpt2 --requests it.jsonl", "serve it --port 0", "generate it once", "embed it once", "classify it once",
    "evaluate it --data digits", "report it", "sample it --grid made", "retrieve it --text once --images it",
    "export it made", "compress it --prune.layers 0.5", "compress vit-digits --recipe it.toml",
]  # fmt: skip
NO_INPUT = {"completion", "run", "tune", "tune-kernels", "probe", "doctor"}
"""Verbs that read no file that a user names; `run` and `tune` read a script as Python does, which may be a pipe."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("line", INPUTS)
def test_an_input_that_is_no_file_is_refused_at_once(
    line: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("penstock.probe.probe", None)  # which takes seconds
    words = line.split()
    named = next(word.rpartition(":")[2] for word in words if word.rpartition(":")[2].startswith("it"))
    KINDS[kind](tmp_path / named)
    code = main(words)
    said = capsys.readouterr().err
    assert code in (ExitCode.CONFIG, ExitCode.ENVIRONMENT, ExitCode.DATA, ExitCode.CHECKPOINT), said
    assert named in said
    assert said.startswith("penstock: ")
    assert not (tmp_path / "made").exists()


def test_every_verb_is_tried() -> None:
    tried = {line.split()[0] for line in (*INPUTS, *OUTPUTS)}
    assert tried | NO_INPUT >= {*_VERBS, "checkpoint"}


OUTPUTS = [
    "train vit-digits --output {out}", "ladder vit-digits --quick --output {out}",
    "scale vit-digits --output {out}",
    "plan vit-s16 --gpus 8 --machine h100 --html {out}", "probe --output {out}.toml", "pack {set} {out}",
    "checkpoint export {run} {out} --names plain",
]  # fmt: skip
PROGRAM = """
import contextlib, io, json, os, sys
import penstock, penstock.probe
from penstock.cli import main

penstock.probe.probe = lambda *_, **__: penstock.load_machine("h100")
lines, ended = json.loads(sys.argv[1]), []
for line in lines:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = main(line.split())
    ended.append((code, said.getvalue()))
print(json.dumps(ended))
"""


@pytest.mark.slow
def test_an_output_that_takes_nothing_ends_every_verb_with_3(tmp_path: Path) -> None:
    """On a disk that is read-only, and on one that is full."""
    from helpers.checkpoints import numbered
    from penstock import checkpoint

    disks = {tmp_path / "fixed": "read-only", tmp_path / "filled": "disk is full|no space left"}
    for disk in disks:
        disk.mkdir()
    made = tmp_path / "run" / "checkpoints"
    checkpoint.save(made, numbered(2))
    images = write_folder(tmp_path / "set", per_class=1)
    lines = {
        line.format(out=disk / "out", set=images, run=made.parent): disk for disk in disks for line in OUTPUTS
    }
    mount = (
        'mount -t tmpfs -o ro tmpfs "$1"; mount -t tmpfs -o nr_inodes=2 tmpfs "$2"; touch "$2/full"; shift 2; '
        'exec "$@"'
    )
    program = [sys.executable, "-c", PROGRAM, json.dumps(list(lines))]
    ended = subprocess.run(
        ["unshare", "-Urm", "sh", "-ec", mount, "sh", *map(str, disks), *program],
        capture_output=True, text=True, timeout=250, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if "unshare" in ended.stderr or "mount:" in ended.stderr:
        pytest.skip("no file system can be mounted here")
    assert ended.returncode == 0, ended.stderr
    for (line, disk), (code, said) in zip(
        lines.items(), json.loads(ended.stdout.splitlines()[-1]), strict=True
    ):
        assert code == ExitCode.ENVIRONMENT, (line, code, said)
        assert str(disk) in said, (line, said)
        assert re.search(disks[disk], said, re.IGNORECASE), (line, said)
        assert "Traceback" not in said, (line, said)


def test_a_full_standard_output_is_told_by_one_line() -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "penstock", "plan", "vit-s16", "--gpus", "8", "--machine", "h100"],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=250,
        )  # fmt: skip
    assert ended.returncode == ExitCode.ENVIRONMENT
    assert ended.stderr == (
        "penstock: Standard output or a file cannot be read or written: the disk is full. "
        "Free space, or choose a path on another disk.\n"
    )


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "file.txt"
    write_text(path, "grün")
    assert path.read_text(encoding="utf-8") == "grün"
    link = tmp_path / "link"
    link.symlink_to(path)
    write_text(link, "two")
    assert link.is_symlink()
    assert path.read_text() == "two"
    with pytest.raises(EnvironmentProblem, match="/dev/full cannot be written: the disk is full"):
        write_text("/dev/full", "x" * 100_000)
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert path.read_text() == "two"
    assert os.listdir(path.parent) == ["file.txt"]
    write_text("/dev/null", "x")
    (path.parent / ".penstock-8f3a").touch()  # as a kill in the middle leaves one
    write_text(path, "three")
    assert os.listdir(path.parent) == ["file.txt"]


def test_errors_of_the_system_are_explained_and_others_are_not(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError) as caught:  # the kind is the point
        require_folder(tmp_path / "file" / "below")
    told = explained(caught.value)
    assert str(told) == (
        f"{tmp_path / 'file' / 'below'} cannot be read or written: a part of its path is a file, not a folder. "
        "Check the path."
    )
    assert explained(ConnectionRefusedError(111, "Connection refused")) is None
    assert explained(OSError("a library's own")) is None
    assert printable("a\x1b[2Jb\nc\u202e") == "a\\x1b[2Jb\nc\\u202e"
