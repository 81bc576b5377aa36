"""Packs of images and of tokens: the manifest as it lies there, and what else they hold changed under a right seal."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzz.doors import Door
from fuzz.mutate import altered_trees
from penstock.boundary.manifests import sealed

_PACK = Path("pack")


def _written() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(_PACK.iterdir())}


@functools.cache
def _images() -> dict[str, bytes]:
    from helpers.images import write_folder
    from penstock.data.packing import Packing, pack_source

    write_folder(Path("images"), per_class=4)
    pack_source("images", _PACK, Packing(size=8, format="raw"))
    return _written()


@functools.cache
def _tokens() -> dict[str, bytes]:
    from penstock.data.text.sources import TextPacking, pack_text

    # Rows that share a first text stay together, so each has its own, or none would be left for validation.
    rows = "".join(f"one {n:03}\tthree\tyes\nf{n:03}\tfive six\tno\n" for n in range(20))
    Path("pairs.tsv").write_text("premise\thypothesis\tlabel\n" + rows)
    pack_text("pairs:pairs.tsv", _PACK, TextPacking())
    return _written()


def _lay_out(files: dict[str, bytes], case: str, data: bytes) -> bool:
    """Write a pack of which one file is changed, its seal made right where the case says so. Returns whether it is."""
    logging.disable(logging.CRITICAL)
    seal, _, name = case.rpartition("/")
    shutil.rmtree(_PACK, ignore_errors=True)
    _PACK.mkdir()
    for other, content in files.items():
        (_PACK / other).write_bytes(data if other == name else content)
    path = _PACK / "manifest.json"
    with contextlib.suppress(ValueError, RecursionError):  # then no seal could be right
        body: Any = json.loads(path.read_bytes()) if seal else None
        if seal and name != path.name:
            found = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            if name == "index.npy":
                body["index"] |= found
            for part in body.get("parts", ()):
                for file in (part["data"], part["index"], part["checks"]):
                    if file["name"] == name:
                        file |= found
        if isinstance(body, dict):
            path.write_bytes(sealed(body))
    return bool(seal)


def _enter_images(case: str, data: bytes) -> None:
    import numpy as np

    from penstock.config.run import DataConfig
    from penstock.data import open_source
    from penstock.data.pack import verify

    seal = _lay_out(_images(), case, data)
    verify(_PACK)
    for split in ("train", "val"):
        source = open_source(DataConfig(source=f"pack:{_PACK}"), split=split, image_size=8)  # type: ignore[arg-type]
        source.read(np.arange(min(4, len(source))))
    assert seal or data == _images()[case], "a change went unnoticed"


def _enter_tokens(case: str, data: bytes) -> None:
    import numpy as np

    from penstock.config.run import DataConfig
    from penstock.data.text.rows import open_rows
    from penstock.data.text.tokenizers import Bytes
    from penstock.data.text.tokenpack import verify

    _lay_out(_tokens(), case, data)
    for split in ("train", "val"):
        source = open_rows(DataConfig(source=f"pack:{_PACK}"), Bytes(), split, form="pair", length=16)  # type: ignore[arg-type]
        out = np.empty(8, source.sample)
        source.read_into(np.arange(8) % len(source), out)
    verify(_PACK)


def _door(
    files: Callable[[], dict[str, bytes]], sealed: tuple[str, ...], enter: Callable[[str, bytes], None], *tokens: bytes
) -> Door:  # fmt: skip
    def seeds() -> dict[str, bytes]:
        plain = {"manifest.json": files()["manifest.json"]}
        return plain | {
            f"sealed/{name}": data for name, data in files().items() if name in sealed or not sealed
        }

    def made() -> Any:
        return altered_trees(("sealed/manifest.json", json.loads(files()["manifest.json"])))

    return Door(seeds=seeds, enter=enter, made=made, tokens=tokens)


DOORS = {
    "pack": _door(
        _images, ("manifest.json", "index.npy"), _enter_images, b"Infinity", b"shard-00000.bin", b'"bytes": -1',
    ),
    "tokens": _door(_tokens, (), _enter_tokens, b'"../', b"\xff" * 8, b"\0" * 24),
}  # fmt: skip
