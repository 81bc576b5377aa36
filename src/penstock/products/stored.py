"""Linear layers that store their weights in another form than the model's, for inference: their base, and those in
oneDNN's blocked layout.

A stored layer cannot be trained, saved or moved to another device.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

from penstock.models.expert_linear import ExpertLinear

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
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            x.contiguous(), self.weight, self.bias, "none", [], ""
        )
        return product


class Bf16(OneDnn):
    """Weights and products in bf16."""

    def __init__(self, linear: nn.Linear) -> None:
        Stored.__init__(self, linear)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().bfloat16(), _ROWS)
        self.bias = None if self.bias is None else self.bias.bfloat16()

    def kernel(self, x: Tensor) -> Tensor:
        return super().kernel(x.bfloat16()).to(x.dtype)


def in_place_of(linear: nn.Linear, stored: Stored) -> nn.Module:
    """A form as it takes a linear's place: of one that is split over ranks, with its part between them, as
    `penstock.parallel.parts` has it."""
    hand_over: Callable[[nn.Module], nn.Module] | None = getattr(linear, "replaced_by", None)
    return stored if hand_over is None else hand_over(stored)


class StoredExperts(nn.Module):
    """An `ExpertLinear` whose experts each multiply in a form of their own, one after the other."""

    def __init__(self, linear: ExpertLinear, store: Callable[[int, nn.Linear], nn.Module]) -> None:
        """`store` makes the form of an expert out of its number and a linear of its weights."""
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
        self.number = next(_numbers)
        _known_experts[self.number] = self

    def forward(self, x: Tensor, ends: Tensor, experts: Tensor) -> Tensor:
        """See `ExpertLinear`; in compiled code as one operation."""
        if torch.compiler.is_compiling():
            return torch.ops.penstock.separate(x, ends, self.number)  # type: ignore[no-any-return]
        return self.multiplied(x, ends)

    def multiplied(self, x: Tensor, ends: Tensor) -> Tensor:
        """x (V, in), sorted by expert, to (V, out)."""
        counts = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
        return torch.cat([one(rows) for one, rows in zip(self.experts, torch.split(x, counts))])


_known_experts: weakref.WeakValueDictionary[int, StoredExperts] = weakref.WeakValueDictionary()
torch.library.define("penstock::separate", "(Tensor x, Tensor ends, int number) -> Tensor")


@torch.library.impl("penstock::separate", "CPU")
def _separate(x: Tensor, ends: Tensor, number: int) -> Tensor:
    return _known_experts[number].multiplied(x, ends)


@torch.library.register_fake("penstock::separate")  # type: ignore[untyped-decorator]
def _separate_shape(x: Tensor, ends: Tensor, number: int) -> Tensor:
    return x.new_empty(len(x), _known_experts[number].out_features)
