"""`penstock retrieve`: the texts or images that are nearest to a text or an image."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from penstock.boundary.files import shown, write_bytes
from penstock.boundary.images import EXTENSIONS
from penstock.cli._app import configured
from penstock.cli.generate import input_texts
from penstock.config.decoding import EncodeConfig
from penstock.errors import ConfigError

_GRID = "Draw the images that are found into this PNG file, as the model sees them, a row for each question."


@configured(EncodeConfig, positional="model")
def retrieve(
    config: EncodeConfig,
    *,
    text: Annotated[tuple[str, ...], Parameter(help="A text to search by; may be repeated.")] = (),
    image: Annotated[tuple[Path, ...], Parameter(help="An image to search by; may be repeated.")] = (),
    images: Annotated[Path | None, Parameter(help="Folder of images to search.")] = None,
    texts: Annotated[Path | None, Parameter(help="File of texts to search, one per line.")] = None,
    best: Annotated[int, Parameter(help="Number of answers to each question.")] = 5,
    grid: Annotated[Path | None, Parameter(help=_GRID)] = None,
) -> None:
    """Find texts or images by their likeness to a text or an image.

    A question is a --text or an --image, and the folder --images or the file --texts is searched. An encoder compares
    texts with texts; a trained model of images and texts compares either with either. Each line that is printed is the
    question, the cosine of the two vectors, and an answer, the best first.

        penstock retrieve runs/both --text "two red squares" --images photos
    """
    model = config.named("retrieve")
    if bool(text) == bool(image) or (images is None) == (texts is None) or best < 1:
        raise ConfigError(
            "Say what to find: `penstock retrieve RUN --text WORDS --images FOLDER`, or `--image FILE --texts FILE`, "
            "and at least one answer (--best)."
        )
    if grid is not None and images is None:
        raise ConfigError("--grid draws images, and texts are searched here; leave it out.")
    searched = input_texts((), texts) if images is None else _images_in(images)
    from penstock.infer.encode import Embedder, read_images
    from penstock.infer.pictures import grid_of, pixels_of, png

    with Embedder(model, **config.options) as embedder:
        queries = embedder.embed(text) if text else embedder.embed_images(image)
        near = queries @ (embedder.embed(searched) if images is None else embedder.embed_images(searched)).T
        scores, places = near.topk(min(best, len(searched)), dim=1)
        if grid is not None:
            drawn = [searched[place] for place in places.flatten().tolist()]
            pixels = pixels_of(read_images(embedder.model, drawn, white=embedder.white))
            write_bytes(grid, png(grid_of(pixels, places.shape[1])))
    for question, row, order in zip(text or image, scores.tolist(), places.tolist(), strict=True):
        for score, place in zip(row, order, strict=True):
            print(f"{question}\t{score:.4f}\t{searched[place]}")


def _images_in(folder: Path) -> list[str]:
    """All images in a folder and below it, by name. Raises ConfigError where there are none."""
    files = [str(path) for path in sorted(folder.rglob("*")) if path.suffix.lower() in EXTENSIONS]
    if not files:
        raise ConfigError(f"There are no images in {shown(folder)}; name a folder that has some.")
    return files
