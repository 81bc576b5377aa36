"""Checkpoints that lie under a right seal: their documents and headers are changed, and every checksum is made right.

What is called whole must load. What is refused must be refused by all alike, and the step before is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from hypothesis import strategies as st

from fuzz.checkpoints import STEP, lay_out, newer, reseal
from fuzz.door import Case, Door
from fuzz.door_tensors import altered_file
from fuzz.mutate import altered_tree
from penstock.boundary.manifests import sealed
from penstock.errors import CheckpointError


def _seeds() -> dict[str, bytes]:
    return newer()


def _enter(name: str, data: bytes) -> None:
    from penstock import checkpoint

    lay_out(name, data)
    manifest = json.loads(newer()["manifest.json"])
    if name != "manifest.json":
        reseal(name, manifest)
    else:
        try:
            body = json.loads(data)
            Path(STEP, name).write_bytes(sealed(body) if isinstance(body, dict) else data)
        except (ValueError, RecursionError):
            pass  # no seal could be right
    refusal = _refusal(lambda: checkpoint.open_verified(STEP).load())
    quick = _refusal(lambda: checkpoint.open_verified(STEP, checksums=False))
    assert quick == refusal or (quick is None and "sha256 differs" in str(refusal)), (quick, refusal)
    stored = checkpoint.find(STEP.parent)
    assert stored is not None
    assert stored.step == (2 if refusal is None else 1)
    stored.load()
    if refusal is not None:
        raise CheckpointError(refusal)


def _refusal(read: Callable[[], object]) -> str | None:
    try:
        read()
    except CheckpointError as problem:
        return str(problem)
    return None


def _made() -> st.SearchStrategy[Case]:
    documents = {name: json.loads(data) for name, data in newer().items() if name.endswith(".json")}
    files = {name: data for name, data in newer().items() if name.endswith(".safetensors")}
    return st.one_of(
        *(
            st.tuples(st.just(name), altered_tree(tree).map(lambda tree: json.dumps(tree).encode()))
            for name, tree in documents.items()
        ),
        *(st.tuples(st.just(name), altered_file(data)) for name, data in files.items()),
    )


DOOR = Door(
    seeds=_seeds,
    enter=_enter,
    made=_made,
    tokens=(
        b"Infinity",
        b'{"$tensor": "a"}',
        b'{"$items": [[[], 1]]}',
        b'{"$array": "a", "dtype": "object"}',
        b"[1,",
    ),
)
