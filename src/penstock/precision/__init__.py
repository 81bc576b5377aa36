"""Precision: what is computed in which type, and what keeps small gradients alive in fp16. What a script calls in its
own loop is in `penstock.script`, and has its name here too. `__init__.pyi` lists the names."""

from __future__ import annotations

from penstock.config.removed import INSPECTION
from penstock.faces import face

__getattr__, __all__ = face(__name__, INSPECTION)
