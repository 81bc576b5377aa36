"""Linears with frozen weights stored in 8 or 4 bits, for training adapters.

A frozen linear has the names of a linear in a quantised folder (`penstock.models.rounded`): `weight`, `weight_scale`
and, for 4 bits, `weight_offset`, and rounds in the same way; scales and offsets are in bf16. It also loads a plain
`weight`, and rounds it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.config.formats import PRODUCTS, BaseWeights
from penstock.errors import ConfigError
from penstock.kernels.frozen_linear import frozen_linear
from penstock.models.anatomy import anatomy_of
from penstock.models.roles import Attention, Linear, Perceptron, walk
from penstock.models.rounded import nearest, plain_state, round_groups, round_rows
from penstock.models.wrap import exchanged

_log = logging.getLogger(__name__)
_OWN = ("weight", "weight_scale", "weight_offset")


class FrozenLinear(nn.Module):
    """A linear (…, in) to (…, out) with a quantised weight, which passes gradients on to its input and its bias."""

    def __init__(self, linear: nn.Module, base: BaseWeights, *, transposed: bool = False) -> None:
        """`linear` has a `weight` (out, in), or (in, out) if `transposed`, and a `bias`."""
        super().__init__()
        plain, bias = linear.get_parameter("weight"), linear.bias
        self.base, self.transposed, self.dtype = base, transposed, plain.dtype
        self.out_features, self.in_features = plain.shape[::-1] if transposed else plain.shape
        for name, value in self._rounded(plain.detach()).items():
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))
        assert bias is None or isinstance(bias, nn.Parameter)
        self.register_parameter("bias", bias)

    def _rounded(self, weight: Tensor) -> dict[str, Tensor]:
        """This module's parameters, by name, computed from a plain weight."""
        weight = weight.T if self.transposed else weight
        exact = round_rows(weight) if self.base == "int8_weights" else round_groups(weight)
        scales, offsets = exact.scales.bfloat16(), exact.offsets
        offsets = None if offsets is None else offsets.bfloat16()
        # The nearest integers for the scales as stored in bf16.
        rounded = nearest(weight, scales.float(), None if offsets is None else offsets.float())
        # transformers casts some inputs to the type of the weight, unless that is int8.
        held = {_OWN[0]: next(iter(rounded.stored("").values())).view(torch.int8), _OWN[1]: scales}
        return held if offsets is None else {**held, _OWN[2]: offsets}

    def forward(self, x: Tensor) -> Tensor:
        assert x.is_floating_point()
        numbers, scales, offsets, bias = map(self._parameters.get, (*_OWN, "bias"))
        assert numbers is not None
        assert scales is not None
        return frozen_linear(x, numbers, scales, offsets, bias)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        plain = state_dict.get(f"{prefix}weight")
        if isinstance(plain, Tensor) and plain.is_floating_point():
            state_dict |= {f"{prefix}{name}": value for name, value in self._rounded(plain).items()}
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, base={self.base}"


class _Place(nn.Module):
    """A stand-in with the names and shapes of a plain linear, without memory for its weight."""

    def __init__(self, frozen: FrozenLinear) -> None:
        super().__init__()
        sides = (frozen.out_features, frozen.in_features)
        weight = torch.empty(sides[::-1] if frozen.transposed else sides, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_parameter("bias", frozen._parameters["bias"])


def plain_places(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, the model's state dict has the names and shapes of plain weights."""
    every = model.named_modules(remove_duplicate=False)
    return exchanged(model, {name: _Place(one) for name, one in every if isinstance(one, FrozenLinear)})


def freeze_linears(model: nn.Module, base: BaseWeights, inside: str) -> dict[str, str]:
    """Quantise, in place, the frozen linears in a model's attentions and perceptrons; returns, by name, the reason why
    a linear was not quantised. A linear with an adapter has its own weight at `inside`. Raises ConfigError if no linear
    can be quantised.
    """
    modules, made, left = dict(model.named_modules(remove_duplicate=False)), dict[nn.Module, nn.Module](), {}
    group = PRODUCTS[base].multiple[0]
    parts = [role for role in walk(anatomy_of(model).stacks) if isinstance(role, Attention | Perceptron)]
    for role in (role for part in parts for role in walk(part) if isinstance(role, Linear)):
        name = f"{role.name}.{inside}" if f"{role.name}.{inside}" in modules else role.name
        linear = modules[name]
        if reason := _unfit(linear, group, transposed=role.transposed):
            left[role.name] = reason
            continue
        if linear not in made:
            made[linear] = FrozenLinear(linear, base, transposed=role.transposed)
        model.set_submodule(name, made[linear])
    if not made:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(left.items())[:4])
        raise ConfigError(
            f"recipe.lora.base={base} can store no linear layer of this {type(model).__name__} ({reasons}); leave base "
            "out."
        )
    _log.info("%d linears are stored in %s; not stored so: %s", len(made), base, left or "none")
    return left


def _unfit(linear: nn.Module, group: int, *, transposed: bool) -> str | None:
    """Why a linear's weight cannot be quantised; empty if it can."""
    if type(linear) is not nn.Linear and not transposed:
        return f"a {type(linear).__name__}, which computes in its own way"
    weight = linear.get_parameter("weight")
    if weight.requires_grad:
        return "it learns"
    inputs = weight.shape[0 if transposed else 1]
    return f"{inputs} inputs are no multiple of {group}" if inputs % group else None


def with_plain_weights(state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """A state dict with weights (out, in), in `dtype`, in place of the quantised ones."""
    held = {
        name: value.view(torch.uint8) if f"{name}_offset" in state else value for name, value in state.items()
    }
    plain = plain_state(held)
    return {name: value.to(dtype) if f"{name}_scale" in state else value for name, value in plain.items()}
