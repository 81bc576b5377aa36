"""Training of one model by several processes. `__init__.pyi` lists the names, which are imported on first use."""

from __future__ import annotations

from penstock.faces import face

__getattr__, __all__ = face(__name__)
