"""Rates that a chip sustains: under its power limit the clock of a long run is lower than that of a burst."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock.probe.rates import wait

log = logging.getLogger(__name__)

SECONDS = 60.0
"""Time after which a GPU's clock has settled under its power limit."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Rate, clock and power of a chip over about a second under load."""

    calls_per_second: float
    clock_mhz: float | None = None
    watts: float | None = None


def under_load(call: Callable[[], object], device: torch.device, seconds: float = SECONDS) -> list[Reading]:
    """Repeat `call` for `seconds` seconds without a pause, and read rate, clock and power about once a second.

    Clock and power are None where the driver or the package nvidia-ml-py does not report them.
    """
    wait(device)
    start = last = time.perf_counter()
    call()
    wait(device)
    once = max(time.perf_counter() - start, 1e-6)
    batch = max(1, round(min(1.0, seconds / 10) / once))
    readings: list[Reading] = []
    start = last = time.perf_counter()
    while last - start < seconds:
        for _ in range(batch):
            call()
        # Read while the queued calls still run.
        clock, watts = _clock(device), _power(device)
        wait(device)
        now = time.perf_counter()
        readings.append(Reading(batch / (now - last), clock, watts))
        last = now
    return readings


def sustained_share(readings: list[Reading], burst: float) -> float:
    """The rate of the last third of the readings, over `burst`, the calls per second of a short run; at most 1."""
    last = readings[-max(1, len(readings) // 3) :]
    return min(1.0, statistics.median(reading.calls_per_second for reading in last) / burst)


def describe_load(readings: list[Reading], share: float) -> str:
    """One line about a minute of load."""
    last = readings[-1]
    words = [f"under load for {SECONDS:.0f} s it sustains {share:.1%} of its burst"]
    if last.clock_mhz is not None:
        words.append(
            f"at {last.clock_mhz:.0f} MHz after {max(reading.clock_mhz or 0 for reading in readings):.0f} MHz"
        )
    if last.watts is not None:
        words.append(f"at {last.watts:.0f} W")
    return ", ".join(words)


def _clock(device: torch.device) -> float | None:
    return _reading(lambda: float(torch.cuda.clock_rate(device)), device)


def _power(device: torch.device) -> float | None:
    return _reading(lambda: torch.cuda.power_draw(device) / 1e3, device)


def _reading(read: Callable[[], float], device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    try:
        return read()
    except (RuntimeError, ImportError, AttributeError) as error:
        log.info("the driver does not report it: %s", str(error).partition("\n")[0])
        return None
