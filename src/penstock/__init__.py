"""Penstock: predict, apply and measure what makes Transformers fast.

The flat public API. Names are imported on first use, so `import penstock` is fast and needs no torch; `__init__.pyi`
lists them. Four functions have the name of their module and are imported from there: `penstock.build.build`,
`penstock.train.train`, `penstock.ladder.ladder` and `penstock.probe.probe`.
"""

from __future__ import annotations

from penstock.faces import face

__version__ = "0.1.0"
__getattr__, _names = face(__name__)
__all__ = [*_names, "__version__"]


def __dir__() -> list[str]:
    return __all__
