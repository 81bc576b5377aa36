"""A function of the user's own that batches go through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.cli import main
from penstock.config.run import Augment, DataConfig
from penstock.data import image_loader, open_source, per_sample
from penstock.errors import ConfigError


def batch_of(source: Any, *, training: bool, workers: int = 0) -> Any:
    augment = Augment(crop_scale_min=1, flip=0) if training else None
    options = {"batch": 4, "image_size": 8, "classes": 10, "augment": augment, "workers": workers}
    with image_loader(source, **options) as loader:  # type: ignore[arg-type]
        return next(iter(loader))


@pytest.mark.usefixtures("known_machine")
def test_a_function_named_in_the_settings_gets_each_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_of_batches.py").write_text(
        "def negative(images, targets, *, training):\n    return (-images if training else images), targets\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    plain = open_source(DataConfig(), split="train", channels=1)
    mine = open_source(DataConfig(transform="mine_of_batches:negative"), split="train", channels=1)
    torch.testing.assert_close(batch_of(mine, training=True).images, -batch_of(plain, training=True).images)
    torch.testing.assert_close(batch_of(mine, training=False).images, batch_of(plain, training=False).images)
    # Reading processes get a copy of the source, but not the function.
    torch.testing.assert_close(
        batch_of(mine, training=True, workers=1).images, -batch_of(plain, training=True).images
    )
    run = (
        "train vit-digits --recipe.steps 2 --recipe.warmup_steps 0 --data.transform mine_of_batches:negative"
    )
    assert main([*run.split(), "--output", str(tmp_path / "run")]) == 0


def test_a_function_of_samples() -> None:
    seen = []

    @per_sample
    def shifted(
        image: torch.Tensor, target: torch.Tensor, *, training: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(tuple(image.shape))
        return image + target, target

    source = open_source(DataConfig(), split="train", channels=1)
    plain = batch_of(source, training=True)
    source.transform = shifted
    found = batch_of(source, training=True)
    assert set(seen) == {(1, 8, 8)}
    torch.testing.assert_close(found.images, plain.images + plain.targets[:, None, None, None])


@pytest.mark.parametrize(
    "wrong", [lambda x, y, training: x, lambda x, y, training: (x[:1], y), lambda x, y, training: (x, None)]
)
def test_what_is_no_batch_is_said(wrong: Any) -> None:
    source = open_source(DataConfig(), split="train", channels=1)
    source.transform = wrong
    with pytest.raises(
        ConfigError, match=r"data\.transform was given \d+ images and their targets and must return"
    ):
        batch_of(source, training=True)


def test_a_function_that_is_not_there_is_said() -> None:
    with pytest.raises(ConfigError, match=r"data\.transform is 'mine', but must be package\.module:function"):
        DataConfig(transform="mine")
    with pytest.raises(
        ConfigError, match=r"The module no_such_module of the data\.transform .* cannot be imported"
    ):
        open_source(DataConfig(transform="no_such_module:f"), split="train")
    with pytest.raises(ConfigError, match="The module math has no function 'no_such'"):
        open_source(DataConfig(transform="math:no_such"), split="train")
