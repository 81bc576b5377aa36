"""Digits of the npm package and emoji of a colour font are trained on as the how-to says, where there are any."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.real_data import EMOJI, MNIST, needs_emoji, needs_mnist
from penstock import Captioner, Embedder, ImageGenerator
from penstock.cli import main
from penstock.train.metrics import read_metrics


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


@needs_emoji
def test_emoji_are_learned_in_the_languages_of_a_folder(tmp_path: Path) -> None:
    font, _, names = EMOJI.rpartition(",")
    languages = ("de", "en", "fi", "hi", "ja", "sw")
    some, run = tmp_path / "names", tmp_path / "run"
    some.mkdir()
    for language in languages:
        (some / language).symlink_to(Path(names).resolve() / language)
    words = ["--model.image_size", "32", "--model.patch_size", "8", "--model.channels", "3"]
    words += ["--model.sequence", "64", "--model.writer_sequence", "72", "--model.vision.depth", "1"]
    words += ["--model.text.depth", "1", "--model.writer.depth", "1", "--recipe.steps", "3"]
    words += ["--plan.micro_batch", "16", "--output", str(run)]
    assert main(["train", "multimodal-tiny", "--data.source", f"emoji:{font},{some}", *words]) == 0
    (last,) = (one for one in read_metrics(run / "metrics.jsonl") if one["event"] == "evaluation")
    # Images of a tenth of the emoji are searched by names that training never saw.
    assert {f"image_to_text_{language}" for language in languages} <= set(last)
    assert 0.002 < last["image_to_text_chance"] < 0.02
    assert Embedder(run).embed(["red apple"]).shape == (1, 32)
    assert len(Captioner(run).translate(["red apple"], "de")) == 1
