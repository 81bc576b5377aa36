"""What an evaluation says of images and names in one space."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.data.captions import Captions, Pictures
from penstock.tasks.captions import _recalls


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
