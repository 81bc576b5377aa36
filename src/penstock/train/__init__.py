"""Training runs: the loop and what is measured on the way."""

from __future__ import annotations

from penstock.train.callbacks import Callback
from penstock.train.loop import TrainResult, train

__all__ = ["Callback", "TrainResult", "train"]
