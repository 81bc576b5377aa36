"""Linear layers for inference that store their weights in another form: the base class, and oneDNN's blocked layout.

A stored layer cannot be trained, saved or moved to another device.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from penstock.models.expert_linear import ExpertLinear

_ROWS = 32
"""Number of input rows that oneDNN packs weights for; a layout for one row is slow for others."""


class Numbered(nn.Module):
    """A module that compiled code calls by its number, as one opaque operator. A copy has its own number."""

    def __init__(self) -> None:
        super().__init__()
        self._enter()

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._enter()

    def _enter(self) -> None:
        self.number = next(_numbers)
        _known[self.number] = self


_numbers = itertools.count()
_known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class Stored(Numbered):
    """A linear layer whose weights are stored in another form: (…, in) to (…, out)."""

    wide = False
    """Whether `kernel` always returns fp32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape  # this rank's part if the layer is split
        self.dtype = linear.weight.dtype
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x.new_empty(*x.shape[:-1], self.out_features)
        return self.product(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)

    def product(self, x: Tensor) -> Tensor:
        """Multiply (N, in) to (N, out), for N of at least 1."""
        raise NotImplementedError

    def kernel(self, x: Tensor) -> Tensor:
        """Multiply (…, in) to (…, out) with operations that torch.compile cannot trace."""
        raise NotImplementedError

    def called(self, x: Tensor) -> Tensor:
        """Call `kernel`; in compiled code as one opaque operator."""
        if torch.compiler.is_compiling():
            return torch.ops.penstock.packed(x, self.number)  # type: ignore[no-any-return]
        return self.kernel(x)


torch.library.define("penstock::packed", "(Tensor x, int number) -> Tensor")


@torch.library.impl("penstock::packed", "CPU")
def _called(x: Tensor, number: int) -> Tensor:
    return _known[number].kernel(x)  # type: ignore[no-any-return]


@torch.library.register_fake("penstock::packed")  # type: ignore[untyped-decorator]
def _shape(x: Tensor, number: int) -> Tensor:
    layer = _known[number]
    return x.new_empty((*x.shape[:-1], layer.out_features), dtype=torch.float32 if layer.wide else x.dtype)


class OneDnn(Stored):
    """A linear layer with weights in oneDNN's blocked layout, in `dtype` if it is given."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype | None = None) -> None:
        super().__init__(linear)
        weight = linear.weight.detach().to(dtype or self.dtype)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
        self.bias = None if self.bias is None else self.bias.to(weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.called(x) if x.numel() else x.new_empty(*x.shape[:-1], self.out_features)

    def kernel(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            x.contiguous(), self.weight, self.bias, "none", [], ""
        )
        return product


class Bf16(OneDnn):
    """A linear layer with weights and products in bf16."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear, torch.bfloat16)

    def kernel(self, x: Tensor) -> Tensor:
        return super().kernel(x.bfloat16()).to(x.dtype)


def in_place_of(linear: nn.Linear, stored: Stored) -> nn.Module:
    """The module that replaces a linear layer by its stored form; for a layer that is split over ranks, with the
    communication of `penstock.parallel.parts`."""
    hand_over: Callable[[nn.Module], nn.Module] | None = getattr(linear, "replaced_by", None)
    return stored if hand_over is None else hand_over(stored)


class StoredExperts(Numbered):
    """An `ExpertLinear` whose experts each multiply in their own stored form, one after the other."""

    def __init__(self, linear: ExpertLinear, store: Callable[[int, nn.Linear], nn.Module]) -> None:
        """`store` makes the stored form of an expert from its number and a linear layer with its weights."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = None
        self.experts = nn.ModuleList()
        for number, weight in enumerate(linear.weight.detach()):
            one = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
            bias = None if linear.bias is None else linear.bias.detach()[number]
            one.weight = nn.Parameter(weight, requires_grad=False)
            one.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
            self.experts.append(store(number, one))

    def forward(self, x: Tensor, ends: Tensor, experts: Tensor) -> Tensor:
        """See `ExpertLinear`; in compiled code one opaque operator."""
        if torch.compiler.is_compiling():
            return torch.ops.penstock.separate(x, ends, self.number)  # type: ignore[no-any-return]
        return self.multiplied(x, ends)

    def multiplied(self, x: Tensor, ends: Tensor) -> Tensor:
        """Multiply x (V, in), sorted by expert, to (V, out)."""
        counts = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
        return torch.cat([one(rows) for one, rows in zip(self.experts, torch.split(x, counts))])


torch.library.define("penstock::separate", "(Tensor x, Tensor ends, int number) -> Tensor")


@torch.library.impl("penstock::separate", "CPU")
def _separate(x: Tensor, ends: Tensor, number: int) -> Tensor:
    return _known[number].multiplied(x, ends)  # type: ignore[no-any-return]


@torch.library.register_fake("penstock::separate")  # type: ignore[untyped-decorator]
def _separate_shape(x: Tensor, ends: Tensor, number: int) -> Tensor:
    return x.new_empty(len(x), _known[number].out_features)
