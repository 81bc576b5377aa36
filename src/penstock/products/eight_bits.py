"""Linear layers that multiply in 8 bits: those that train, and fp8's that stores its weights so for inference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from penstock.config.formats import PRODUCTS, Products
from penstock.errors import ConfigError
from penstock.products.fp8 import Scaling, fp8_linear, rows_in_fp8, scaled_product
from penstock.products.int8 import int8_linear
from penstock.products.stored import Stored


class RoundedLinear(nn.Linear):
    """A linear layer whose products are in 8 bits inside an accelerated forward pass (under autocast to bf16), and
    which is a plain one elsewhere. Made by `penstock.products.convert` out of an nn.Linear, whose parameters and names
    it keeps.
    """

    products: Products
    emulate: bool
    """Whether the same numbers are multiplied in a wider type, on any device: the reference."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_autocast_enabled(x.device.type) or not x.numel():
            return super().forward(x)
        dtype = torch.get_autocast_dtype(x.device.type)
        if dtype != torch.bfloat16:
            raise ConfigError(
                f"{self.products} linear layers compute in bf16 around their products, but autocast is to {dtype}; use "
                f"dtype='bf16' or leave products={self.products} out."
            )
        return self.multiplied(x, dtype)

    def multiplied(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """(…, in) to (…, out) in `dtype`."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, products={self.products}{', emulated' if self.emulate else ''}"


class Fp8Linear(RoundedLinear):
    """Products in fp8."""

    @property
    def scaling(self) -> Scaling:
        """The numbers that share a scale."""
        scales: Any = PRODUCTS[self.products].scales
        return scales  # type: ignore[no-any-return]

    def multiplied(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """See `RoundedLinear`."""
        return fp8_linear(x, self.weight, self.bias, scaling=self.scaling, dtype=dtype, emulate=self.emulate)


class Int8Linear(RoundedLinear):
    """Products in int8."""

    def multiplied(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """See `RoundedLinear`."""
        weights_too = "weight" in PRODUCTS[self.products].passes
        return int8_linear(
            x, self.weight, self.bias, weights_too=weights_too, dtype=dtype, emulate=self.emulate
        )


class Fp8(Stored):
    """Weights and inputs in fp8 (e4m3), products in bf16."""

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
