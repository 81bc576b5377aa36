"""Kinds of CPU, for tests that pretend to run on another one. Kernels still run as this machine can."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from penstock.cpu import Cpu

KINDS = {
    "avx2": Cpu(avx512=False, bf16=False, vnni=False, packs_bf16=False),
    "avx512": Cpu(avx512=True, bf16=False, vnni=True, packs_bf16=True),
    "avx512_bf16": Cpu(avx512=True, bf16=True, vnni=True, packs_bf16=True),
    "unknown": Cpu(avx512=False, bf16=None, vnni=False, packs_bf16=False),
}


def pretend(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Let the code take this machine's CPU for one of another kind."""
    monkeypatch.setattr("penstock.cpu._CPU", KINDS[kind])


class ProductsOfBf16(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, fp32 matrix products round their inputs to bf16 and sum in fp32, as oneDNN does with AMX under
    `matmul=medium`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _PRODUCTS:
            first = len(args) - 2  # addmm and baddbmm add their first tensor as it is
            args = (*args[:first], *tree_map(_rounded, args[first:]))
        return func(*args, **(kwargs or {}))


_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)


def _rounded(x: Any) -> Any:
    return x.bfloat16().float() if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x
