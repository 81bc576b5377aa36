"""Operators of torch that run inside a block of code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Watched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, `note` hears of each operator, its arguments and what it gave."""

    def __init__(self, note: Callable[[Any, Any, Any], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._note(func, args, out)
        return out


PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "mkldnn_rnn_layer", "linear")


class ProductDtypes(Watched):  # type: ignore[no-untyped-call]
    """While entered, counts the floating types that products give."""

    def __init__(self) -> None:
        super().__init__(self._count)
        self.counts: Counter[torch.dtype] = Counter()

    def _count(self, func: Any, _: Any, out: Any) -> None:
        if func._schema.name.removeprefix("aten::") in PRODUCTS:
            first = out[0] if isinstance(out, tuple | list) else out
            self.counts[first.dtype] += 1


_WAITS = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "nonzero_numpy", "masked_select",
    "unique", "_unique2", "unique_dim", "unique_consecutive", "bincount", "repeat_interleave", "_assert_async_host",
}  # fmt: skip


class Waits(Watched):  # type: ignore[no-untyped-call]
    """While entered, counts what makes a host wait for a device: reading a value, shapes that depend on values, and
    copies to the host, which on a CPU copy nothing, so that no operator shows them.

    `known` is what is read without waiting on a GPU, by the address of its memory: the name that it is counted by, and
    none for what is in host memory there too.
    """

    def __init__(self, known: Callable[[], Mapping[int, str]] = dict) -> None:
        super().__init__(self._count)
        self.counts: Counter[str] = Counter()
        self._known = known
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> Any:
        for name in ("cpu", "numpy", "tolist"):
            own = getattr(Tensor, name)

            def noted(tensor: Tensor, *args: Any, _name: str = name, _own: Any = own) -> Any:
                self.counts[_name] += 1
                return _own(tensor, *args)

            self._patch.setattr(Tensor, name, noted)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self._patch.undo()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _count(self, func: Any, args: Any, _: Any) -> None:
        name = func.overloadpacket.__name__
        masked = name in ("index", "index_put_", "index_put") and any(
            isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1] if index is not None
        )
        if name in _WAITS or masked:
            name = self._known().get(args[0].data_ptr(), name)
            if name:
                self.counts[name] += 1


def host_counters(optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """The step counters of an optimizer that is neither fused nor capturable, as `Waits` knows them: torch keeps these
    on the host, whatever the device."""
    group = optimizer.param_groups[0]
    if group.get("fused") or group.get("capturable") or "foreach" not in group:
        return {}
    return {state["step"].data_ptr(): "" for state in optimizer.state.values() if "step" in state}
