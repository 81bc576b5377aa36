"""What a published row is, and how the tables are read that lie beside this file."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from penstock.config.machine import Machine
from penstock.config.model import DecoderConfig, ModelConfig, preset
from penstock.config.plan import Plan
from penstock.planner.constants import Constants
from penstock.planner.describe import describe
from penstock.planner.rates import rates_of
from penstock.planner.software import PENSTOCK, Software
from penstock.planner.step import step

FOLDER = Path(__file__).parent / "tables"


@dataclass(frozen=True, slots=True)
class Row:
    """One published figure. `predict` gives the planner's, in the same unit, under some constants."""

    table: str
    name: str
    model: str
    """What is left out together in cross-validation."""
    measured: float
    predict: Callable[[Constants], float]
    section: str = ""
    samples: float = 0.0
    """Samples of a step: sections that vary them are ranked by samples per second."""


@cache
def read(table: str) -> tuple[dict[str, str], ...]:
    """The rows of a table; its first line is the source."""
    text = (FOLDER / f"{table}.csv").read_text(encoding="utf-8")
    return tuple(csv.DictReader(text.splitlines()[1:]))


def source(table: str) -> str:
    """Where a table comes from."""
    text = (FOLDER / f"{table}.csv").read_text(encoding="utf-8")
    return text.splitlines()[0].removeprefix("# ").removeprefix('"').removesuffix('"')


def decoder(name: str) -> DecoderConfig:
    """The preset called `name`, which must be a decoder."""
    found = preset(name)
    assert isinstance(found, DecoderConfig)
    return found


def iteration_seconds(
    model: ModelConfig, machine: Machine, plan: Plan, software: Software = PENSTOCK
) -> Callable[[Constants], float]:
    """The planner's seconds of one step under given constants."""
    work = describe(model, plan, machine.device, software)

    def predict(constants: Constants) -> float:
        rates = rates_of(machine, plan, constants, launch_blocking=software.launch_blocking)
        return step(work, rates, plan, software).total

    return predict
