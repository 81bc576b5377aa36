"""Linear layers whose weights are stored in 8 or 4 bits, for inference on a CPU."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.config.formats import FORMATS
from penstock.cpu import this_cpu
from penstock.models.rounded import RoundedWeight, round_groups, round_rows
from penstock.products.stored import Stored

_GROUP = FORMATS["int4"].group
"""Inputs that share a scale in `int4`."""
_FEW = 16
"""Rows of inputs up to which products with `int8_weights` read them as they are."""

_BEYOND = 64
"""Bytes of memory behind weights in int8."""


def packed_numbers(numbers: Tensor, scales: Tensor, bias: Tensor | None) -> object:
    """int8 numbers (out, in) with a scale for each output (out,), as torch's quantised products take them."""
    with warnings.catch_warnings():
        # torch will take its quantised tensors out one day; the kernels that take this one are its fastest so far.
        warnings.simplefilter("ignore", UserWarning)
        zeros = torch.zeros(len(scales), dtype=torch.int64)
        weight = torch._make_per_channel_quantized_tensor(numbers, scales.double(), zeros, 0)
        return torch.ops.quantized.linear_prepack(weight, bias)


class Int8(Stored):
    """Weights and inputs in int8."""

    wide = True

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        rounded = round_rows(linear.weight)
        self.weight = packed_numbers(rounded.numbers, rounded.scales[:, 0], None)
        # Without VNNI, sums of two products of whole bytes do not fit 16 bits.
        self.narrow = not this_cpu().vnni

    def product(self, x: Tensor) -> Tensor:
        # The kernel has one scale for all rows. So each is divided by its largest number first: one row with an outlier
        # would leave the others few levels.
        sizes = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12)
        product = self.multiplied(x.float() / sizes)
        product = product * sizes if self.bias is None else torch.addcmul(self.bias, product, sizes)
        return product.to(x.dtype)

    def multiplied(self, x: Tensor) -> Tensor:
        """Rows (N, in) of numbers from −1 to 1 by the weights, in fp32."""
        return self.called(x)

    def kernel(self, x: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic.default(x, self.weight, self.narrow)  # type: ignore[no-any-return]


class Int8Twice(Int8):
    """The same with inputs in twice 8 bits."""

    def multiplied(self, x: Tensor) -> Tensor:
        """See `Int8`."""
        low, high = x.aminmax()
        # The kernel's own levels, among which is zero: so it rounds these numbers to themselves.
        levels = 127 if self.narrow else 255
        step = ((high.clamp(min=0.0) - low.clamp(max=0.0)) / levels).clamp(min=1e-12)
        coarse = (x / step).round() * step
        return super().multiplied(coarse) + super().multiplied(x - coarse)


class Int8Weights(Stored):
    """Weights in int8, products in bf16."""

    def __init__(self, linear: nn.Linear, rounded: RoundedWeight | None = None) -> None:
        super().__init__(linear)
        rounded = round_rows(linear.weight) if rounded is None else rounded
        # The kernel reads beyond the last number, where a file that is mapped ends.
        numbers = F.pad(rounded.numbers.flatten(), (0, _BEYOND))
        self.weight = numbers[: rounded.numbers.numel()].view_as(rounded.numbers)
        self.scales = rounded.scales[:, 0].to(torch.bfloat16)

    def product(self, x: Tensor) -> Tensor:
        half = x.to(torch.bfloat16)
        if len(x) <= _FEW:
            product = torch._weight_int8pack_mm(half, self.weight, self.scales).to(x.dtype)
        else:
            weight = self.weight.to(torch.bfloat16) * self.scales[:, None]
            product = F.linear(half, weight).to(x.dtype)
        return product if self.bias is None else product + self.bias


class Int4(Stored):
    """Weights in 4 bits, in groups."""

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
