"""Training runs: the loop, its step and what is measured on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.train.loop import TrainResult as TrainResult
    from penstock.train.loop import train as train

__all__ = ["TrainResult", "train"]


def __getattr__(name: str) -> Any:
    # Late, because `build` imports `train.step` from this package, and the loop imports `build`.
    if name in __all__:
        from penstock.train import loop

        return getattr(loop, name)
    raise AttributeError(f"module 'penstock.train' has no attribute {name!r}")
