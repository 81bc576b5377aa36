"""Runs of `penstock train` in the working folder: what they recorded, cut off in a step, and resumed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.step.train_step import TrainStep
from penstock.train.metrics import read_metrics


def records_of(output: str | Path, event: str = "") -> list[dict[str, Any]]:
    """What a run recorded, of one event or of all; nothing of one that did not begin."""
    path = Path(output, "metrics.jsonl")
    records = read_metrics(path) if path.exists() else []
    return [record for record in records if event in ("", record["event"])]


def losses_of(output: str | Path) -> list[float]:
    """The loss of each step."""
    return [loss for record in records_of(output, "steps") for loss in record["losses"]]


def events_of(output: str | Path) -> list[tuple[str, int]]:
    """The events and their steps."""
    return [(record["event"], record["step"]) for record in records_of(output)]


def train_into(output: str, *words: str, code: int = 0) -> list[float]:
    """Run `penstock train` with these words, which may hold several options each; the losses."""
    assert main(["train", *" ".join(words).split(), "--output", output]) == code
    return losses_of(output)


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


def train_whole_and_in_parts(monkeypatch: pytest.MonkeyPatch, step: int, *words: str) -> list[float]:
    """Train into `whole`, and into `parts`, cut off in a step and started again: losses and exports are equal."""
    losses = train_into("whole", *words)
    with cut_in_step(monkeypatch, step):
        train_into("parts", *words, code=130)
    assert train_into("parts", *words) == losses
    one, other = (Path(name, "export", "model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert one == other
    return losses
