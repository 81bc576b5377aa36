"""The kind of machine that gains of fused operators are kept by: see `penstock.config.gains`."""

from __future__ import annotations

import torch

from penstock.cpu import this_cpu


def kind_of(device: str) -> str:
    """A CPU's instruction sets, a GPU's name, or the kind of another device."""
    return (
        this_cpu().kind if device == "cpu" else torch.cuda.get_device_name() if device == "cuda" else device
    )
