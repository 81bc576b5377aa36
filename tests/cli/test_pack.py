from __future__ import annotations

from pathlib import Path

import pytest

from helpers.images import write_folder
from penstock.cli import main
from penstock.config.run import DataConfig
from penstock.data import open_source


def test_packing_and_verifying_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, target = write_folder(tmp_path / "set", per_class=10), tmp_path / "pack"
    assert main(["pack", str(folder), str(target), "--size", "32", "--format", "raw"]) == 0
    said = capsys.readouterr().out
    assert "20 images of 2 classes" in said
    assert f"--data.source pack:{target}" in said
    assert len(open_source(DataConfig(source=f"pack:{target}"), split="train")) == 16
    assert main(["pack", str(target), "--verify"]) == 0
    assert "is whole" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (["{set}"], 2, "penstock pack SOURCE TARGET"),
        (["{set}", "{set}"], 4, "exists already"),
        (["{set}/nowhere", "{set}/pack"], 4, "does not exist"),
        (["{set}", "{set}/pack", "--size", "0"], 2, "size is 0, but must be at least 1"),
        (["{set}", "{set}/pack", "--verify"], 2, "give the packed set alone"),
        (["{set}", "--verify"], 4, "is no packed set"),
        (["{set}", "--verify", "--quality", "80"], 2, "give the packed set alone"),
    ],
)
def test_mistakes_end_with_their_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, why: str
) -> None:
    folder = write_folder(tmp_path / "set", per_class=1)
    assert main(["pack", *(argument.format(set=folder) for argument in arguments)]) == code
    assert why in capsys.readouterr().err


def test_a_bad_image_ends_with_code_4_and_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path / "set", per_class=2)
    (folder / "dog" / "0001.jpg").write_bytes(b"\xff\xd8\xff")
    assert main(["pack", str(folder), str(tmp_path / "pack")]) == 4
    assert str(folder / "dog" / "0001.jpg") in capsys.readouterr().err
