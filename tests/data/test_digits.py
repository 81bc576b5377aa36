from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_digits

from penstock.config.run import DataConfig
from penstock.data import open_source


def test_they_are_scikit_learns() -> None:
    real = load_digits()
    train, val = (open_source(DataConfig(), split=split, channels=1) for split in ("train", "val"))
    assert (len(train), len(val)) == (1442, 355)
    counts = np.zeros(10, int)
    is_val = np.zeros(1797, bool)
    for row, digit in enumerate(real.target):
        counts[digit] += 1
        is_val[row] = counts[digit] % 5 == 0
    for source, chosen in ((train, ~is_val), (val, is_val)):
        images, labels = source.read(np.arange(len(source)))
        assert images.dtype == np.uint8
        assert labels.dtype == np.int64
        np.testing.assert_array_equal(np.rint(images[..., 0] / (255 / 16)), real.images[chosen])
        np.testing.assert_array_equal(labels, real.target[chosen])
    assert images.max() == 255
    assert train.classes == tuple("0123456789")


def test_both_splits_know_every_digit() -> None:
    for split, least in (("train", 139), ("val", 34)):
        labels = open_source(DataConfig(), split=split).labels  # type: ignore[arg-type]
        assert np.bincount(labels, minlength=10).min() >= least


@pytest.mark.parametrize("channels", [1, 3])
def test_grey_is_repeated(channels: int) -> None:
    images, _ = open_source(DataConfig(), split="train", channels=channels).read(np.array([5, 0, 5]))
    assert images.shape == (3, 8, 8, channels)
    np.testing.assert_array_equal(images[0], images[2])
    assert (images == images[..., :1]).all()
