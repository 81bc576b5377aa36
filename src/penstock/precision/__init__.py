"""Precision: the type of each computation, and loss scaling, which keeps small gradients alive in fp16. Functions for a
script's own loop are in `penstock.script`, and exported here too. `__init__.pyi` lists the names."""

from __future__ import annotations

from penstock.config.removed import INSPECTION
from penstock.faces import face

__getattr__, __all__ = face(__name__, INSPECTION)
