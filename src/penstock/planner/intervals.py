"""How far predictions of a kind have been from what was measured: the interval that each prediction carries.

The figures are written by `python tools/planner_accuracy.py` from the rows of docs/reference/planner-accuracy.md.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

from penstock.config.machine import Machine
from penstock.report.units import duration

ROWS_OF = ("a100-40g", "a100-80g", "h100", "h200", "h800")
"""Machines whose chip has published rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Range of measured over predicted seconds for rows of one kind: four of five lie from `low` to `high`."""

    low: float
    high: float
    spread: float
    """How much two rows of one model may differ by error alone: four of five errors are so near to their model's
    mean. Layouts that are not further apart than this are called equal."""
    rows: int
    words: str

    def seconds(self, predicted: float) -> str:
        """The interval around a prediction, for a reader."""
        low, high = (duration(bound * predicted, 3) for bound in (self.low, self.high))
        return f"{low} to {high} (80 % interval, from the errors on {self.words})"


def interval_of(*, vision: bool, machine: Machine) -> Interval:
    """The interval of predictions of language or vision models on a machine.

    For a chip that no row was made on it is the widest of its kind, and its words say that it is a guess.
    """
    table = _intervals()
    if machine.device == "cpu":
        return table["cpu"]
    hopper = "fp8" in machine.peak_flops
    interval = table["vision" if vision else "hopper" if hopper else "ampere"]
    if machine.source == "measured" or machine.name.removesuffix(" (changed)") in ROWS_OF:
        return interval
    measured = (table["vision"], table["hopper"], table["ampere"])
    return Interval(
        low=min(one.low for one in measured), high=max(one.high for one in measured),
        spread=max(one.spread for one in measured), rows=0,
        words=f"rows of other chips, for none was made on {machine.name}: a guess",
    )  # fmt: skip


@cache
def _intervals() -> dict[str, Interval]:
    text = resources.files("penstock.planner").joinpath("intervals.json").read_text(encoding="utf-8")
    return {kind: Interval(**values) for kind, values in json.loads(text).items()}
