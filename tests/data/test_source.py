from __future__ import annotations

import numpy as np
import pytest

from penstock.config.run import DataConfig
from penstock.data import open_source
from penstock.data.source import BadSample, ImageSource, Pixels, Tally, is_val, stored_size
from penstock.errors import ConfigError, DataError, ExitCode


class Numbers(ImageSource):
    """Image i is filled with i; those listed are bad."""

    def __init__(self, samples: int, bad: set[int], policy: str) -> None:
        self.name, self.classes, self.size, self.channels = "numbers", ("a", "b"), 4, 3
        self.labels = np.arange(samples) % 2
        self.bad_samples = policy  # type: ignore[assignment]
        self._bad = bad

    def load(self, index: int, out: Pixels) -> None:
        if index in self._bad:
            raise BadSample(f"number/{index}.jpg", "it is a test")
        out[...] = index


def test_reading_gives_images_and_labels() -> None:
    images, labels = Numbers(10, set(), "fail").read(np.array([3, 3, 8]))
    assert images.shape == (3, 4, 4, 3)
    assert images[:, 0, 0, 0].tolist() == [3, 3, 8]
    assert labels.tolist() == [1, 1, 0]


def test_fail_names_the_image_and_the_remedy() -> None:
    with pytest.raises(DataError, match=r"number/4\.jpg cannot be read: it is a test.*bad_images") as caught:
        Numbers(10, {4}, "fail").read(np.array([1, 4]))
    assert caught.value.exit_code == ExitCode.DATA == 4


def test_skip_puts_the_same_image_in_place_every_time() -> None:
    source = Numbers(50, {4, 5, 6}, "skip")
    out = np.empty((4, 4, 4, 3), np.uint8)
    first = source.read_into(np.array([4, 7, 5, 4]), out)
    assert first.ids[1] == 7
    assert first.ids[0] == first.ids[3]
    assert not set(first.ids.tolist()) & {4, 5, 6}
    np.testing.assert_array_equal(out[:, 0, 0, 0], first.ids)
    assert ("number/4.jpg", "it is a test") in first.bad
    again = source.read_into(np.array([5, 4]), out[:2])
    assert again.ids.tolist() == [first.ids[2], first.ids[0]]


def test_a_set_of_bad_images_ends() -> None:
    with pytest.raises(DataError, match=r"100 samples of numbers in a row"):
        Numbers(20, set(range(20)), "skip").read(np.array([0]))


@pytest.mark.parametrize(("samples", "allowed"), [(50, 0), (1000, 10), (1_000_000, 1000)])
def test_more_than_one_percent_bad_ends_the_run(samples: int, allowed: int) -> None:
    tally = Tally(samples)
    for _ in range(allowed):
        tally.add(1, 1, "x.jpg")
    with pytest.raises(DataError, match=r"More than 1% .*x\.jpg"):
        tally.add(1, 1, "x.jpg")


def test_one_percent_is_endured_for_any_time() -> None:
    tally = Tally(1000)
    for _ in range(2000):
        tally.add(99, 1)
    assert tally.failed == 2000


def test_the_fixed_fifth() -> None:
    assert is_val(np.array([0] * 10 + [1] * 4)).nonzero()[0].tolist() == [4, 9]
    assert is_val(np.array([0, 1] * 5)).nonzero()[0].tolist() == [8, 9]
    assert stored_size(224) == 256


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        open_source(DataConfig(source="text:a"), split="test", channels=2)  # type: ignore[arg-type]
    channels, split, kind = caught.value.problems
    assert "1 or 3 channels, but the model takes 2" in channels
    assert "'train' and 'val', but not 'test'" in split
    assert "'text:a', which is text, but the model takes images" in kind
