"""`penstock pack`: turn an image folder or tar shards into a packed set that reads fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from penstock.data.pack import verify as verify_pack
from penstock.data.packing import Packing, pack_source
from penstock.errors import ConfigError

_DEFAULTS = Packing()


def pack(
    source: Path,
    target: Path | None = None,
    *,
    packing: Annotated[Packing, Parameter(name="*")] = _DEFAULTS,
    verify: bool = False,
) -> None:
    """Pack images, resized once, into a few large files for `--data.source pack:TARGET`.

    Parameters
    ----------
    source
        A folder with one folder per class, a tar shard, a folder of tar shards (as WebDataset writes them), or a
        folder with `train` and `val` of either. With --verify, the packed set to check.
    target
        The folder to make. It must not exist.
    verify
        Check every byte of the packed set `source` against its checksums, and write nothing.
    """
    if verify:
        if target is not None:
            raise ConfigError("With --verify, give the packed set alone: `penstock pack SET --verify`.")
        print(f"{source} is whole: {verify_pack(source):,} bytes checked.")
        return
    if target is None:
        raise ConfigError("Give the folder to make: `penstock pack SOURCE TARGET`.")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("images", total=None)
        packed = pack_source(source, target, packing, progress=lambda _: bar.advance(task))
    for split, manifest in packed.manifests.items():
        skipped = f", {manifest.skipped} bad images left out" if manifest.skipped else ""
        print(f"{target / split}: {manifest.count:,} images of {len(manifest.classes)} classes{skipped}.")
    print(f"{packed.bytes:,} bytes. Use it with: penstock train MODEL --data.source pack:{target}")
