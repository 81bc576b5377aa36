"""How a Plan's level of mixed precision is applied to a model and its forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from penstock.config.plan import Plan
from penstock.precision.lists import apply_modules, default_lists, region

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def half_dtype(plan: Plan) -> torch.dtype | None:
    """The half-width type the Plan computes in, or None for O0."""
    return None if plan.precision == "O0" else _DTYPES[plan.dtype]


def autocast(plan: Plan, device: torch.device | str) -> AbstractContextManager[Any]:
    """The context of a forward pass: O1 and O2 cast op by op (Micikevicius et al., ICLR 2018), O0 and O3 not at all."""
    if plan.precision not in ("O1", "O2"):
        return nullcontext()
    return _by_lists(torch.device(device).type, _DTYPES[plan.dtype])


@contextmanager
def _by_lists(device_type: str, dtype: torch.dtype) -> Iterator[None]:
    lists = default_lists(dtype, device_type)
    with torch.autocast(device_type, dtype=dtype), region(lists, device_type, dtype):
        yield


def cast_model(model: nn.Module, plan: Plan, device: torch.device | str = "cpu") -> nn.Module:
    """For O3, turn all floating parameters and buffers, norms included, to the half-width type, in place.

    From then on the model casts floating inputs by itself, so that training and evaluation feed it fp32 images like
    under any other Plan. Names in the state dict stay. O0 and O1 leave the model as it is; so does O2, whose weights
    are halved once the optimizer holds the fp32 ones (`MasterWeights`). Both take to the op lists of their dtype.
    """
    if plan.precision == "O0":
        return model
    dtype = _DTYPES[plan.dtype]
    if plan.precision != "O3":
        apply_modules(model, default_lists(dtype, torch.device(device).type))
        return model
    model.to(dtype)
    model.register_forward_pre_hook(_InputCast(dtype), with_kwargs=True)
    return model


class _InputCast:
    """Casts floating tensors among a module's arguments; a class, so that a model with it can be pickled and copied."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(self._cast, args)), {key: self._cast(value) for key, value in kwargs.items()}

    def _cast(self, value: Any) -> Any:
        return value.to(self.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
