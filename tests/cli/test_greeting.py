"""The greeting of the bare command."""

from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.cli import GREETING, main


def test_the_bare_command_greets_with_four_things_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    told = capsys.readouterr().out
    assert told == f"{GREETING}\n"
    assert [line.split()[1] for line in told.splitlines() if line.startswith("  penstock ")] == [
        "train", "tune", "ladder", "plan",
    ]  # fmt: skip
    assert all(len(line) <= 80 for line in told.splitlines())


def test_the_greeting_loads_as_little_as_help_does() -> None:
    program = "import sys; from penstock.cli import main; main([]); print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}
    assert loaded.isdisjoint({"torch", "numpy"})
