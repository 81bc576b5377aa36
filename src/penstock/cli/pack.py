"""`penstock pack`: turn images or text into a packed set that reads fast."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from penstock.boundary.files import quoted
from penstock.data.pack import verify as verify_images
from penstock.data.packing import Packing, pack_source
from penstock.data.text.sources import TextPacking, is_text, pack_text
from penstock.data.text.tokenpack import PARTS, is_token_pack
from penstock.data.text.tokenpack import verify as verify_text
from penstock.errors import ConfigError

_DEFAULTS = Packing()
_TEXT = TextPacking()


def pack(
    source: str,
    target: Path | None = None,
    *,
    packing: Annotated[Packing, Parameter(name="*", group="Images")] = _DEFAULTS,
    text: Annotated[TextPacking, Parameter(name="*", group="Text")] = _TEXT,
    verify: bool = False,
) -> None:
    """Pack images or texts for fast reading.

    Writes images, resized once, or text as tokens into a few large files, which `penstock train --data pack:TARGET`
    reads.

        penstock pack /data/flowers /data/flowers.pack

    Parameters
    ----------
    source
        A folder with one folder per class, a tar shard, a folder of tar shards (as WebDataset writes them), or a
        folder with `train` and `val` of either. Or text: `text:PATH`, `pairs:PATH`, `hf:NAME`, `stdlib`, `numbers`.
        With --verify, the packed set to check.
    target
        The folder to make. It must not exist.
    verify
        Check every byte of the packed set `source` against its checksums, and write nothing.
    """
    if verify:
        if target is not None or packing != _DEFAULTS or text != _TEXT:
            raise ConfigError("With --verify, give the packed set alone: `penstock pack SET --verify`.")
        check = verify_text if is_token_pack(Path(source)) else verify_images
        print(f"{source} is whole: {check(Path(source)):,} bytes checked.")
        return
    if target is None:
        raise ConfigError("Give the folder to make: `penstock pack SOURCE TARGET`.")
    _refuse_of_the_other_kind(source, packing, text)
    if is_text(source):
        _pack_text(source, target, text)
    else:
        _pack_images(Path(source), target, packing)


def _refuse_of_the_other_kind(source: str, packing: Packing, text: TextPacking) -> None:
    unused, default, kind = (packing, _DEFAULTS, "images") if is_text(source) else (text, _TEXT, "text")
    for field in fields(unused):
        if getattr(unused, field.name) != getattr(default, field.name):
            raise ConfigError(
                f"--{field.name.replace('_', '-')} is about {kind}, but {quoted(source)} is not. Leave it out; "
                "text is named with its kind, such as text:PATH."
            )


def _pack_text(source: str, target: Path, packing: TextPacking) -> None:
    manifest = pack_text(source, target, packing)
    for name, part in zip(PARTS, manifest.parts):
        what = "documents" if manifest.form == "documents" else "rows"
        skipped = f", {part.skipped} bad rows left out" if part.skipped else ""
        split = f" for {name}" if len(manifest.parts) > 1 else ""
        print(
            f"{target}: {part.rows:,} {what}{split}, {part.tokens:,} tokens, "
            f"{part.text_bytes / max(1, part.tokens):.2f} bytes each{skipped}."
        )
    size = sum(file.bytes for file in manifest.files)
    print(f"{size:,} bytes. Use it with: penstock train MODEL --data.source pack:{target}")


def _pack_images(source: Path, target: Path, packing: Packing) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("images", total=None)
        packed = pack_source(source, target, packing, progress=lambda _: bar.advance(task))
    for split, manifest in packed.manifests.items():
        skipped = f", {manifest.skipped} bad images left out" if manifest.skipped else ""
        print(f"{target / split}: {manifest.count:,} images of {len(manifest.classes)} classes{skipped}.")
    print(f"{packed.bytes:,} bytes. Use it with: penstock train MODEL --data.source pack:{target}")
