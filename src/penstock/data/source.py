"""Sources of samples, sources of images, and the response to bad samples.

This imports no torch, so that reading processes start in a fraction of a second.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.data.hashing import REPLACE, words
from penstock.errors import DataError

_log = logging.getLogger(__name__)
Pixels = NDArray[np.uint8]
Split = Literal["train", "val"]

PADDING = -1
"""The token at places of a sample that hold no text, if samples are not packed."""
VAL_EVERY = 5
"""In a source without a split, every fifth sample of each class is in the validation set."""


class BadSample(Exception):
    """A sample that cannot be read, with its `path` and the reason. The policy decides: `fail` or `skip`."""

    def __init__(self, path: str, why: str) -> None:
        self.path = path
        self.why = why
        super().__init__(path, why)

    def __str__(self) -> str:
        return f"{self.path}: {self.why}"


class ReadResult(NamedTuple):
    """The result of reading some samples: their ids after replacements, and the bad ones."""

    ids: NDArray[np.int64]
    bad: tuple[tuple[str, str], ...]
    """(path, why) of each failed attempt."""


class Source(ABC):
    """A set of samples with the same fields. A subclass sets the attributes and defines `load` and `__len__`. It can be
    pickled, so that reading processes get a copy."""

    name: str
    sample: np.dtype[Any]
    """The NumPy dtype of every sample: a type with a shape, such as `np.dtype((np.int32, (1024,)))`, or a structured
    type of such fields."""
    bad_samples: Literal["fail", "skip"] = "fail"
    policy: str = "data.bad_images"
    """The setting that `bad_samples` comes from."""
    lengths: NDArray[np.int32] | None = None
    """(N,) length of each sample without padding; None if all are equal."""
    unpacked_padding: float | None = None
    """Share of padding that samples of one document each would have; None if documents are not packed."""
    label_names: tuple[str, ...] = ()
    """Names of the labels, such as languages, for which visits to a model's experts are counted."""
    labels_in_prompts: bool = False
    """Whether a text begins with its label, as `penstock.data.toy.words.prompt_of` writes it."""
    group_by_length: bool = False
    """Whether a Loader's batches hold samples of similar length."""
    digest: str = ""
    """Hash that changes with the samples, as far as visible without reading them; empty if they never change."""

    @property
    def title(self) -> str:
        """The name by which the source was opened, without its split."""
        return self.name.removesuffix(" (train)").removesuffix(" (val)")

    @abstractmethod
    def load(self, index: int, out: Any) -> None:
        """Write sample `index` into `out`, an array of its shape or a record. Raises BadSample."""

    @abstractmethod
    def __len__(self) -> int: ...

    def read_into(self, indices: NDArray[np.int64], out: NDArray[Any]) -> ReadResult:
        """Write the samples into `out`. Under the policy `skip`, another sample replaces a bad one, chosen by a hash of
        its number, so that the stream is the same for any number of workers and ranks. Under `fail`, raises
        DataError."""
        ids = np.array(indices, np.int64)
        bad: list[tuple[str, str]] = []
        for row, index in enumerate(ids.tolist()):
            for attempt in range(100):
                try:
                    self.load(int(ids[row]), out[row])
                    break
                except BadSample as error:
                    if self.bad_samples == "fail":
                        raise DataError(
                            f"The sample {error.path} cannot be read: {error.why}. Repair or remove it, or set "
                            f"{self.policy} to 'skip' to read another in its place (up to 1 % of the set)."
                        ) from error
                    bad.append((error.path, error.why))
                    word = words(REPLACE, index, counters=np.array([attempt], np.uint64))[0]
                    ids[row] = int(word % np.uint64(len(self)))
            else:
                raise DataError(
                    f"100 samples of {self.name} in a row cannot be read, the last of them {bad[-1][0]}: "
                    f"{bad[-1][1]}. Check that the data set is complete and mounted."
                )
        return ReadResult(ids, tuple(bad))


class ImageSource(Source):
    """A set of images of one stored size, with one class each. A subclass sets the attributes and defines `load`, which
    writes to an array (size, size, channels) of uint8."""

    classes: tuple[str, ...]
    labels: NDArray[np.int64]
    """Class number of every sample."""
    size: int
    """Stored images are size × size pixels; the device resizes them to what the model wants."""
    channels: int
    """1 (grey) or 3 (red, green, blue)."""
    white: float | None = None
    """Value of white in images of more than 8 bits, by the setting `data.range`."""
    marked: bool = False
    """Whether samples have one more channel, which says how much each pixel is marked, 0 to 255."""
    crop_share: float = 0.875
    """Share of the side, in the centre, that evaluation uses (the usual 224 of 256)."""
    scalable: bool = False
    """True where enlarging the stored size is intended (the 8 × 8 digits), so that there is no warning."""
    transform: Callable[..., Any] | None = None
    """The function for each batch after augmentation (see `penstock.data.transform`); reading processes lack it."""
    tokenizer: Any = None
    """The tokenizer of a model that reads the names of classes; reading processes lack it."""
    region_weight: float = 1.0
    """Weight in the loss of fully marked pixels."""
    word_weights: tuple[str, ...] = ()
    """Words of the names of classes and the factors of their attention, as `DataConfig.word_weights`."""

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value for name, value in self.__dict__.items() if name not in ("transform", "tokenizer")
        }

    @property
    def sample(self) -> np.dtype[Any]:  # type: ignore[override]  # it follows from the other attributes
        return np.dtype((np.uint8, (self.size, self.size, self.channels + self.marked)))

    def __len__(self) -> int:
        return len(self.labels)

    def renumber(self, classes: tuple[str, ...], numbers: NDArray[np.int64]) -> None:
        """Replace the source's class numbers by a model's, (own classes,)."""
        self.classes, self.labels = classes, numbers[self.labels]

    def read(self, indices: NDArray[np.int64]) -> tuple[Pixels, NDArray[np.int64]]:
        """Read images (n, size, size, channels) and labels (n,). The source's policy decides about bad images."""
        out = np.empty(len(indices), self.sample)
        return out, self.labels[self.read_into(indices, out).ids]


@dataclass
class Tally:
    """Counts failures, and ends a run in which more than 1 % of the samples are bad. In a small set the share is of the
    whole set (one bad sample of fifty is 2 %). A large set may have 1,000 failures first."""

    samples: int
    tried: int = 0
    failed: int = 0
    limit: float = 0.01

    def add(self, tried: int, failed: int, last: str = "") -> None:
        """Count a failure. Raises DataError once there are more than the limit."""
        self.tried += tried + failed
        self.failed += failed
        if failed and self.failed > self.limit * max(self.tried, min(self.samples, 100_000)):
            raise DataError(
                f"More than {self.limit:.0%} of the samples are bad: {self.failed} of {self.tried} read "
                f"so far from a set of {self.samples}. The last was {last}. Repair the data set; the path "
                "of each bad sample was logged."
            )


@dataclass
class LeftOut:
    """Counts bad samples of a pack that is being made: the policy `skip` leaves them out, up to 1 % of the set."""

    policy: Literal["fail", "skip"]
    unit: str
    """The samples in a word, in the plural."""
    setting: str
    """The setting that makes the policy `skip`, for messages."""
    count: int = 0

    def add(self, where: str, why: str, used: int) -> None:
        """Leave a sample out, and log it; `used` counts the samples in the pack. Raises DataError under the policy
        `fail`, and, after 1,000 bad samples, for more than 1 %."""
        if self.policy == "fail":
            raise DataError(
                f"{where} cannot be used: {why}. Repair or remove it, or leave such {self.unit} out with "
                f"{self.setting} (up to {Tally.limit:.0%} of the set)."
            )
        _log.warning("Left out %s: %s.", where, why)
        self.count += 1
        if self.count > 1000:
            self.close(used)

    def close(self, used: int) -> None:
        """Raise DataError if more than 1 % were left out."""
        if self.count > Tally.limit * (used + self.count):
            raise DataError(
                f"{self.count:,} of {used + self.count:,} {self.unit} are bad, more than {Tally.limit:.0%}. Repair the "
                "data set; the place of each was logged."
            )


def is_val(labels: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
    """Which samples are in the validation set: every fifth of each class, in the order of the set."""
    order = np.argsort(labels, kind="stable")
    ordered = labels[order]
    place = np.empty(len(labels), np.int64)
    place[order] = np.arange(len(labels)) - np.searchsorted(ordered, ordered, side="left")
    chosen: NDArray[np.bool_] = place % VAL_EVERY == VAL_EVERY - 1
    return chosen


def stored_size(image_size: int) -> int:
    """The side to which images are decoded for a model of `image_size`: 256 for 224, so that crops can vary."""
    return round(image_size * 8 / 7)
