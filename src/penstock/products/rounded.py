"""Linear layers of a quantised folder, which multiply with the folder's own numbers and scales.

Inputs x (M, K) become 8-bit numbers q = clamp(round(x / s)), from −128 to 127, where s is the layer's scale or each
row's own (max|x| / 127). Products are exact sums of whole numbers on every CPU:

    y[m, n] = s[m] · scale[n] · Σ_k q[m, k] · numbers[n, k] + bias[n]

With VNNI one kernel rounds, multiplies and scales: our own (`penstock.kernels.native_integers`), or torch's if there is
no compiler. Without VNNI pairs of products overflow 16 bits in torch's kernel, so numbers are multiplied in fp32, in
parts whose sums are exact, which saves no time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.config.formats import STORED_FORMATS, StoredFormat
from penstock.cpu import this_cpu
from penstock.errors import CheckpointError, ConfigError
from penstock.kernels.native_integers import PackedInt8, multiplies_integers
from penstock.models.expert_linear import ExpertLinear
from penstock.models.rounded import MOST, RoundedWeight
from penstock.products.convert import STORED, device_problem
from penstock.products.integers import fused_product, packed_numbers
from penstock.products.stored import Stored, StoredExperts, in_place_of

_EXACT = 1024
"""Number of products of two 8-bit numbers whose sum is exact in fp32, in any order: below 2²⁴."""
_LEAST = 1e-12


class RoundedInt8(Stored):
    """A linear layer with int8 inputs and a folder's int8 weights."""

    wide = True
    whole_rows: Callable[[Tensor], Tensor] | None = None
    """Combines the sizes of rows, (M, 1), of all ranks' parts of the inputs into the sizes of whole rows."""

    def __init__(self, linear: nn.Linear, rounded: RoundedWeight) -> None:
        super().__init__(linear)
        self.static = None if rounded.input_scale is None else float(rounded.input_scale)
        self.scales = rounded.scales[:, 0].contiguous()
        self.bias = None if self.bias is None else self.bias.float()
        self.fused: PackedInt8 | None = None
        self.packed = None  # None if the fused product's sums are not exact
        if multiplies_integers():
            self.fused = PackedInt8(rounded.numbers, self.scales, self.bias)
            self.wide = False
        elif this_cpu().vnni:
            self.packed = packed_numbers(rounded.numbers, self.scales, self.bias if self.static else None)
        self._numbers = rounded.numbers.clone() if self.fused is None and self.packed is None else None

    @property
    def numbers(self) -> Tensor:
        """The weight's numbers, int8 (N, K)."""
        if self._numbers is not None:
            return self._numbers
        if self.fused is not None:
            return self.fused.numbers
        weight: Tensor = torch.ops.quantized.linear_unpack(self.packed)[0]
        return weight.int_repr()

    def product(self, x: Tensor) -> Tensor:
        if self.fused is not None:
            return self.called(x)
        if self.static is not None:
            return self.called(x.float()).to(x.dtype)
        sizes = self._sizes(x)
        product = self.called(x.float() * (MOST / sizes))
        sizes = sizes / MOST
        product = product * sizes if self.bias is None else torch.addcmul(self.bias, product, sizes)
        return product.to(x.dtype)

    def _sizes(self, x: Tensor) -> Tensor:
        """The largest magnitude of each whole row, fp32 (M, 1)."""
        sizes = x.abs().amax(-1, keepdim=True).float().clamp(min=_LEAST)
        return sizes if self.whole_rows is None else self.whole_rows(sizes)

    def kernel(self, x: Tensor) -> Tensor:
        if self.fused is not None:
            by_row: Literal["size"] | Tensor = "size" if self.whole_rows is None else self._sizes(x)
            return self.fused.product(x, by_row if self.static is None else self.static)
        scale = 1.0 if self.static is None else self.static
        if self.packed is not None:
            return fused_product(x, scale, 128, self.packed)
        sums, scales = self.sums(in_8_bits(x, scale)), self.scales * scale
        if self.bias is None or self.static is None:
            return sums * scales
        return torch.addcmul(self.bias, sums, scales)

    def sums(self, q: Tensor) -> Tensor:
        """Whole numbers (M, K) times the weights' numbers: (M, N), exact before the cast to fp32. The reference."""
        parts = zip(torch.split(q.float(), _EXACT, 1), torch.split(self.numbers, _EXACT, 1))
        total = sum(F.linear(rows, numbers.float()).double() for rows, numbers in parts)
        assert isinstance(total, Tensor)
        return total.float()


def in_8_bits(x: Tensor, scale: float) -> Tensor:
    """Inputs rounded to whole numbers from −128 to 127, in the dtype of x."""
    return (x * (1.0 / scale)).round().clamp(-128, 127)


_FORMS: dict[StoredFormat, Any] = {name: STORED[name] for name in STORED_FORMATS} | {"int8": RoundedInt8}


def stored_form(module: nn.Module, form: StoredFormat, rounded: RoundedWeight) -> nn.Module:
    """The module that replaces a linear layer, or one of several experts, and multiplies in a form."""
    stored = _FORMS[form]
    if isinstance(module, ExpertLinear):
        return StoredExperts(module, lambda n, linear: in_place_of(linear, stored(linear, rounded.part(n))))
    assert isinstance(module, nn.Linear)
    return in_place_of(module, stored(module, rounded))


def store_rounded(model: nn.Module, rounded: Mapping[str, tuple[StoredFormat, RoundedWeight]]) -> None:
    """Let the named linear layers of a model multiply in their formats, in place.

    Raises ConfigError if the model's device does not support a format, and CheckpointError for a layer that the model
    does not have, or has with another shape.
    """
    device, modules = next(model.parameters()).device, dict(model.named_modules())
    for name, (form, weight) in rounded.items():
        module = modules.get(name)
        if not isinstance(module, nn.Linear | ExpertLinear) or module.weight.shape != weight.numbers.shape:
            raise CheckpointError(
                f"The folder has {name} in {form}, of shape {tuple(weight.numbers.shape)}, but the model has no such "
                "linear layer. Fetch or write the folder again."
            )
        if problem := device_problem(device, form, serving=True):
            raise ConfigError(f"The folder has linear layers in {form}: {problem} Or give weights=plain.")
        model.set_submodule(name, stored_form(module, form, weight))


def stored_tensors(model: nn.Module) -> list[Tensor]:
    """The tensors of a model's layers that store weights in another form, which are not in its state dict."""
    layers = [module for module in model.modules() if isinstance(module, Stored)]
    tensors = [value for layer in layers for value in vars(layer).values() if isinstance(value, Tensor)]
    for layer in layers:
        if fused := getattr(layer, "fused", None):
            tensors += [fused.panels, fused.zeros, fused.sums]
        elif isinstance(layer, RoundedInt8) and layer.packed is not None:
            tensors.append(layer.numbers)
    return tensors
