"""The most memory that tensors take at one time, counted tensor by tensor as operators make them and Python frees them.

What a process grows by says little of small models: allocators keep, libraries cache, pages are shared.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.containers import tensors


class TensorMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, counts the bytes of every storage that operators return, once, for as long as it lives.

    `held` are tensors that are there already and count; `ignored` (a batch of the caller's) do not. What an operator
    allocates and frees within itself is not seen.
    """

    def __init__(self, held: Iterable[Tensor] = (), ignored: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        for tensor in ignored:
            self._known.add(tensor.untyped_storage())
        for tensor in held:
            self._add(tensor)

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.bytes -= size

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tensors(out):
            self._add(tensor)
        return out
