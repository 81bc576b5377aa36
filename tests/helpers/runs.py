"""Runs that are cut off in a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from penstock.step.train_step import TrainStep


@contextmanager
def cut_in_step(monkeypatch: pytest.MonkeyPatch, number: int) -> Iterator[None]:
    """Inside, the step of this number, counted from 1, raises KeyboardInterrupt."""
    called, step = 0, TrainStep.__call__

    def cut(self: TrainStep, batches: Any) -> Any:
        nonlocal called
        called += 1
        if called == number:
            raise KeyboardInterrupt
        return step(self, batches)

    with monkeypatch.context() as patched:
        patched.setattr(TrainStep, "__call__", cut)
        yield
