"""Linears of a quantised model in ONNX: QuantizeLinear and DequantizeLinear around the product, which ONNX Runtime
computes in int8 where it has a kernel.

Inputs have the scale that their folder gives, or each row is divided by its own first. Weights in 4 bits are written as
the values that they stand for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.config.quantise import StoredFormat
from penstock.models.rounded import MOST, RoundedWeight

_OPSET = 19
"""Version of ONNX's operators; later ones have these as well."""


class QuantisedLinear(nn.Module):
    """A linear as ONNX's operators on whole numbers, which torch can export and not run."""

    def __init__(self, rounded: RoundedWeight, bias: Tensor | None, *, rounds_inputs: bool) -> None:
        super().__init__()
        self.bias, self.rounds_inputs, self.static = bias, rounds_inputs, rounded.input_scale is not None
        scale = torch.tensor(1.0) if rounded.input_scale is None else rounded.input_scale
        tensors = {"numbers": rounded.numbers, "scales": rounded.scales[:, 0].clone(), "one": scale.clone()}
        zeros = torch.zeros(len(rounded.scales), dtype=torch.int8)
        for name, tensor in {**tensors, "zeros": zeros, "zero": zeros[0].clone()}.items():
            self.register_buffer(name, tensor)

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor | None = None
        if self.rounds_inputs:
            if not self.static:
                rows = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / MOST
                x = x / rows
            x = _operator("QuantizeLinear", x, self.one, self.zero, torch.int8)
            x = _dequantised(x, self.one, self.zero)
        weight = _dequantised(self.numbers, self.scales, self.zeros, axis=0)
        if rows is None:
            return F.linear(x, weight, self.bias)
        product = F.linear(x, weight) * rows
        return product if self.bias is None else product + self.bias


def _operator(
    name: str, x: Tensor, scale: Any, zero: Any, dtype: torch.dtype, axis: int | None = None
) -> Tensor:
    how: Any = {} if axis is None else {"axis": axis}
    return torch.onnx.ops.symbolic(name, (x, scale, zero), how, dtype=dtype, shape=x.shape, version=_OPSET)


def _dequantised(numbers: Any, scale: Any, zero: Any, axis: int | None = None) -> Tensor:
    return _operator("DequantizeLinear", numbers, scale, zero, torch.float32, axis)


def quantise_graph(model: nn.Module, rounded: Mapping[str, tuple[StoredFormat, RoundedWeight]]) -> None:
    """Put ONNX's operators in the place of the named linears, in place."""
    for name, (form, weight) in rounded.items():
        parent, _, child = name.rpartition(".")
        holder = model.get_submodule(parent)
        old_bias: Tensor | None = cast(Any, holder.get_submodule(child)).bias
        bias = None if old_bias is None else old_bias.detach().float()
        if form == "int4":
            plain = nn.Linear(weight.numbers.shape[1], len(weight.numbers), bias=False)
            plain.weight = nn.Parameter(weight.values())
            plain.register_parameter("bias", None if bias is None else nn.Parameter(bias))
            setattr(holder, child, plain)
        else:
            setattr(holder, child, QuantisedLinear(weight, bias, rounds_inputs=form == "int8"))
