"""Our models as plain single-device PyTorch, without code for parallelism or precision."""

from __future__ import annotations

import torch

from penstock.config.model import ModelConfig, preset
from penstock.models import families as families  # enrols them
from penstock.models.model import Model

__all__ = ["Model", "create"]


def create(
    config: ModelConfig | str, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Model:
    """The module that a configuration or a preset's name describes, initialised from torch's global generator.

    On the meta device nothing is allocated or computed; call `to_empty(device=…)` and `init_weights()` afterwards."""
    return Model(preset(config) if isinstance(config, str) else config, device=device, dtype=dtype)
