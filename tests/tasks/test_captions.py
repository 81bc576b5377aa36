"""Batches of images and names in one space, and what an evaluation says of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.config.model import MultimodalConfig
from penstock.config.run import DataConfig
from penstock.config.stack import Stack
from penstock.data.captions import Captions, Pictures
from penstock.tasks import Captioning
from penstock.tasks.captions import _recalls
from penstock.tasks.text import first_samples

_SMALL = Stack(width=16, depth=1, heads=2, mlp_width=32)
CONFIG = MultimodalConfig(
    image_size=8, patch_size=4, channels=1, features=8, sequence=32, writer_sequence=32, vision=_SMALL, text=_SMALL,
    writer=_SMALL,
)  # fmt: skip


def test_recall_is_told_beside_that_of_a_guess() -> None:
    """Of four concepts with two images each, German has names of all, French of two."""
    concepts = np.repeat(np.arange(4), 2)
    images = np.zeros((8, 4, 4, 1), np.uint8)
    names: dict[str, Any] = {"de": ["a", "b", "c", "d"], "fr": ["e", "f", "", ""]}
    source = Captions("made", Pictures(images, concepts, names, concepts >= 0, words=False), "val")
    ones = np.ones((8, 1))
    shown = np.concatenate([np.eye(4)[concepts], ones], axis=1)
    named = np.concatenate([np.eye(4)[source.words.concept], ones[:6]], axis=1)
    found = _recalls(source, shown, named)
    assert found["image_to_text"] == found["text_to_image"] == found["image_to_text_fr"] == 1.0
    # A guess among four names and among two, and for each name among eight images, two of which are right.
    assert found["image_to_text_chance"] == pytest.approx((1 / 4 + 1 / 2) / 2)
    assert found["text_to_image_chance"] == pytest.approx(1 / 4)
    # Names of what is not there are asked for by nobody; alike vectors find the first.
    alike = _recalls(source, np.ones_like(shown), np.ones_like(named))
    assert alike["image_to_text"] == pytest.approx((1 / 4 + 1 / 2) / 2)


def mirrored(images: Tensor, targets: Tensor, *, training: bool) -> tuple[Tensor, Tensor]:
    return images.flip(-1), targets


def test_images_are_of_what_is_named_and_go_through_a_transform() -> None:
    pytest.importorskip("num2words")
    task, made = Captioning(), []
    for transform in (None, f"{__name__}:mirrored"):
        source: Any = task.open(DataConfig(source="captions:en,de", transform=transform), CONFIG, "val")
        made.append(task.prepare(source, CONFIG)(first_samples(source, 6), torch.device("cpu")))
    plain, changed = made
    assert torch.equal(changed.inputs[0], plain.inputs[0].flip(-1))
    pixels = torch.from_numpy(source.pictures.images[source.rows["image"][:6], ..., 0])
    torch.testing.assert_close(plain.inputs[0][:, 0], pixels / 127.5 - 1)
    assert torch.equal(changed.concepts, torch.from_numpy(source.words.concept[source.rows["written"][:6]]))
