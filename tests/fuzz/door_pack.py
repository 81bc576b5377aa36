"""Packed sets: the manifest as it lies there, and manifest and index changed under a right seal."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
from pathlib import Path

from hypothesis import strategies as st

from fuzz.door import Case, Door
from fuzz.mutate import altered_tree
from penstock.boundary.manifests import sealed

_PACK = Path("pack")


@functools.cache
def _files() -> dict[str, bytes]:
    from helpers.images import write_folder
    from penstock.data.packing import Packing, pack_source

    write_folder(Path("images"), per_class=4)
    pack_source("images", _PACK, Packing(size=8, format="raw"))
    return {path.name: path.read_bytes() for path in sorted(_PACK.iterdir())}


def _seeds() -> dict[str, bytes]:
    files = _files()
    return {
        "manifest.json": files["manifest.json"],
        "sealed/manifest.json": files["manifest.json"],
        "sealed/index.npy": files["index.npy"],
    }


def _enter(case: str, data: bytes) -> None:
    import numpy as np

    from penstock.config.run import DataConfig
    from penstock.data import open_source
    from penstock.data.pack import verify

    seal, _, name = case.rpartition("/")
    shutil.rmtree(_PACK, ignore_errors=True)
    _PACK.mkdir()
    for other, content in _files().items():
        (_PACK / other).write_bytes(data if other == name else content)
    if seal:
        _reseal(name, data)
    verify(_PACK)
    for split in ("train", "val"):
        source = open_source(DataConfig(source=f"pack:{_PACK}"), split=split, image_size=8)  # type: ignore[arg-type]
        source.read(np.arange(min(4, len(source))))
    assert seal or data == _files()[name], "a change went unnoticed"


def _reseal(name: str, data: bytes) -> None:
    try:
        body = json.loads(data if name == "manifest.json" else _files()["manifest.json"])
    except (ValueError, RecursionError):
        return  # no seal could be right
    if name == "index.npy":
        body["index"] |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    if isinstance(body, dict):
        (_PACK / "manifest.json").write_bytes(sealed(body))


def _made() -> st.SearchStrategy[Case]:
    tree = json.loads(_files()["manifest.json"])
    return st.tuples(
        st.just("sealed/manifest.json"), altered_tree(tree).map(lambda tree: json.dumps(tree).encode())
    )


DOOR = Door(seeds=_seeds, enter=_enter, made=_made, tokens=(b"Infinity", b"shard-00000.bin", b'"bytes": -1'))
