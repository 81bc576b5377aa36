"""Digits of the npm package are trained on as the how-to says, where they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.real_data import MNIST, needs_mnist
from penstock import ImageGenerator
from penstock.cli import main


@needs_mnist
@pytest.mark.parametrize(("size", "patch"), [(14, 2), (28, 4)])
def test_larger_digits_are_learned_and_made(size: int, patch: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["--model.image_size", str(size), "--model.patch_size", str(patch), "--model.depth", "1"]
    words += ["--recipe.steps", "3", "--plan.micro_batch", "16", "--output", str(run)]
    assert main(["train", "ddigits-tiny", "--data", f"mnist:{MNIST}", *words]) == 0
    images = ImageGenerator(run).sample(["3", "8"], steps=2)
    assert images.shape == (2, 1, size, size)
    grid = tmp_path / "grid.png"
    assert (
        main(["sample", str(run), "--label", "3", "--count", "2", "--steps", "2", "--grid", str(grid)]) == 0
    )
    assert grid.is_file()
