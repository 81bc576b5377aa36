"""A forward pass under op lists, and a small model whose types they decide."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.precision.lists import OpLists, default_lists, region


@contextmanager
def autocast_on(device: str, dtype: torch.dtype = torch.bfloat16) -> Iterator[None]:
    """torch.autocast without its look at whether there is such a device."""
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        torch.autocast_decrement_nesting()
        torch.set_autocast_enabled(device, False)


@contextmanager
def accelerated(
    lists: OpLists | None, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> Iterator[None]:
    with torch.autocast(device, dtype=dtype), region(lists, device, dtype):
        yield


class Block(nn.Module):
    """A layer with two operations that autocast on a CPU leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.linear(self.norm(x))).exp()


class Model(nn.Module):
    """Two blocks and a head, (B, 8) to (B, 4); the blocks run plainly or in a checkpoint, reentrant or not."""

    def __init__(self, how: Literal["plain", "reentrant", "not reentrant"] = "plain") -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 4)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.how == "plain":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.how == "reentrant")
            x = x / x.sum()
        return self.head(x)  # type: ignore[no-any-return]


GELU_FP32 = default_lists(torch.bfloat16, "cpu").with_(fp32=[F.gelu, torch.exp])
