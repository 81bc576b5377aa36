"""Data: sources of images, the order they are read in, the Loader, and augmentation on the device.

Names are imported on first use, so that reading processes, which need no torch, do not import it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.data.augment import augment_batch, center_batch
    from penstock.data.images import Batch, image_loader
    from penstock.data.loader import Loader
    from penstock.data.open import open_source
    from penstock.data.sampler import Stream
    from penstock.data.source import Source

__all__ = [
    "Batch",
    "Loader",
    "Source",
    "Stream",
    "augment_batch",
    "center_batch",
    "image_loader",
    "open_source",
]

_HOME = {
    "Batch": "images",
    "Loader": "loader",
    "Source": "source",
    "Stream": "sampler",
    "augment_batch": "augment",
    "center_batch": "augment",
    "image_loader": "images",
    "open_source": "open",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'penstock.data' has no attribute {name!r}")
    return getattr(importlib.import_module(f"penstock.data.{_HOME[name]}"), name)
