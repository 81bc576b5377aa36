"""Names of splits, as folders, files, packs and data sets on the hub use them."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from penstock.boundary.files import quoted, shown
from penstock.boundary.images import EXTENSIONS
from penstock.data.source import Split
from penstock.errors import DataError

_log = logging.getLogger(__name__)
_NAMES: dict[str, tuple[Split, int]] = {
    **dict.fromkeys(("train", "training"), ("train", 0)),
    **dict.fromkeys(("val", "valid", "validation", "dev"), ("val", 0)),
    **dict.fromkeys(("test", "testing"), ("val", 1)),  # the validation set where there is no other
}
"""Split that a name means, in upper or lower case, and its rank: the lowest rank present is used."""


def named_split(name: str) -> tuple[Split, int] | None:
    """The split that an entire name means, and its rank."""
    return _NAMES.get(name.lower())


def split_in(name: str) -> tuple[Split, int] | None:
    """The split that words in a name mean, and its rank; none if they mean both. The outermost part of a path with
    such a word decides."""
    for part in Path(name).parts:
        meant = {split for word in re.split(r"[^a-z]+", part.lower()) if (split := _NAMES.get(word))}
        if len({split for split, _ in meant}) == 1:
            return min(meant)
    return None


def divided(names: Iterable[str], *, words: bool = False) -> dict[Split, list[str]]:
    """The names that mean train and val, in lists that may be empty. With `words`, names that only contain such a word
    count too, if no entire name is there."""
    ranked: dict[Split, dict[tuple[int, bool], list[str]]] = {"train": {}, "val": {}}
    for name in names:
        if meant := split_in(name) if words else named_split(name):
            split, rank = meant
            ranked[split].setdefault((rank, named_split(Path(name).name) is None), []).append(name)
    return {split: of_rank[min(of_rank)] if of_rank else [] for split, of_rank in ranked.items()}


def hub_splits(splits: Sequence[str], where: str) -> tuple[str, list[str]]:
    """The train split of a data set on the hub, and its validation splits, such as both of MNLI. Others are logged.
    Where no name means train, it is the first name that means no split, or else the first name."""
    chosen = divided(splits, words=True)
    train = [*chosen["train"], *(name for name in splits if split_in(name) is None), *splits][0]
    val = [name for name in chosen["val"] if name != train]
    if unused := [name for name in splits if name not in (train, *val)]:
        held_out = " and ".join(map(quoted, val)) or "a part of it"
        words = "%s: %s is read for training and %s for validation; splits that are not used: %s."
        _log.warning(words, where, quoted(train), held_out, quoted(", ".join(unused), 200))
    return train, val


def split_files(files: list[Path], root: str) -> list[list[Path]]:
    """The files of train and val where names of files or folders say so (`train.tsv` and `dev.tsv`); else all files."""
    is_folder = Path(root).is_dir()
    meant = [split_in(os.path.relpath(file, root) if is_folder else file.name) for file in files]
    best = min((each for each in meant if each and each[0] == "val"), default=None)
    train, val = (
        [file for file, each in zip(files, meant) if each and each == part] for part in (("train", 0), best)
    )
    if not train or not val:
        if val:
            _log.warning(
                "%s: the name of %s means a validation set, but none means a train set; all files are one set.",
                shown(root), quoted(val[0].name),
            )  # fmt: skip
        return [files]
    if unused := [file.name for file in files if file not in {*train, *val}]:
        _log.warning("%s: %d files that belong to neither train nor val were left out, such as %s.",
                     shown(root), len(unused), quoted(unused[0]))  # fmt: skip
    return [train, val]


def split_folders(path: str | os.PathLike[str], *, quiet: bool = False) -> tuple[Path, Path | None]:
    """The folders of the train and val sets, or the one folder that holds everything, and None. Folders that are left
    out are logged unless `quiet`. Raises DataError for a folder that is not there, and for a split's name that cannot
    be used."""
    root = Path(path)
    if not root.is_dir():
        raise DataError(f"The folder {shown(root)} does not exist or is not a folder. Check data.source.")
    folders = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and entry.name[0] != ".")
    chosen = divided(folders)
    train, val = chosen["train"], chosen["val"]
    for names in (train, val):
        if len(names) > 1:
            raise DataError(
                f"{shown(root)} holds {' and '.join(names)}, which all mean the same split. Keep one of them there."
            )
    if not train and not val:
        return root, None
    others = [name for name in folders if name not in (*train, *val)]
    classes = [name for name in others if named_split(name) is None]
    # A folder that holds images directly, beside other folders, is a class and not a split.
    if not train or (classes and _is_flat(root / train[0])):
        name, fault = quoted((train or val)[0]), "holds no folders" if train else "has no train beside it"
        raise DataError(
            f"{shown(root)} holds {name}, the name of a split, which {fault}. Put the folders of all classes into "
            f"{shown(root / 'train')}, {name} too if it is a class."
        )
    if val and _is_flat(root / val[0]):
        raise DataError(
            f"{shown(root / val[0])} holds images and no folders of classes, so it cannot be the validation set. Sort "
            f"them into such folders; or move it out of {shown(root)}, and a part of {train[0]} is for validation."
        )
    if others and not quiet:
        _log.warning("%s: folders that are not used: %s.", shown(root), quoted(", ".join(others), 200))
    return root / train[0], root / val[0] if val else None


def _is_flat(folder: Path) -> bool:
    """Whether a folder holds images, and no folders."""
    inside = list(folder.iterdir())
    has_images = any(entry.name.lower().endswith(EXTENSIONS) for entry in inside)
    return has_images and not any(entry.is_dir() for entry in inside)
