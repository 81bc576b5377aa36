"""Nested Python state as JSON and named tensors, and back, so that a checkpoint needs no pickle.

A tree is made of dicts, lists, tuples, tensors, numpy arrays, strings, numbers, booleans and None. `pack` takes the
tensors out and puts `{"$tensor": name}` in their place. Tuples, arrays and dicts with keys that are not strings get a
marker too, so that `unpack` returns the same tree. Floats are exact: Python's JSON writes the shortest text that reads
back as the same number, and it reads the words that it writes for NaN and the infinities.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.boundary.files import quoted
from penstock.errors import CheckpointError


def pack(tree: Any, prefix: str = "") -> tuple[Any, dict[str, Tensor]]:
    """Split `tree` into a JSON document and its tensors, named by their path, such as `state.3.exp_avg`.

    Raises:
        TypeError: a value of another kind is in the tree (our own bug: such state could not be restored).
    """
    tensors: dict[str, Tensor] = {}
    return _pack(tree, prefix, tensors), tensors


def _pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
        return {"$tensor": path}
    if isinstance(value, np.ndarray):
        # torch supports uint32 in part only; int64 holds its values exactly.
        array = value.astype(np.int64) if value.dtype == np.uint32 else value
        tensors[path] = torch.from_numpy(np.array(array))
        return {"$array": path, "dtype": value.dtype.name}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        raise TypeError(f"The state at '{path}' is a whole number of more than 64 bits; store it as text.")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return {"$tuple": [_pack(item, _join(path, i), tensors) for i, item in enumerate(value)]}
    if isinstance(value, list):
        return [_pack(item, _join(path, i), tensors) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _pack(item, _join(path, key), tensors) for key, item in value.items()}
        return {"$items": [[key, _pack(item, _join(path, key), tensors)] for key, item in value.items()]}
    raise TypeError(f"The state at '{path}' is a {type(value).__name__}, which a checkpoint cannot hold.")


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def unpack(document: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Undo `pack`.

    Raises:
        CheckpointError: the document names a tensor that is not there.
    """
    if isinstance(document, list):
        return [unpack(item, tensors) for item in document]
    if not isinstance(document, dict):
        return document
    if "$tensor" in document:
        return _tensor(document["$tensor"], tensors)
    if "$array" in document:
        array, name = _tensor(document["$array"], tensors), document["dtype"]
        # Of a tensor on the meta device only the type is asked for: nothing is read yet.
        values = (array.new_empty(0, device="cpu") if array.is_meta else array).numpy()
        if name != values.dtype.name and (name, values.dtype.name) != ("uint32", "int64"):
            raise CheckpointError(
                f"The checkpoint's state is refused: an array of {quoted(name)} is not what its file holds."
            )
        return values.astype(name, copy=False)
    if "$tuple" in document:
        return tuple(unpack(item, tensors) for item in document["$tuple"])
    if "$items" in document:
        return {key: unpack(item, tensors) for key, item in document["$items"]}
    return {key: unpack(item, tensors) for key, item in document.items()}


def _tensor(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    if name not in tensors:
        raise CheckpointError(
            f"The checkpoint's state names tensor {quoted(name)}, but its tensor files have none."
        )
    return tensors[name]
