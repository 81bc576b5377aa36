"""Linear layers that store their weights in another form than the model's, for inference: their base, and those in
oneDNN's blocked layout.

A stored layer cannot be trained, saved or moved to another device.
"""

from __future__ import annotations

import itertools
import weakref

import torch
from torch import Tensor, nn

_ROWS = 32
"""Rows of inputs that oneDNN lays weights out for; those for one row serve others badly."""


class Stored(nn.Module):
    """A linear layer whose weights are kept in another form: (…, in) to (…, out)."""

    wide = False
    """Whether `kernel` returns fp32, whatever it is given."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape  # of a split layer, this rank's
        self.dtype = linear.weight.dtype
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.number = next(_numbers)
        _known[self.number] = self

    def forward(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x.new_empty(*x.shape[:-1], self.out_features)
        return self.product(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)

    def product(self, x: Tensor) -> Tensor:
        """(N, in) to (N, out), for N of at least 1."""
        raise NotImplementedError

    def kernel(self, x: Tensor) -> Tensor:
        """(…, in) to (…, out) by what torch.compile cannot look into."""
        raise NotImplementedError

    def called(self, x: Tensor) -> Tensor:
        """`kernel`; in compiled code as one operation."""
        if torch.compiler.is_compiling():
            return torch.ops.penstock.packed(x, self.number)  # type: ignore[no-any-return]
        return self.kernel(x)


_numbers = itertools.count()
_known: weakref.WeakValueDictionary[int, Stored] = weakref.WeakValueDictionary()
torch.library.define("penstock::packed", "(Tensor x, int number) -> Tensor")


@torch.library.impl("penstock::packed", "CPU")
def _called(x: Tensor, number: int) -> Tensor:
    return _known[number].kernel(x)


@torch.library.register_fake("penstock::packed")  # type: ignore[untyped-decorator]
def _shape(x: Tensor, number: int) -> Tensor:
    layer = _known[number]
    return x.new_empty((*x.shape[:-1], layer.out_features), dtype=torch.float32 if layer.wide else x.dtype)


class OneDnn(Stored):
    """Weights in oneDNN's blocked layout."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS)

    def forward(self, x: Tensor) -> Tensor:
        return self.called(x) if x.numel() else x.new_empty(*x.shape[:-1], self.out_features)

    def kernel(self, x: Tensor) -> Tensor:
        found: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            x.contiguous(), self.weight, self.bias, "none", [], ""
        )
        return found


class Bf16(OneDnn):
    """Weights and products in bf16."""

    def __init__(self, linear: nn.Linear) -> None:
        Stored.__init__(self, linear)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().bfloat16(), _ROWS)
        self.bias = None if self.bias is None else self.bias.bfloat16()

    def kernel(self, x: Tensor) -> Tensor:
        return super().kernel(x.bfloat16()).to(x.dtype)
