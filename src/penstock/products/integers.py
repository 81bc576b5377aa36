"""Linear layers whose weights are stored in 8 or 4 bits, for inference on a CPU."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.config.formats import FORMATS
from penstock.cpu import this_cpu
from penstock.errors import EnvironmentProblem
from penstock.kernels.native_integers import (
    PAIRS,
    PackedInt8,
    in_panels,
    multiplies_integers,
    widened_product,
    widens_integers,
)
from penstock.models.rounded import MOST, RoundedWeight, round_groups, round_rows
from penstock.products.stored import Stored

_GROUP = FORMATS["int4"].group
"""Inputs that share a scale in `int4`."""
_BEYOND, _MULTIPLE = 64, 16
"""Bytes of memory after int8 weights, and the multiple of their inputs, that torch's bf16 products need."""
_ENGINES = ("x86", "fbgemm")
"""torch's quantised engines that support `fused_product`."""
_LEAST = 1e-12
"""The smallest step between rounded inputs."""


def packed_numbers(numbers: Tensor, scales: Tensor, bias: Tensor | None) -> object:
    """Pack int8 numbers (out, in) with a scale per output (out,) for torch's quantised products.

    Raises EnvironmentProblem if torch has no kernel that rounds inputs by a given scale.
    """
    if torch.backends.quantized.engine not in _ENGINES:
        raise EnvironmentProblem(
            f"torch's quantised engine {torch.backends.quantized.engine} cannot round inputs by a given scale, as "
            "int8 needs here; use weights=int8_weights, or weights=plain."
        )
    with warnings.catch_warnings():
        # torch warns that it will remove quantised tensors, but their kernels are its fastest so far.
        warnings.simplefilter("ignore", UserWarning)
        zeros = torch.zeros(len(scales), dtype=torch.int64)
        weight = torch._make_per_channel_quantized_tensor(numbers, scales.double(), zeros, 0)
        return torch.ops.quantized.linear_prepack(weight, bias)


def fused_product(x: Tensor, scale: float, zero: int, packed: object) -> Tensor:
    """Rows (M, in), rounded with one scale to bytes in which `zero` means 0, times packed numbers: (M, out) fp32."""
    return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default(  # type: ignore[no-any-return]
        x.contiguous(), scale, zero, packed
    )


class Int8(Stored):
    """A linear layer with int8 weights, and int8 inputs with a range per row, so that rows do not affect each other.

    A row x from `low` to `high` becomes q = round((x − middle) / s), s = (high − low) / (2 · `most`), so that

        y[n] = s · scale[n] · Σ_k q[k] · numbers[n, k] + middle · Σ_k weight[n, k] + bias[n]

    with the rounded weights. All levels are used even if inputs have nearly one sign, as after an activation. If
    available, one kernel does all of this (`penstock.kernels.native_integers`).

    With `factors`, fp32 (in,), inputs are first multiplied by them, and weights divided, so that all features can have
    similar sizes (Xiao et al., "SmoothQuant", ICML 2023, eq. 3).
    """

    wide = True
    one_pass = True
    """Whether that kernel also rounds by ranges, which it supports if each input is rounded once."""

    def __init__(self, linear: nn.Linear, factors: Tensor | None = None) -> None:
        super().__init__(linear)
        self.factors = factors
        rounded = round_rows(linear.weight if factors is None else linear.weight.float() / factors)
        self.bias = None if self.bias is None else self.bias.float()
        # Without VNNI, sums of two products of whole bytes do not fit into 16 bits.
        self.most = MOST if this_cpu().vnni else MOST // 2
        self.fused: PackedInt8 | None = None
        if multiplies_integers():
            bias = self.bias if self.one_pass else None
            input_factors = factors if self.one_pass else None
            self.fused = PackedInt8(rounded.numbers, rounded.scales[:, 0], bias, input_factors)
            self.wide = not self.one_pass
        self.packed = None if self.fused else packed_numbers(rounded.numbers, rounded.scales[:, 0], None)
        self.sums = rounded.numbers.sum(1) * rounded.scales[:, 0]

    def product(self, x: Tensor) -> Tensor:
        if self.fused is not None and self.one_pass:
            return self.called(x)
        wide = x.float() if self.factors is None else x.float() * self.factors
        low, high = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
        middle, scale = (low + high) / 2, ((high - low) / (2 * self.most)).clamp(min=_LEAST)
        product = self.multiplied((wide - middle) * scale.reciprocal())
        offset = middle * self.sums if self.bias is None else torch.addcmul(self.bias, middle, self.sums)
        return torch.addcmul(offset, product, scale).to(x.dtype)

    def multiplied(self, x: Tensor) -> Tensor:
        """Rows (M, in) from −`most` to `most`, rounded to whole numbers, times the weights: (M, out) fp32."""
        return self.called(x)

    def kernel(self, x: Tensor) -> Tensor:
        if self.fused is not None:
            return self.fused.product(x, "range" if self.one_pass else 1.0)
        return fused_product(x, 1.0, self.most + 1, self.packed)


class Int8Twice(Int8):
    """`Int8` with inputs split into two parts of 8 bits."""

    one_pass = False

    def multiplied(self, x: Tensor) -> Tensor:
        """See `Int8`. The remainder of the first rounding, from −½ to ½, is rounded as well."""
        whole, finer = x.round(), 2 * self.most
        return super().multiplied(whole) + super().multiplied((x - whole) * finer) / finer


class Int8Weights(Stored):
    """A linear layer with int8 weights and products in bf16, by one kernel for any number of rows, so that rows do not
    affect each other: our own if available (`penstock.kernels.native_integers`), else torch's."""

    def __init__(self, linear: nn.Linear, rounded: RoundedWeight | None = None) -> None:
        super().__init__(linear)
        rounded = round_rows(linear.weight) if rounded is None else rounded
        self.widens, self.scales = widens_integers(), rounded.scales[:, 0].contiguous()
        if self.widens:
            self.weight = in_panels(rounded.numbers, PAIRS)
            self.bias = None if self.bias is None else self.bias.float()
            return
        numbers = F.pad(rounded.numbers, (0, -self.in_features % _MULTIPLE))
        self.weight = F.pad(numbers.flatten(), (0, _BEYOND))[: numbers.numel()].view_as(numbers)
        self.scales = self.scales.to(torch.bfloat16)

    def product(self, x: Tensor) -> Tensor:
        if self.widens:
            return self.called(x)
        half = F.pad(x.to(torch.bfloat16), (0, -self.in_features % _MULTIPLE)).contiguous()
        product = torch._weight_int8pack_mm(half, self.weight, self.scales).to(x.dtype)
        return product if self.bias is None else product + self.bias

    def kernel(self, x: Tensor) -> Tensor:
        return widened_product(x, self.weight, self.scales, self.bias)


class Int4(Stored):
    """A linear layer with 4-bit weights, in groups."""

    def __init__(self, linear: nn.Linear, rounded: RoundedWeight | None = None) -> None:
        super().__init__(linear)
        rounded = round_groups(linear.weight) if rounded is None else rounded
        assert rounded.offsets is not None
        self.weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(rounded.numbers.to(torch.int32), 1)
        # The kernel reads a number n as (n − 8) · scale + offset.
        scales = torch.stack([rounded.scales, rounded.offsets + 8 * rounded.scales], dim=-1)
        self.scales = scales.transpose(0, 1).contiguous().to(self.dtype)

    def product(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu.default(
            x.contiguous(), self.weight, _GROUP, self.scales.to(x.dtype)
        )
        return product if self.bias is None else product + self.bias
