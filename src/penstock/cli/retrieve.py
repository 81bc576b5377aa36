"""`penstock retrieve`: the images that a text fits best, or the texts that an image does."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from penstock.boundary.files import shown
from penstock.boundary.images import EXTENSIONS
from penstock.cli._app import configured
from penstock.cli.generate import words
from penstock.config.decoding import EncodeConfig
from penstock.errors import ConfigError

_TILE = 96
"""Pixels of a side of an answer in a picture."""


@configured(EncodeConfig, positional="model")
def retrieve(
    config: EncodeConfig,
    *,
    text: Annotated[tuple[str, ...], Parameter(help="A text to find images for; may be repeated.")] = (),
    image: Annotated[tuple[Path, ...], Parameter(help="An image to find texts for; may be repeated.")] = (),
    images: Annotated[Path | None, Parameter(help="Folder of images to search.")] = None,
    texts: Annotated[Path | None, Parameter(help="File of texts to search, one per line.")] = None,
    best: Annotated[int, Parameter(help="How many answers to show of each.")] = 5,
    grid: Annotated[Path | None, Parameter(help="Draw the answers here (PNG), a row for each text.")] = None,
) -> None:
    """Find images by texts, or texts by images, with a trained model of both.

    --text searches the folder --images, and --image searches the file --texts. Each line that is printed is the
    question, the cosine of the two vectors, and an answer, the best first.

        penstock retrieve runs/both --text "two red squares" --images photos
    """
    model = config.named("retrieve")
    if bool(text) == bool(image) or (images if text else texts) is None or best < 1:
        raise ConfigError(
            "Say what to find: `penstock retrieve RUN --text WORDS --images FOLDER`, or `--image FILE --texts FILE`, "
            "and at least one answer (--best)."
        )
    if grid is not None and image:
        raise ConfigError("--grid draws images, and texts are searched here; leave it out.")
    searched = _images_in(images) if text and images else [Path(line) for line in words((), texts)]
    from penstock.infer.encode import Embedder

    with Embedder(
        model, config.as_plan, weights=config.weights, batch=config.batch, device=config.device
    ) as embedder:
        if text:
            near = embedder.embed(text) @ embedder.embed_images(searched).T
        else:
            near = embedder.embed_images(image) @ embedder.embed([str(text_line) for text_line in searched]).T
    scores, places = near.topk(min(best, len(searched)), dim=1)
    for question, row, order in zip(text or image, scores.tolist(), places.tolist(), strict=True):
        for score, place in zip(row, order, strict=True):
            print(f"{question}\t{score:.4f}\t{searched[place]}")
    if grid is not None:
        _draw(grid, [[searched[place] for place in order] for order in places.tolist()])


def _images_in(folder: Path) -> list[Path]:
    """All images in a folder and below it, by name. Raises ConfigError where there are none."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in EXTENSIONS)
    if not files:
        raise ConfigError(f"There are no images in {shown(folder)}; name a folder that has some.")
    return files


def _draw(file: Path, rows: list[list[Path]]) -> None:
    """Write a picture of images, row by row."""
    import numpy as np
    from PIL import Image

    from penstock.disk import write_file
    from penstock.infer.pictures import grid_of, png

    tiles = []
    for path in itertools.chain.from_iterable(rows):
        with Image.open(path) as image:
            small = image.convert("RGB").resize((_TILE, _TILE), Image.Resampling.NEAREST)
            tiles.append(np.asarray(small, np.uint8))
    write_file(file, [png(grid_of(np.stack(tiles), len(rows[0])))])
