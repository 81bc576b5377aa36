"""Tensors inside batches, and inside inputs and outputs of modules: tuples, lists, mappings, dataclasses and
namespaces, at any depth.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

from torch import Tensor


def replaced(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Nested containers with `change` applied to each tensor, as new containers of the same types. Containers keep
    their other state: a default factory, a maximum length, attributes. Objects of other types are returned unchanged,
    with any tensors inside.
    """
    if isinstance(value, Tensor):
        return change(value)
    # The first kinds occur in compiled code, and are written so that torch can trace them.
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(replaced(item, change) for item in value))
    if type(value) in (tuple, list):
        return type(value)(replaced(item, change) for item in value)
    if type(value) is dict:
        return {key: replaced(item, change) for key, item in value.items()}
    if type(value) is OrderedDict:
        return OrderedDict([(key, replaced(item, change)) for key, item in value.items()])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items: Any = value
        if isinstance(items, Mapping):  # transformers' ModelOutput, in which absent fields are not items
            return type(items)(**{key: replaced(item, change) for key, item in items.items()})
        changed = {
            f.name: replaced(getattr(value, f.name), change) for f in dataclasses.fields(value) if f.init
        }
        return dataclasses.replace(value, **changed)
    return _other(value, change)


def _other(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Rarer containers. If nothing inside changes, the container itself is returned."""
    if isinstance(value, tuple):
        return _tuple(value, change)
    if isinstance(value, MappingProxyType):
        return MappingProxyType(replaced(dict(value), change))
    if isinstance(value, list | deque | UserList):
        pairs: Any = enumerate(value)
    elif isinstance(value, MutableMapping):
        pairs = value.items()
    elif isinstance(value, SimpleNamespace):
        pairs = vars(value).items()
    else:
        return value
    changed = {key: new for key, item in pairs if (new := replaced(item, change)) is not item}
    fresh = _copy(value) if changed else None
    if fresh is None:
        return value
    for key, item in changed.items():
        if isinstance(value, SimpleNamespace):
            setattr(fresh, key, item)
        else:
            fresh[key] = item
    return fresh


def _tuple(value: tuple[Any, ...], change: Callable[[Tensor], Tensor]) -> Any:
    items = [replaced(item, change) for item in value]
    if all(new is item for new, item in zip(items, value)):
        return value
    if hasattr(value, "n_sequence_fields"):  # torch.return_types
        kind: Any = type(value)
        return kind(items)
    fresh = tuple.__new__(type(value), items)
    vars(fresh).update(vars(value)) if hasattr(value, "__dict__") else None
    return fresh


def _copy(value: Any) -> Any:
    """A copy that stores its own items; None if that cannot be guaranteed."""
    if isinstance(value, dict | list | deque | UserDict | UserList | SimpleNamespace) or hasattr(
        type(value), "__copy__"
    ):
        return copy.copy(value)
    if not hasattr(value, "__dict__"):
        return None
    # A user's mapping may store its items in an inner mapping, which a shallow copy would share.
    fresh = copy.copy(value)
    vars(fresh).update(
        {key: copy.copy(kept) for key, kept in vars(value).items() if isinstance(kept, Mapping)}
    )
    return fresh


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in nested containers that `replaced` would change, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, tuple | list | deque | UserList):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, SimpleNamespace):
        for item in vars(value).values():
            yield from tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if field.init:
                yield from tensors(getattr(value, field.name, None))
