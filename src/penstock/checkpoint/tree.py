"""Converts nested Python state to JSON and named tensors, and back, so that a checkpoint needs no pickle.

A tree is made of dicts, lists, tuples, tensors, numpy arrays, strings, numbers, booleans and None. `pack` takes the
tensors out and puts `{"$tensor": name}` in their place. Tuples, arrays and dicts with keys that are not strings get a
marker too, so that `unpack` returns the same tree. Floats are exact: Python's JSON writes the shortest text that reads
back as the same number, and it also reads the words that it writes for NaN and the infinities. An optimizer's state is
stored by parameter name, so that it does not depend on the parameters' order or grouping.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.boundary.files import quoted
from penstock.errors import CheckpointError


def pack(tree: Any, prefix: str = "") -> tuple[Any, dict[str, Tensor]]:
    """Split `tree` into a JSON document and its tensors, named by their path, such as `state.3.exp_avg`. Raises
    TypeError for a value of another kind (our own bug: such state could not be restored)."""
    tensors: dict[str, Tensor] = {}
    return _pack(tree, prefix, tensors), tensors


def _pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
        return {"$tensor": path}
    if isinstance(value, np.ndarray):
        # torch supports uint32 only in part; int64 holds its values exactly.
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
    """Undo `pack`. Raises CheckpointError if the document names a tensor that is missing."""
    if isinstance(document, list):
        return [unpack(item, tensors) for item in document]
    if not isinstance(document, dict):
        return document
    if "$tensor" in document:
        return _tensor(document["$tensor"], tensors)
    if "$array" in document:
        array, name = _tensor(document["$array"], tensors), document["dtype"]
        # A tensor on the meta device is only checked for its type: nothing is read yet.
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


_OWN = ("params", "param_names")


def by_name(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's `state_dict()` with parameter names instead of torch's numbers.

    The names are each group's `param_names`: set by `parameter_groups`, and by torch if an optimizer is made from
    `named_parameters()`. Entries other than `state` and `param_groups` are kept unchanged. Raises ValueError if names
    are missing, or two are the same.
    """
    groups: list[dict[str, Any]] = []
    called: dict[Any, str] = {}
    for group in state_dict["param_groups"]:
        names = list(group.get("param_names", ()))
        if len(names) != len(group["params"]):
            raise ValueError(
                f"A parameter group has {len(group['params'])} parameters and {len(names)} names; build it with "
                f"penstock.parameter_groups, or give the optimizer the model's named_parameters()."
            )
        called |= dict(zip(group["params"], names))
        groups.append({**{k: v for k, v in group.items() if k not in _OWN}, "params": names})
    if len(set(called.values())) != len(called):
        raise ValueError("Two parameters of the optimizer have one name.")
    state = {called[number]: entry for number, entry in state_dict["state"].items()}
    return {**state_dict, "state": state, "param_groups": groups}


def by_index(stored: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `by_name`, for the `load_state_dict` of the optimizer whose `state_dict()` is `current`. Raises
    CheckpointError if the stored state is of other parameters, or has different settings within one group."""
    home = {name: group for group in stored["param_groups"] for name in group["params"]}
    plain = by_name(current)
    was, now = (_optimizer_of(each["param_groups"]) for each in (stored, plain))
    if was != now:
        raise CheckpointError(
            f"The checkpoint holds the state of {was}, but the optimizer is {now}; use recipe.optimizer={was}, or "
            "start from its weights alone (init_from), with a new state."
        )
    names = [name for group in plain["param_groups"] for name in group["params"]]
    if set(names) != set(home):
        unknown, missing = sorted(set(home) - set(names)), sorted(set(names) - set(home))
        raise CheckpointError(
            f"The stored optimizer state is of another model: it lacks {missing[:3] or 'nothing'} and also has "
            f"{unknown[:3] or 'nothing'}. Use the model that it was saved with."
        )
    groups = []
    for group, named in zip(current["param_groups"], plain["param_groups"]):
        homes = [home[name] for name in named["params"]]
        settings = [{k: v for k, v in h.items() if k != "params"} for h in homes]
        if any(other != settings[0] for other in settings):
            raise CheckpointError(
                f"The stored optimizer groups parameters differently: {named['params'][0]} and other parameters of its "
                f"group were trained with different settings. Use the recipe that it was saved with."
            )
        own = {key: group[key] for key in _OWN if key in group}
        groups.append({**(settings[0] if settings else group), **own})
    number = {
        name: i for g, n in zip(groups, plain["param_groups"]) for name, i in zip(n["params"], g["params"])
    }
    state = {number[name]: entry for name, entry in stored["state"].items()}
    return {**stored, "state": state, "param_groups": groups}


def _optimizer_of(groups: Sequence[Mapping[str, Any]]) -> str:
    """Name of the optimizer that parameter groups belong to; it is stored in them, except for AdamW's and SGD's."""
    name = groups[0].get("algorithm") if groups else None
    return str(name or ("sgd" if groups and "nesterov" in groups[0] else "adamw"))
