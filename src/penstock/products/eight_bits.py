"""Linear layers that multiply in 8 bits: for training, experts included, and the fp8 layer for inference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from penstock.config.formats import PRODUCTS, Products
from penstock.errors import ConfigError
from penstock.models.expert_linear import ExpertLinear
from penstock.models.rounded import CLIP
from penstock.products.fp8 import fp8_linear, rows_in_fp8, scaled_product
from penstock.products.int8 import int8_linear
from penstock.products.stored import Stored


class RoundedLinear(nn.Linear):
    """A linear layer that multiplies in 8 bits under autocast to bf16, and as a plain layer otherwise; with a learned
    clip it also multiplies in 8 bits in fp32. `penstock.products.convert` makes it from an nn.Linear, with the same
    parameters and names."""

    products: Products
    emulate: bool
    """Whether the same numbers are multiplied in a wider dtype, on any device: the reference."""

    def forward(self, x: Tensor) -> Tensor:
        clipped = PRODUCTS[self.products].clips and not torch.is_autocast_enabled(x.device.type)
        if not x.numel() or not (clipped or _in_8_bits(self.products, x)):
            return super().forward(x)
        return self.multiplied(x, x.dtype if clipped else torch.bfloat16)

    def multiplied(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """(…, in) to (…, out) in `dtype`."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, products={self.products}{', emulated' if self.emulate else ''}"


def _in_8_bits(products: Products, x: Tensor) -> bool:
    """Whether a layer multiplies x in 8 bits now: see `RoundedLinear`."""
    if not torch.is_autocast_enabled(x.device.type) or not x.numel():
        return False
    dtype = torch.get_autocast_dtype(x.device.type)
    if dtype != torch.bfloat16:
        raise ConfigError(
            f"{products} linear layers compute in bf16 around their products, but autocast is to {dtype}; use "
            f"dtype='bf16' or leave products={products} out."
        )
    return True


class Fp8Linear(RoundedLinear):
    """A linear layer with matrix products in fp8."""

    gathered: tuple[Tensor, Tensor] | None = None
    """The weight in fp8 and its inverse scale, while a sharded weight is gathered so. `weight` then has no values: it
    only takes the gradient."""

    def forward(self, x: Tensor) -> Tensor:
        if self.gathered and x.numel() and not torch.is_autocast_enabled(x.device.type):
            why = "gathers this layer's weight in fp8, which is not enough outside autocast"
            raise ConfigError(f"plan.gather=products {why}; call the whole model, or use gather=level.")
        return super().forward(x)

    def multiplied(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """See `RoundedLinear`."""
        how: dict[str, Any] = {
            "dtype": dtype,
            "emulate": self.emulate,
            "scaling": PRODUCTS[self.products].scales,
        }
        return fp8_linear(x, self.weight, self.bias, rounded=self.gathered, **how)


class Int8Linear(RoundedLinear):
    """A linear layer with matrix products in int8."""

    def multiplied(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """See `RoundedLinear`."""
        passes, clip = PRODUCTS[self.products].passes, self._parameters.get(CLIP)
        return int8_linear(x, self.weight, self.bias, clip, passes=passes, dtype=dtype, emulate=self.emulate)


class RoundedExpertLinear(ExpertLinear):
    """The linear layers of several experts, each multiplying in 8 bits like a `RoundedLinear`, one after the other:
    torch has no grouped product with a scale per row and any number of rows on all devices."""

    products: Products
    emulate: bool

    def forward(self, x: Tensor, ends: Tensor, experts: Tensor) -> Tensor:
        """See `ExpertLinear`. On a GPU this waits for the number of rows of each expert."""
        if not _in_8_bits(self.products, x):
            return super().forward(x, ends, experts)
        row = PRODUCTS[self.products]
        how: dict[str, Any] = {"dtype": torch.bfloat16, "emulate": self.emulate}
        multiply: Callable[..., Tensor]
        if row.weights == "int8":
            multiply, how["passes"] = int8_linear, row.passes
        else:
            multiply, how["scaling"] = fp8_linear, row.scales
        weights = self.weight.unbind(0)
        biases = [None] * len(weights) if self.bias is None else self.bias.unbind(0)
        counts = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
        each = zip(torch.split(x, counts), weights, biases)
        return torch.cat([multiply(rows, weight, bias, **how) for rows, weight, bias in each if len(rows)])


class Fp8(Stored):
    """A linear layer with weights and inputs in fp8 (e4m3) and outputs in bf16."""

    emulate = False
    """Whether the same numbers are multiplied in fp32: the reference."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self.weight, scales = rows_in_fp8(linear.weight.detach())
        self.scales = scales.t()
        self.bias = None if self.bias is None else self.bias.to(torch.bfloat16)

    def product(self, x: Tensor) -> Tensor:
        rows, scales = rows_in_fp8(x)
        how: Any = {"bias": self.bias, "fast": True, "emulate": self.emulate}
        return scaled_product(rows, self.weight.t(), scales, self.scales, torch.bfloat16, **how).to(x.dtype)
