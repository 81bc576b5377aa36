"""Gives the shards of a model to an optimizer that was made before the model was sharded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.errors import ConfigError
from penstock.optim.contiguous import Contiguous
from penstock.optim.tensors import alike


@torch.no_grad()
def rebind(optimizer: Optimizer, before: Mapping[str, nn.Parameter], model: nn.Module) -> None:
    """Put the parameters of `model` in the places that those of `before` have in `optimizer`, name by name.

    Groups keep their order and settings, and what the optimizer remembers of a weight follows it, sharded as the
    weight is. Raises ConfigError for a parameter that is not the model's.
    """
    names = {id(parameter): name for name, parameter in before.items()}
    after = dict(model.named_parameters())
    state: dict[Any, Any] = {}
    for group in optimizer.param_groups:
        strange = [p for p in group["params"] if id(p) not in names]
        if strange:
            raise ConfigError(
                f"The optimizer holds a parameter of shape {tuple(strange[0].shape)} that is not one of "
                f"{type(model).__name__}'s; shard the model whose parameters it was given."
            )
    for group in optimizer.param_groups:
        fresh = []
        for old in group["params"]:
            new = after[names[id(old)]]
            fresh.append(new)
            if old in optimizer.state:
                state[new] = {
                    key: alike(new, value)
                    if isinstance(value, Tensor) and value.shape == old.shape and value.ndim
                    else value
                    for key, value in optimizer.state[old].items()
                }
        group["params"] = fresh
    optimizer.state.clear()
    optimizer.state.update(state)
    if isinstance(optimizer, Contiguous):
        optimizer.lay_out_again()
