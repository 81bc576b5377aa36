"""Opening a source by its name."""

from __future__ import annotations

from penstock.boundary.files import quoted
from penstock.config.run import DataConfig
from penstock.data.source import ImageSource, Split, stored_size
from penstock.errors import ConfigError


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
    if kind not in ("digits", "mnist", "imagefolder", "pack", "hf") or len(config.parts()) > 1:
        problems.append(
            f"data.source is {quoted(config.source)}, which is text, but the model takes images; choose digits, "
            "mnist:PATH, imagefolder:PATH, pack:PATH or hf:NAME."
        )
    if problems:
        raise ConfigError(problems)
    source = _open_kind(kind, path, config, split, channels, image_size)
    if config.transform is not None:
        from penstock.data.transform import load_function

        source.transform = load_function(config.transform, "data.transform")
    return source


def _open_kind(
    kind: str, path: str, config: DataConfig, split: Split, channels: int, image_size: int
) -> ImageSource:
    # Late: each kind of source brings the libraries that it reads with.
    if kind == "digits":
        from penstock.data.toy.digits import Digits

        return Digits(split, channels)
    if kind == "mnist":
        from penstock.data.toy.digits import Mnist

        return Mnist(path, split, channels, image_size)
    if kind == "imagefolder":
        from penstock.data.imagefolder import ImageFolder

        return ImageFolder(path, split, channels, stored_size(image_size), config)
    if kind == "hf":
        from penstock.data.hub import HubImages

        return HubImages(path, split, channels, stored_size(image_size), config)
    from penstock.data.pack import Pack

    return Pack(path, split, channels, config)
