"""Image classification: its loss, its metrics, and what of the model follows the data."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.build import build
from penstock.config.model import PRESETS, ViTConfig
from penstock.config.plan import Plan
from penstock.config.run import DataConfig
from penstock.data import Batch
from penstock.errors import ConfigError
from penstock.tasks import ImageClassification, classification_loss

TASK = ImageClassification()
TINY = ViTConfig(image_size=8, patch_size=4, channels=1, width=16, depth=1, heads=2, mlp_width=16, classes=10)


def _batch(*, soft: bool = False) -> Batch:
    targets = torch.randint(0, 4, (4,))
    shown = F.one_hot(targets, 4).to(torch.bfloat16) if soft else targets
    return Batch(torch.randn(4, 1, 8, 8), shown, np.arange(4))


def test_the_loss_takes_what_loaders_and_libraries_give() -> None:
    @dataclass
    class Output:
        logits: Tensor

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    wrapped: Any = lambda images: Output(model(images))  # noqa: E731
    hard = _batch()
    soft = Batch(hard.images, F.one_hot(hard.targets, 4).to(torch.bfloat16), hard.ids)
    expected = F.cross_entropy(model(hard.images), hard.targets)
    torch.testing.assert_close(classification_loss(model, hard), expected)
    torch.testing.assert_close(classification_loss(model, soft), expected)
    torch.testing.assert_close(classification_loss(model, (hard.images, hard.targets)), expected)
    mapping = {"pixel_values": hard.images, "labels": hard.targets}
    torch.testing.assert_close(classification_loss(wrapped, mapping), expected)


def test_a_task_and_a_function_train_alike() -> None:
    def own(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch.images).float(), batch.targets)

    batch = _batch()
    built = [build(TINY, Plan(), loss=loss) for loss in (TASK, own, None)]
    losses = [[float(each.step([batch, batch]).loss) for _ in range(2)] for each in built]
    assert losses[0] == losses[1] == losses[2]


def test_a_default_number_of_classes_follows_the_data_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = ViTConfig(image_size=16)
    with caplog.at_level(logging.WARNING):
        assert TASK.fit(model, TASK.open(DataConfig(), model, "train")) == replace(model, classes=10)
    assert "model.classes is set to 10" in caplog.text


def test_a_chosen_number_of_classes_must_be_the_datas() -> None:
    model = replace(PRESETS["vit-digits"], classes=12)
    with pytest.raises(ConfigError, match=r"Set model\.classes to 10"):
        TASK.fit(model, TASK.open(DataConfig(), model, "train"))


def test_metrics_are_told_in_words() -> None:
    said = TASK.describe({"top1": 0.975, "top5": 0.999, "loss": 0.1})
    assert said == "top-1 97.50%  top-5 99.90%  loss 0.1000"
    assert "loss not finite" in TASK.describe({"top1": 0.1, "top5": 0.5, "loss": None})
    assert TASK.describe_model(TINY) == "10 classes"


def test_only_images_are_classified() -> None:
    with pytest.raises(ConfigError, match=r"model\.family is decoder, but only a vit takes images"):
        TASK.open(DataConfig(), PRESETS["gpt2"], "train")
