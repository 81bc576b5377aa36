"""Opening a source by its name."""

from __future__ import annotations

from collections.abc import Callable

from penstock.boundary.files import quoted
from penstock.config.run import DataConfig
from penstock.data.hub import HubImages
from penstock.data.imagefolder import ImageFolder
from penstock.data.pack import Pack
from penstock.data.source import ImageSource, Split
from penstock.data.toy.digits import Digits, Mnist
from penstock.errors import ConfigError

_KINDS: dict[str, Callable[[str, Split, int, int, DataConfig], ImageSource]] = {
    "digits": Digits, "mnist": Mnist, "imagefolder": ImageFolder, "pack": Pack, "hf": HubImages,
}  # fmt: skip
"""Sources of images, each opened from its path, split, channels, the model's image size, and the settings."""


def open_source(config: DataConfig, *, split: Split, channels: int = 3, image_size: int = 224) -> ImageSource:
    """Open `digits` (which `auto` means here), `mnist:PATH`, `imagefolder:PATH`, `pack:PATH` or `hf:NAME`.

    `image_size` is the model's; image folders are decoded to 8/7 of it. Packs and digits have sizes of their own.
    Raises ConfigError for channels other than 1 or 3, and DataError where the path holds no such data.
    """
    config = config.filled("digits")
    kind, _, path = config.source.partition(":")
    problems = []
    if channels not in (1, 3):
        problems.append(
            f"Images have 1 or 3 channels, but the model takes {channels}; set model.channels to 1 or 3."
        )
    if split not in ("train", "val"):
        problems.append(f"A source has the splits 'train' and 'val', but not {split!r}.")
    if kind not in _KINDS or len(config.parts()) > 1:
        problems.append(
            f"data.source is {quoted(config.source)}, which is text, but the model takes images; choose digits, "
            "mnist:PATH, imagefolder:PATH, pack:PATH or hf:NAME."
        )
    if problems:
        raise ConfigError(problems)
    source = _KINDS[kind](path, split, channels, image_size, config)
    if config.transform is not None:
        from penstock.data.transform import (
            load_function,  # late: it needs torch, which reading processes lack
        )

        source.transform = load_function(config.transform, "data.transform")
    return source
