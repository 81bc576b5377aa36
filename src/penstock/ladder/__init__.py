"""The ladder: every optimisation on this machine, one rung at a time, predicted beside measured.

Names are imported on first use, so that results and pages can be read where there is no torch; `__init__.pyi` lists
them.
"""

from __future__ import annotations

from penstock.faces import face

__getattr__, __all__ = face(__name__)
