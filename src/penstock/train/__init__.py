"""Training runs: the loop and everything that is measured during it."""

from __future__ import annotations

from penstock.train.callbacks import Callback
from penstock.train.loop import TrainResult, train
from penstock.train.run_page import RunPage

__all__ = ["Callback", "RunPage", "TrainResult", "train"]
