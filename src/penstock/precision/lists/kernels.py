"""Casts that torch.autocast makes on CUDA and lacks on a CPU, registered with torch in the place where its own are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from penstock.containers import replaced, tensors
from penstock.precision.lists.names import name_of
from penstock.precision.lists.table import CPU_PROMOTED, CPU_WHOLE, Policy

CASTABLE = (torch.float16, torch.bfloat16, torch.float32)
_VARIANTS = {"lerp": ("Scalar", "Tensor"), "scatter": ("src",)}
"""Overloads, of operations that have others than the default."""
_library: list[torch.library.Library] = []


@functools.cache
def registered() -> dict[str, Policy]:
    """The operations that need no watching on a CPU, since `register` sees to them, each with its list."""
    policies: dict[str, Policy] = dict.fromkeys(map(name_of, CPU_PROMOTED), "promote")
    return policies | dict.fromkeys(map(name_of, CPU_WHOLE), "half")


def register() -> None:
    """Let torch.autocast on a CPU take mixed arguments of these operations, from now on and in the whole process.

    Nothing that worked before changes: `promote` is asked only where types differ, which torch refuses, and `half` does
    what the products do of which torch makes the operation. Where autocast is off, so is this.
    """
    if _library:
        return
    _library.append(torch.library.Library("aten", "IMPL"))  # type: ignore[no-untyped-call]
    for name, policy in registered().items():
        packet = (
            name.removeprefix("torch.nn.functional.").removeprefix("torch.").replace("linalg.", "linalg_")
        )
        for variant in _VARIANTS.get(packet, ("default",)):
            overload = getattr(getattr(torch.ops.aten, packet), variant)
            _library[0].impl(overload, _casting(overload, policy), "AutocastCPU")  # type: ignore[no-untyped-call]


def _casting(overload: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    """An operation that casts its arguments as its list says, `promote` or `half`."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        operands = list(tensors((args, kwargs)))
        if policy == "promote":
            dtype = torch.float32
            casts = len({tensor.dtype for tensor in operands if tensor.dtype in CASTABLE}) > 1
        else:
            dtype = torch.get_autocast_dtype("cpu")
            # One number beside a tensor is multiplied with, and no product.
            casts = all(tensor.dtype in CASTABLE and tensor.ndim > 0 for tensor in operands)
        if casts:
            args, kwargs = replaced((args, kwargs), lambda t: t.to(dtype) if t.dtype in CASTABLE else t)
        with torch.autocast("cpu", enabled=False):
            return overload(*args, **kwargs)

    return kernel
