"""Image sets by their name on the Hugging Face hub, or a folder that `datasets` saved, through the datasets library."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.boundary.files import Unreadable, content
from penstock.boundary.images import MAX_BYTES
from penstock.boundary.packages import package
from penstock.config.run import DataConfig
from penstock.data.decode import decode
from penstock.data.source import BadSample, ImageSource, Pixels, Split, is_val, stored_size
from penstock.data.splits import hub_splits
from penstock.errors import ConfigError, DataError, EnvironmentProblem

_log = logging.getLogger(__name__)
_LABELS = ("label", "labels", "fine_label")
"""Columns of classes, the likeliest first."""


class HubImages(ImageSource):
    """A dataset with a column of images and one of classes. It keeps its own splits; without a validation split, every
    fifth image of a class is held out. Images are decoded as in an image folder: shorter side resized, centre kept.

    Raises: ConfigError: the columns are missing. DataError: the set cannot be read. EnvironmentProblem: there is no
    network and it is not in the cache, or the extra `hf` is missing.
    """

    def __init__(self, name: str, split: Split, channels: int, image_size: int, config: DataConfig) -> None:
        splits = open_dataset(name)
        import datasets

        name_of_train, names_of_val = hub_splits(list(splits), name)
        train = splits[name_of_train]
        rows = (
            datasets.concatenate_datasets([splits[each] for each in names_of_val])
            if split == "val" and names_of_val
            else train
        )
        image, label = _columns(name, rows)
        self.name = f"hf:{name} ({split})"
        self.size, self.channels = stored_size(image_size), channels
        self.bad_samples = config.bad_images
        self.classes, labels = _classes(train, rows, label)
        numbers = np.arange(len(labels))
        if not names_of_val:
            numbers = np.flatnonzero(is_val(labels) == (split == "val"))
        self.labels = labels[numbers]
        self._rows = numbers
        self._column = image
        self.digest = hashlib.sha256(identity_of(rows).encode()).hexdigest()
        self._max_pixels, self.white = config.max_pixels, config.range
        # Bytes as they are stored: our own decoder looks at the header first.
        self._data = rows.select_columns([image]).cast_column(image, datasets.Image(decode=False))

    def load(self, index: int, out: Pixels) -> None:
        row = int(self._rows[index])
        stored = self._data[row][self._column]
        where = f"{self.name}, row {row}"
        try:
            raw = stored["bytes"] if stored["bytes"] is not None else content(stored["path"], limit=MAX_BYTES)
            decode(raw, out, max_pixels=self._max_pixels, white=self.white)
        except Unreadable as error:
            raise BadSample(where, str(error)) from error
        except TypeError as error:  # a row without an image
            raise BadSample(where, "it holds no image") from error


def open_dataset(name: str, configuration: str | None = None, *, streaming: bool = False) -> dict[str, Any]:
    """The splits of a dataset by name. With `streaming` they are read while they are downloaded. Raises ConfigError,
    DataError and EnvironmentProblem where it cannot be opened."""
    datasets = package("datasets", "data.source=hf:NAME needs the package datasets", "hf")
    try:
        if Path(name).is_dir() and any(
            Path(name, file).exists() for file in ("dataset_dict.json", "state.json")
        ):
            dataset = datasets.load_from_disk(name)
        else:
            dataset = datasets.load_dataset(name, configuration, streaming=streaming)
    except (datasets.exceptions.DatasetNotFoundError, ConnectionError) as error:
        offline = (
            isinstance(error, ConnectionError) or "internet" in str(error) or "offline" in str(error).lower()
        )
        if not offline and not datasets.config.HF_HUB_OFFLINE:
            raise ConfigError(
                f"There is no dataset {name!r} on the Hugging Face hub, nor a folder of that name. For a private or "
                f"gated dataset run `hf auth login` first."
            ) from error
        raise EnvironmentProblem(
            f"The dataset {name} is not in the cache ({os.fspath(datasets.config.HF_DATASETS_CACHE)}), and cannot be "
            f"fetched without a network. Fetch it where there is one, with datasets.load_dataset({name!r}), and set "
            f"HF_HOME to a copy of that cache; or read files that are here: --data text:PATH or imagefolder:PATH."
        ) from error
    except (OSError, ValueError, RuntimeError, IndexError, datasets.exceptions.DatasetsError) as error:
        why = str(error.__cause__ or error).strip().rstrip(".")
        raise DataError(f"The dataset {name} cannot be read: {why}.") from error
    return dict(dataset) if isinstance(dataset, dict) else {"train": dataset}


def identity_of(rows: Any) -> str:
    """A fingerprint that changes with the rows, as far as the library can say."""
    files = [Path(file["filename"]) for file in getattr(rows, "cache_files", [])]
    stored = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return str((stored, rows.info.version, rows.info.download_checksums, rows.info.splits))


def _columns(name: str, rows: Any) -> tuple[str, str]:
    """The columns of images and of classes."""
    import datasets

    features: dict[str, Any] = dict(rows.features)
    images = [column for column, kind in features.items() if isinstance(kind, datasets.Image)]
    named = [column for column, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    numbers = [column for column in _LABELS if getattr(features.get(column), "dtype", "").startswith("int")]
    labels = sorted(named, key=lambda column: (*_LABELS, column).index(column)) or numbers
    if not images or not labels:
        missing = "column of classes" if images else "column of images"
        raise ConfigError(
            f"The dataset {name} has no {missing}; its columns are "
            f"{', '.join(f'{column} ({type(kind).__name__})' for column, kind in features.items())}."
        )
    if len(images) > 1 or len(labels) > 1:
        _log.warning("%s: images are read from %r and classes from %r.", name, images[0], labels[0])
    return images[0], labels[0]


def _classes(train: Any, rows: Any, column: str) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """The names of the classes, and the class number of each row."""
    labels = _numbers(rows[column])
    names = getattr(rows.features[column], "names", None)
    if not names:
        names = map(str, range(np.append(labels, _numbers(train[column])).max(initial=-1) + 1))
    classes = tuple(names)
    if len(labels) and (labels.min() < 0 or labels.max() >= len(classes)):
        raise DataError(
            f"Column {column!r} has rows without a class (none, or a number below 0). Use the labelled splits."
        )
    return classes, labels


def _numbers(labels: Iterable[int | None]) -> NDArray[np.int64]:
    return np.array([-1 if label is None else label for label in labels], np.int64)
