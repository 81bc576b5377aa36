"""`penstock retrieve`: the images that a text fits best, or the texts that an image does."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from penstock.boundary.files import shown
from penstock.boundary.images import EXTENSIONS
from penstock.cli._app import configured
from penstock.cli.generate import words
from penstock.config.decoding import EncodeConfig
from penstock.errors import ConfigError

_TILE, _GAP = 96, 4
"""Pixels of an answer in a picture, and between two."""


@configured(EncodeConfig, positional="model")
def retrieve(
    config: EncodeConfig,
    *,
    text: Annotated[tuple[str, ...], Parameter(help="A text to find images for; may be repeated.")] = (),
    image: Annotated[tuple[Path, ...], Parameter(help="An image to find texts for; may be repeated.")] = (),
    images: Annotated[Path | None, Parameter(help="The folder of images that are searched.")] = None,
    texts: Annotated[Path | None, Parameter(help="A file of texts that are searched, one a line.")] = None,
    best: Annotated[int, Parameter(help="How many answers to show of each.")] = 5,
    grid: Annotated[
        Path | None, Parameter(help="Draw the images that were found here (PNG), a row a text.")
    ] = None,
) -> None:
    """Find the images that a text fits best, or the texts that an image does, with a model of both.

    Each line is the question, the cosine of the two vectors, and an answer, the best first.
    """
    model = config.named("retrieve")
    if bool(text) == bool(image) or (images if text else texts) is None or best < 1:
        raise ConfigError(
            "Say what to find: `penstock retrieve RUN --text WORDS --images FOLDER`, or `--image FILE --texts FILE`, "
            "and at least one answer (--best)."
        )
    searched = _images_in(images) if text and images else [Path(line) for line in words((), texts)]
    from penstock.infer.encode import Embedder

    with Embedder(
        model, config.as_plan, weights=config.weights, batch=config.batch, device=config.device
    ) as found:
        if text:
            near = found.embed(text) @ found.embed_images(searched).T
        else:
            near = found.embed_images(image) @ found.embed([str(one) for one in searched]).T
    scores, places = near.topk(min(best, len(searched)), dim=1)
    for asked, row, order in zip(text or image, scores.tolist(), places.tolist(), strict=True):
        for score, place in zip(row, order, strict=True):
            print(f"{asked}\t{score:.4f}\t{searched[place]}")
    if grid is not None:
        _draw(grid, [[searched[place] for place in order] for order in places.tolist()] if text else [])


def _images_in(folder: Path) -> list[Path]:
    """All images in a folder and below it, by name. Raises ConfigError where there are none."""
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in EXTENSIONS)
    if not found:
        raise ConfigError(f"There are no images in {shown(folder)}; name a folder that has some.")
    return found


def _draw(file: Path, rows: list[list[Path]]) -> None:
    """Write a picture of images, row by row."""
    from PIL import Image

    from penstock.disk import write_file

    if not rows:
        raise ConfigError("--grid draws images that were found; leave it out where texts are searched.")
    step = _TILE + _GAP
    canvas = Image.new("RGB", (step * max(map(len, rows)) - _GAP, step * len(rows) - _GAP), "white")
    for line, row in enumerate(rows):
        for place, path in enumerate(row):
            with Image.open(path) as one:
                tile = one.convert("RGB").resize((_TILE, _TILE), Image.Resampling.NEAREST)
            canvas.paste(tile, (place * step, line * step))
    made = io.BytesIO()
    canvas.save(made, "PNG")
    write_file(file, [made.getvalue()])
