"""Model families as plain single-device PyTorch: they know nothing of parallelism or of precision."""

from __future__ import annotations

import torch
from torch import nn

from penstock.config.model import ModelConfig
from penstock.config.trainable import require_trainable
from penstock.models import families as families  # enrols them
from penstock.models.decoder import Decoder
from penstock.models.encoder import Encoder
from penstock.models.seq2seq import Seq2Seq
from penstock.models.vit import ViT

__all__ = ["Decoder", "Encoder", "Seq2Seq", "ViT", "create"]

_FAMILIES: dict[str, type[nn.Module]] = {
    "vit": ViT,
    "decoder": Decoder,
    "encoder": Encoder,
    "seq2seq": Seq2Seq,
}


def create(
    config: ModelConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> nn.Module:
    """The module that a configuration describes, initialised from torch's global generator.

    On the meta device nothing is allocated or computed; call `to_empty(device=…)` and `init_weights()` afterwards.
    Raises ConfigError for what can be planned but not built yet.
    """
    require_trainable(config)
    return _FAMILIES[config.family](config, device=device, dtype=dtype)
