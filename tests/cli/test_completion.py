"""Scripts of completion: each names the verbs and their options, and bash completes with its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli import main


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_names_verbs_and_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("penstock", "train", "ladder", "completion", "recipe.lr", "budget"):
        assert word in script
    if found := shutil.which(shell):
        check = subprocess.run([found, "-n", "/dev/stdin"], input=script, text=True, capture_output=True)
        assert check.returncode == 0, check.stderr


def test_bash_completes(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    # In a process of its own, as a shell starts it: pages of help in this one leave verbs with fewer options.
    words = [sys.executable, "-m", "penstock", "completion", "bash"]
    (tmp_path / "completion").write_text(
        subprocess.run(words, text=True, capture_output=True, check=True).stdout
    )
    asks = 'COMP_WORDS=({0}); COMP_CWORD={1}; COMPREPLY=(); _penstock; echo "${{COMPREPLY[@]}}"'
    lines = [f"source {tmp_path / 'completion'}", asks.format("penstock tr", 1)]
    lines.append(asks.format("penstock train --recipe.lora.r", 2))
    done = subprocess.run([bash, "-c", "\n".join(lines)], text=True, capture_output=True, check=True)
    assert done.stdout.split() == ["train", "--recipe.lora.rank"]


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert '"bash", "zsh", "fish"' in capsys.readouterr().err
