"""Half weights that an optimizer completes to fp32: the remainder form of master weights, applied to models."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.optim.remainder import from_adamw
from penstock.precision.lists import OpLists, fp32_modules_of
from penstock.precision.master import MasterWeights, is_norm


def complete(
    optimizers: Sequence[Optimizer],
    models: Sequence[nn.Module],
    *,
    norms: str = "fp32",
    lists: OpLists | None = None,
) -> None:
    """Turn the models' weights to bf16, and each AdamW to one that keeps the 16 bits more that make them fp32.

    Norms stay fp32 unless `norms` is "half", and so do modules that `lists` name for fp32. The models' state dicts hold
    the exact fp32 weights. Raises ConfigError for optimizers other than torch's AdamW over fp32 weights.
    """
    kept = {module for model in models for module in fp32_modules_of(model, lists)}
    if norms == "fp32":
        kept |= {module for model in models for module in model.modules() if is_norm(module)}
    wide = [parameter for module in kept for parameter in module.parameters(recurse=False)]
    replaced = [from_adamw(optimizer, keep_fp32=wide) for optimizer in optimizers]
    MasterWeights.cast(models, torch.bfloat16, norms=norms, buffers=False, lists=lists, remainders=replaced)
