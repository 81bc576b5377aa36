"""Products of rows that are sorted by expert with the weights of their experts.

Shapes: D features in, R out, E experts, V rows, one for each visit of a token to an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.kernels.native_grouped import grouped_outer, grouped_product, takes_grouped


class _Grouped(torch.autograd.Function):
    """Rows x (V, D), sorted by expert, times their expert's weight (E, R, D): (V, R). Those of expert e end at
    `ends`[e]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, plain: bool) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.plain = plain
        return _times(x, weight.transpose(1, 2), ends, plain)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, ends = ctx.saved_tensors
        grad = grad.contiguous()
        into = _times(grad, weight, ends, ctx.plain) if ctx.needs_input_grad[0] else None
        learn = _outer(grad, x, ends, ctx.plain) if ctx.needs_input_grad[1] else None
        return into, learn, None, None


def _times(x: Tensor, weight: Tensor, ends: Tensor, plain: bool) -> Tensor:
    """x (V, K) times weight (E, K, R)."""
    way = _way(x, weight.shape, plain)
    if way == "native":
        return grouped_product(x, weight.transpose(1, 2), ends)
    if way == "torch":
        return F.grouped_mm(x, weight, offs=ends)
    parts = zip(torch.split(x, _counts(ends)), weight.unbind(0))
    return torch.cat([rows @ one for rows, one in parts])


def _outer(grad: Tensor, x: Tensor, ends: Tensor, plain: bool) -> Tensor:
    """For each expert, its rows of grad (V, R) transposed, times its rows of x (V, D): (E, R, D)."""
    way = _way(x, (len(ends), x.shape[1], grad.shape[1]), plain)
    if way == "native":
        return grouped_outer(grad, x, ends)
    if way == "torch":
        return F.grouped_mm(grad.t(), x, offs=ends)
    counts = _counts(ends)
    return torch.stack(
        [rows.t() @ seen for rows, seen in zip(torch.split(grad, counts), torch.split(x, counts))]
    )


def _counts(ends: Tensor) -> list[int]:
    return torch.diff(ends, prepend=ends.new_zeros(1)).tolist()


_GROUPED = {"cpu": (torch.float32, torch.bfloat16, torch.float16), "cuda": (torch.bfloat16,)}
"""Types for which torch has a grouped product."""


def _way(x: Tensor, shape: Sequence[int], plain: bool) -> str:
    """Choose how rows like x are multiplied by weights of a shape (E, K, R), and their gradients: by Penstock's kernels
    for CPUs ("native"), by torch's grouped product, for some types and rows of a multiple of 16 bytes ("torch"), or one
    expert after the other ("loop")."""
    if plain or not len(x):
        return "loop"
    if takes_grouped(x, *shape):
        return "native"
    aligned = all(size * x.element_size() % 16 == 0 for size in shape[1:])
    return "torch" if aligned and x.dtype in _GROUPED.get(x.device.type, ()) else "loop"


@torch.library.custom_op("penstock::grouped", mutates_args=())
def _grouped(x: Tensor, weight: Tensor, ends: Tensor, plain: bool) -> Tensor:
    """`_Grouped` as one custom operation, because compiled code cannot know how many rows an expert has."""
    return _times(x, weight.transpose(1, 2), ends, plain)


@_grouped.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor, plain: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("penstock::grouped_outer", mutates_args=())
def _grouped_outer(grad: Tensor, x: Tensor, weight: Tensor, ends: Tensor, plain: bool) -> Tensor:
    """The gradient of the weight of `_grouped`."""
    return _outer(grad, x, ends, plain)


@_grouped_outer.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, ends: Tensor, plain: bool) -> Tensor:
    return x.new_empty(weight.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.plain = inputs[3]


def _grouped_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
    x, weight, ends = ctx.saved_tensors
    grad = grad.contiguous()
    into = _grouped(grad, weight.transpose(1, 2), ends, ctx.plain)
    return into, _grouped_outer(grad, x, weight, ends, ctx.plain), None, None


_grouped.register_autograd(_grouped_backward, setup_context=_keep)


class ExpertLinear(nn.Module):
    """A linear map for each of several experts: weight (E, out, in), bias (E, out)."""

    def __init__(self, experts: int, inputs: int, outputs: int, *, bias: bool, **where: Any) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs, **where))
        self.bias: nn.Parameter | None
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(experts, outputs, **where)) if bias else None
        )
        self.plain = False
        """Whether experts are multiplied one by one even if torch has a grouped product: see `Plan.experts`."""

    def forward(self, x: Tensor, ends: Tensor, experts: Tensor) -> Tensor:
        """x (V, in), sorted by expert, to (V, out); `ends` as in `_Grouped`, `experts` (V,) the expert of each row."""
        weight = self.weight.to(x.dtype)
        if torch.compiler.is_compiling():
            x = _grouped(x, weight, ends, self.plain)
        else:
            x = _Grouped.apply(x, weight, ends, self.plain)  # type: ignore[no-untyped-call]
        return x if self.bias is None else x + self.bias.to(x.dtype)[experts]
