"""Data: sources of samples, the order they are read in, the Loader, and augmentation of images on the device.

Names are imported on first use, so that reading processes, which need no torch, do not import it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.data.augment import augment_batch as augment_batch
    from penstock.data.augment import center_batch as center_batch
    from penstock.data.images import Batch as Batch
    from penstock.data.images import image_loader as image_loader
    from penstock.data.loader import Loader as Loader
    from penstock.data.open import open_source as open_source
    from penstock.data.sampler import Stream as Stream
    from penstock.data.source import ImageSource as ImageSource
    from penstock.data.source import Source as Source
    from penstock.data.transform import per_sample as per_sample

_NAMES = {
    "augment": ("augment_batch", "center_batch"),
    "images": ("Batch", "image_loader"),
    "loader": ("Loader",),
    "open": ("open_source",),
    "sampler": ("Stream",),
    "source": ("ImageSource", "Source"),
    "transform": ("per_sample",),
}
"""Names by the module that defines them."""
_HOME = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'penstock.data' has no attribute {name!r}")
    return getattr(importlib.import_module(f"penstock.data.{_HOME[name]}"), name)
