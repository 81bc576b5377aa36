"""A user's own model: finds the function that makes it by its path, calls it, and resizes its batch."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.config.plan import Plan
from penstock.containers import replaced, tensors
from penstock.data.transform import load_function
from penstock.errors import ConfigError
from penstock.models.anatomy import set_switch
from penstock.models.draw import seeded
from penstock.tasks import Loss

Factory = Callable[[], tuple[nn.Module, Any, Loss]]


def load_factory(path: str) -> Factory:
    """Import the function at `package.module:name`; the working directory is searched too. Raises ConfigError."""
    return load_function(path, "factory")


def path_of(factory: Factory) -> str | None:
    """`package.module:name` of a function that another process can import; None if it cannot."""
    module, name = getattr(factory, "__module__", None), getattr(factory, "__qualname__", "")
    if module in (None, "__main__") or getattr(sys.modules.get(str(module)), name, None) is not factory:
        return None
    try:
        spec = importlib.util.find_spec(str(module))
    except (ImportError, ValueError):
        return None
    return f"{module}:{name}" if spec is not None else None


def made_by(factory: Factory, name: str, seed: int) -> tuple[nn.Module, Any, Loss]:
    """The model, batch and loss that a factory returns. The model is copied, because a factory may return the same one
    twice.

    Raises ConfigError if it does not return a model, a batch and a loss.
    """
    with seeded(seed):
        parts = factory()
    if not (
        isinstance(parts, tuple)
        and len(parts) == 3
        and isinstance(parts[0], nn.Module)
        and callable(parts[2])
    ):
        raise ConfigError(
            f"The factory {name} returned {type(parts).__name__}, but must return three things: a "
            f"torch.nn.Module, an example batch, and a function loss(model, batch) that returns a scalar tensor, or "
            "(sum, count)."
        )
    model, batch, loss = parts
    return copy.deepcopy(model).train(), batch, loss


def drawn_anew(batch: Any, size: int, place: int) -> Any:
    """The batch for micro-batch `place` of a step: the first is the batch itself, later ones redraw its samples."""
    if place == 0:
        return batch
    chosen = torch.randint(size, (size,), generator=torch.Generator().manual_seed(place))

    def take(leaf: Tensor) -> Tensor:
        return leaf if leaf.ndim == 0 or leaf.shape[0] != size else leaf[chosen.to(leaf.device)]

    return replaced(batch, take) if samples_of(batch) == size else batch


def padding_of(batch: Any) -> float:
    """Share of padding among the tokens, from the `attention_mask` of a transformers batch; 0 without a mask."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.ndim != 2 or not mask.numel():
        return 0.0
    return 1.0 - (mask != 0).float().mean().item()


def samples_of(batch: Any) -> int | None:
    """Number of samples: the size of the first dimension, if all tensors of the batch have the same; else None."""
    sizes = {leaf.shape[0] for leaf in tensors(batch) if leaf.ndim > 0}
    return int(sizes.pop()) if len(sizes) == 1 else None


def can_switch(model: nn.Module, name: str, value: Any) -> bool:
    """Whether a model supports a value of one of the Plan's `SWITCHES`; afterwards it has the default again."""
    try:
        set_switch(model, name, value)
        set_switch(model, name, getattr(Plan(), name))
    except ConfigError:
        return False
    return True
