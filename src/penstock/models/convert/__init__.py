"""Weights in and out: Hugging Face folders, timm's names, and Penstock's own; safetensors only, never
unpickled.
"""

from __future__ import annotations

from penstock.models.convert.files import read_state_dict
from penstock.models.convert.hf import config_from_hf, hf_config
from penstock.models.convert.load import Loaded, load_weights
from penstock.models.convert.pretrained import from_pretrained, save_pretrained
from penstock.models.convert.vit import from_hf, from_timm, resize_positions, to_hf, to_timm

__all__ = [
    "Loaded",
    "config_from_hf",
    "from_hf",
    "from_pretrained",
    "from_timm",
    "hf_config",
    "load_weights",
    "read_state_dict",
    "resize_positions",
    "save_pretrained",
    "to_hf",
    "to_timm",
]
