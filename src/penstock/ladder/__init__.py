"""The ladder: every optimisation on this machine, one rung at a time, predicted and measured.

Names are imported on first use, so that results and pages can be read without torch; `__init__.pyi` lists them.
"""

from __future__ import annotations

from penstock.faces import face

__getattr__, __all__ = face(__name__)
