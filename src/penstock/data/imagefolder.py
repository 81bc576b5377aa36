"""An image folder: one folder per class, with folders of any depth inside."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from penstock.boundary.files import Unreadable, content, quoted, shown, visible_files
from penstock.boundary.images import EXTENSIONS, MAX_BYTES
from penstock.config.run import DataConfig
from penstock.data.decode import decode
from penstock.data.source import BadSample, ImageSource, Pixels, Split, is_val, stored_size
from penstock.data.splits import named_split, split_folders
from penstock.errors import DataError

log = logging.getLogger(__name__)


class Listing(NamedTuple):
    """The images of one folder of classes: relative paths in a fixed order, and the class number of each image."""

    root: Path
    classes: tuple[str, ...]
    paths: tuple[str, ...]
    labels: tuple[int, ...]


def list_split(path: str | os.PathLike[str], split: Split) -> Listing:
    """List `path/train` or `path/val`, or folders of like names; without them every fifth image of a class is val.
    Raises DataError where there is nothing to read."""
    train, val = split_folders(path, quiet=split == "val")
    learned = list_classes(train, quiet=split == "val")
    if val is None:
        keep = np.flatnonzero(is_val(np.array(learned.labels)) == (split == "val")).tolist()
        paths, labels = (tuple(column[i] for i in keep) for column in (learned.paths, learned.labels))
        return learned._replace(paths=paths, labels=labels)
    if split == "train":
        return learned
    held_out = list_classes(val)
    unknown = sorted(set(held_out.classes) - set(learned.classes))
    if unknown:
        raise DataError(
            f"The validation folder {val} has classes that {train} lacks: {', '.join(unknown[:5])}"
            f"{' and more' if len(unknown) > 5 else ''}. Give both the same class folders."
        )
    number = {name: index for index, name in enumerate(learned.classes)}
    labels = tuple(number[held_out.classes[label]] for label in held_out.labels)
    return Listing(val, learned.classes, held_out.paths, labels)


def list_classes(root: Path, *, quiet: bool = False) -> Listing:
    """Every image under each class folder, sorted by name, so that the order is the same on every machine.

    Hidden files and folders (`.DS_Store`, `._0001.jpg`) are left out. A folder without any image is not a class.
    Files that are not read, and such folders, are logged as a warning unless `quiet`.
    """
    # Not `DirEntry.is_dir`, which raises at a link that leads back to itself.
    entries = [name for name in os.listdir(root) if name[0] != "."]
    images: dict[str, list[str]] = {}
    others: Counter[str] = Counter()
    for name in sorted(name for name in entries if os.path.isdir(root / name)):
        files = [os.path.relpath(path, root) for path in visible_files(root / name)]
        images[name] = sorted(file for file in files if file.lower().endswith(EXTENSIONS))
        others.update(
            os.path.splitext(file)[1].lower() for file in files if not file.lower().endswith(EXTENSIONS)
        )
    left_out = _words_on_left_out(others, [name for name, files in images.items() if not files])
    if not any(images.values()):
        raise DataError(
            f"No image was found under {shown(root)}. It must hold one folder per class, with "
            f"{', '.join(EXTENSIONS)} files.{left_out and ' ' + left_out}"
        )
    _check_depth(root, images)
    if left_out and not quiet:
        log.warning("%s: %s", shown(root), left_out)
    classes = tuple(name for name, files in images.items() if files)
    labels = tuple(label for label, name in enumerate(classes) for _ in images[name])
    return Listing(root, classes, tuple(path for name in classes for path in images[name]), labels)


def _check_depth(root: Path, images: dict[str, list[str]]) -> None:
    """Raise DataError where all class folders hold the same folders: then these are the classes, or splits."""
    inside = [{tuple(Path(file).parts[1:-1][:1]) for file in files} for files in images.values() if files]
    folders = sorted(name for (name,) in inside[0]) if all(inside[0]) else []
    is_same = len(inside) > 1 and all(one == inside[0] for one in inside)
    if is_same and (len(folders) > 1 or any(map(named_split, folders))):
        raise DataError(
            f"All folders of classes in {shown(root)} hold the same folders: {quoted(', '.join(folders), 200)}. If "
            "these are the classes, merge those of one name, or name the folder above them in data.source; if they are "
            "splits, put them above the classes (train/CLASS, val/CLASS); else move the images up to their class."
        )


def _words_on_left_out(others: Counter[str], empty: list[str]) -> str:
    """Files that are not read, by extension, and folders without images, in words; "" where there are none."""
    words = ""
    if others:
        kinds = ", ".join(f"{count} {kind or 'without extension'}" for kind, count in others.most_common(5))
        more = f" and {len(others) - 5} more kinds" if len(others) > 5 else ""
        files = "file was" if others.total() == 1 else "files were"
        words = f"{others.total()} {files} left out, because only {', '.join(EXTENSIONS)} are read: {kinds}{more}."
    if empty:
        names = ", ".join(quoted(name) for name in empty[:5]) + (" and more" if len(empty) > 5 else "")
        one = "folder holds no image and was left out as a class"
        folders = one if len(empty) == 1 else "folders hold no image and were left out as classes"
        words += f" {len(empty)} {folders}: {names}."
    return words.strip()


class ImageFolder(ImageSource):
    """Decodes to size × size: shorter side resized, centre kept, EXIF orientation applied."""

    def __init__(self, path: str, split: Split, channels: int, image_size: int, config: DataConfig) -> None:
        listing = list_split(path, split)
        self.name = f"imagefolder:{path} ({split})"
        self.classes = listing.classes
        self.labels = np.array(listing.labels, np.int64)
        self.size, self.channels = stored_size(image_size), channels
        self.bad_samples = config.bad_images
        self._root = listing.root
        self._within = os.path.relpath(listing.root, path)
        self._paths = listing.paths
        self._max_pixels, self.white = config.max_pixels, config.range

    def mark(self, folder: str, *, needed: bool = True) -> None:
        """Read masks of regions too: see `DataConfig.regions`. Raises DataError if there is no such folder, or if masks
        are `needed` and it has none."""
        if not os.path.isdir(folder):
            raise DataError(
                f"The folder of marks {shown(folder)} does not exist or is no folder. Check data.regions."
            )
        there = {os.path.relpath(file, folder) for file in visible_files(folder)}
        names = [
            os.path.normpath(os.path.join(self._within, os.path.splitext(path)[0] + ".png"))
            for path in self._paths
        ]
        self._marks = tuple(os.path.join(folder, name) if name in there else "" for name in names)
        self.marked = any(self._marks)
        if needed and not self.marked:
            raise DataError(
                f"{shown(folder)} has no marks of the images in {self.name}: for {quoted(self._paths[0])} it would "
                f"be {quoted(names[0])}. Check data.regions."
            )
        count = sum(map(bool, self._marks))
        log.info("%s: %d of %d images have marks of regions.", self.name, count, len(names))

    @functools.cached_property
    def digest(self) -> str:  # type: ignore[override]
        """The hash of all files' names, sizes and modification times. On first use, because it reads the disk."""
        content_hash = hashlib.sha256()
        marks = [mark for mark in self._marks if mark] if self.marked else []
        images = zip(self._paths, map(self.path, range(len(self._paths))))
        for name, file in [*images, *zip(marks, map(Path, marks))]:
            line = f"{name}\0"
            with suppress(OSError):  # a bad image, as reading it will say
                status = file.stat()
                line += f"{status.st_size}\0{status.st_mtime_ns}"
            content_hash.update(f"{line}\n".encode("utf-8", "surrogateescape"))
        return content_hash.hexdigest()

    def path(self, index: int) -> Path:
        """The file of sample `index`."""
        return self._root / self._paths[index]

    def load(self, index: int, out: Pixels) -> None:
        size = self._decoded(self.path(index), out[..., : self.channels])
        if not self.marked:
            return
        marks = out[..., self.channels :]
        if not self._marks[index]:
            marks[...] = 0
        elif (own := self._decoded(Path(self._marks[index]), marks)) != size:
            why = "it marks an image of {} × {} pixels, but has {} × {}".format(*size, *own)
            raise BadSample(shown(self._marks[index]), why)

    def _decoded(self, path: Path, out: Pixels) -> tuple[int, int]:
        """Decode a file; returns its width and height in pixels once it is upright."""
        try:
            header = decode(
                content(path, limit=MAX_BYTES), out, max_pixels=self._max_pixels, white=self.white
            )
        except Unreadable as error:
            raise BadSample(shown(path), str(error)) from error
        turned = header.orientation in (5, 6, 7, 8)
        return (header.height, header.width) if turned else (header.width, header.height)
