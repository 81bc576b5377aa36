"""`penstock sample`: images from a trained model that denoises."""

from __future__ import annotations

import itertools
import re
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from penstock.boundary.files import require_folder, write_bytes
from penstock.cli._app import configured
from penstock.config.sampling import SampleConfig
from penstock.errors import ConfigError

_OUT = "Write each image into a folder of its class inside this one, which `--data imagefolder:PATH` reads."


@configured(SampleConfig, positional="model", aliases={"sampling.": ""})
def sample(
    config: SampleConfig,
    *,
    grid: Annotated[Path | None, Parameter(help="Write all into this PNG file, a row of each class.")] = None,
    out: Annotated[Path | None, Parameter(help=_OUT)] = None,
) -> None:
    """Make images with a trained diffusion model.

    The images go to --grid, to --out, or to both. If a model has separate experts for each range of timesteps, the
    experts of one range are loaded at a time.

        penstock sample runs/digits --count 4 --grid digits.png
    """
    if grid is None and out is None:
        raise ConfigError("Say where the images go: --grid FILE.png, or --out FOLDER, or both.")
    if out is not None:
        require_folder(out)
    from penstock.infer.images import ImageGenerator
    from penstock.infer.pictures import grid_of, pixels_of, png

    generator = ImageGenerator(config.named("sample"), **config.options)
    classes: tuple[str | None, ...] = config.label or generator.classes or (None,)
    labels = [label for label in classes for _ in range(config.count)]
    began = time.perf_counter()
    pixels = pixels_of(generator.sample(labels, config.sampling))
    took = time.perf_counter() - began
    if out is not None:
        folders, written = _folders(classes), Counter[str]()
        for label, image in zip(labels, pixels, strict=True):
            folder = folders[label]
            write_bytes(out / folder / f"{written[folder]:05}.png", png(image))
            written[folder] += 1
    if grid is not None:
        columns = config.count if len(classes) > 1 else round(len(labels) ** 0.5 + 0.499)
        write_bytes(grid, png(grid_of(pixels, columns)))
    how, places = config.sampling, " and ".join(str(place) for place in (grid, out) if place is not None)
    print(f"{len(labels)} images in {took:.1f} s, {how.steps} steps of {how.sampler}: {places}")
    if generator.opened:
        loaded_bytes, total = (size / 1e6 for size in generator.bytes)
        print(
            f"{len(generator.ranges)} ranges of timesteps have separate experts, loaded one range at a time: "
            f"{loaded_bytes:,.1f} MB of {total:,.1f} MB of weights."
        )


def _folders(classes: Iterable[str | None]) -> dict[str | None, str]:
    """A folder's name for each class: all but letters and digits become `_`, and classes that would share a name get a
    number."""
    folders: dict[str | None, str] = {}
    for label in dict.fromkeys(classes):
        start = re.sub(r"[^\w-]", "_", label or "images")[:60]
        names = itertools.chain([start], (f"{start}_{number}" for number in itertools.count(2)))
        folders[label] = next(name for name in names if name not in folders.values())
    return folders
