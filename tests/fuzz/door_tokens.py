"""Packs of tokens: the manifest as it lies there, and manifest, index, sums and tokens changed under a right seal."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import shutil
from pathlib import Path

from hypothesis import strategies as st

from fuzz.door import Case, Door
from fuzz.mutate import altered_tree
from penstock.boundary.manifests import sealed

_PACK = Path("pack")


@functools.cache
def _files() -> dict[str, bytes]:
    from penstock.data.text.sources import TextPacking, pack_text

    # Rows that share a first text stay together, so each has its own, or none would be left for validation.
    rows = "".join(f"one {n:03}\tthree\tyes\nf{n:03}\tfive six\tno\n" for n in range(20))
    Path("pairs.tsv").write_text("premise\thypothesis\tlabel\n" + rows)
    pack_text("pairs:pairs.tsv", _PACK, TextPacking())
    return {path.name: path.read_bytes() for path in sorted(_PACK.iterdir())}


def _seeds() -> dict[str, bytes]:
    files = _files()
    return {"manifest.json": files["manifest.json"]} | {
        f"sealed/{name}": data for name, data in files.items()
    }


def _enter(case: str, data: bytes) -> None:
    import numpy as np

    from penstock.config.run import DataConfig
    from penstock.data.text.rows import open_rows
    from penstock.data.text.tokenizers import Bytes
    from penstock.data.text.tokenpack import verify

    logging.disable(logging.CRITICAL)
    seal, _, name = case.rpartition("/")
    shutil.rmtree(_PACK, ignore_errors=True)
    _PACK.mkdir()
    for other, content in _files().items():
        (_PACK / other).write_bytes(data if other == name else content)
    if seal:
        _seal(name, data)
    for split in ("train", "val"):
        source = open_rows(
            DataConfig(source=f"pack:{_PACK}"),
            Bytes(),
            split,
            form="pair",
            length=16,  # type: ignore[arg-type]
        )
        out = np.empty(8, source.sample)
        source.read_into(np.arange(8) % len(source), out)
    verify(_PACK)


def _seal(name: str, data: bytes) -> None:
    """Make the manifest right about a changed file, or a changed manifest right about itself."""
    path = _PACK / "manifest.json"
    try:
        body = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return
    if name != path.name:
        for part in body["parts"]:
            for file in (part["data"], part["index"], part["checks"]):
                if file["name"] == name:
                    file |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    if isinstance(body, dict):
        path.write_bytes(sealed(body))


def _made() -> st.SearchStrategy[Case]:
    tree = json.loads(_files()["manifest.json"])
    return altered_tree(tree).map(lambda tree: ("sealed/manifest.json", json.dumps(tree).encode()))


DOOR = Door(seeds=_seeds, enter=_enter, made=_made, tokens=(b'"../', b"\xff" * 8, b"\0" * 24))
