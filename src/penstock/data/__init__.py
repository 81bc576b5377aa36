"""Data: sources of samples, the order they are read in, the Loader, and augmentation of images on the device.

Names are imported on first use, so that reading processes, which need no torch, do not import it; `__init__.pyi` lists
them.
"""

from __future__ import annotations

from penstock.faces import face

__getattr__, __all__ = face(__name__)
