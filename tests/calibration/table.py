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
from penstock.planner.describe import described, terms_of
from penstock.planner.rates import rates_of
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


BLOCKED = 20e-6
"""Seconds between two kernels where each launch waits for its kernel's end (CUDA_LAUNCH_BLOCKING=1), on top of the
usual gap: an eager operator's time on the host, which nothing hides. An estimate, not a fit."""


@dataclass(frozen=True, slots=True)
class Software:
    """What a source says of its software that no Plan can say."""

    blocked: bool = False
    """Whether each launch waited for its kernel."""
    waits: bool = False
    """Whether devices wait between steps until the host has read the loss."""
    adds_in_products: bool = False
    """Whether the products that make gradients of weights add them up."""
    softmax_apart: bool = False
    """Whether the softmax of scores is computed in fp32, by single operators."""


PLAIN = Software()


def iteration_seconds(
    model: ModelConfig, machine: Machine, plan: Plan, software: Software = PLAIN
) -> Callable[[Constants], float]:
    """The planner's seconds of one step under given constants."""
    terms = terms_of(model, plan, machine.device)._replace(softmax_apart=software.softmax_apart)
    work = described(model, terms)

    def predict(constants: Constants) -> float:
        if software.blocked:
            constants = constants.with_(kernel_seconds=constants.kernel_seconds + BLOCKED)
        rates = rates_of(machine, plan, constants)
        return step(work, rates, plan, waits=software.waits, adds_in_products=software.adds_in_products).total

    return predict
