"""Loss runs: how much chance alone changes the loss, and whether a setting stays within that."""

from __future__ import annotations

import statistics

from penstock.ladder.arena import Arena
from penstock.ladder.judge import DEVIATIONS, tail_mean
from penstock.ladder.result import Noise
from penstock.ladder.rung import Setting

SHARE = 0.15
"""Share of a budget that loss runs may take before any rung that changes results is tried."""
LEAST_STEPS = 8
"""Shorter loss runs say nothing, and are left out."""


class Losses:
    """The loss runs of one climb, each made when it is first asked for."""

    def __init__(self, arena: Arena, steps: int, seed: int, seeds: int, budget: float) -> None:
        self.arena, self.seed = arena, seed
        self.steps = steps
        self.notes: list[str] = []
        self._seeds, self._budget = seeds, budget
        self._noise: Noise | None = None
        self._curves: dict[Setting, tuple[float, ...]] = {}

    @property
    def noise(self) -> Noise | None:
        """The baseline's loss under several seeds; none where no loss runs are made."""
        if self._noise is None and self.steps:
            self._fit()
        if self._noise is None and self.steps:
            first = self.arena.baseline
            seeds = tuple(self.seed + i for i in range(self._seeds + 1))
            curves = tuple(tuple(self.arena.trained(first, seed, self.steps).losses) for seed in seeds)
            last = tuple(tail_mean(curve) for curve in curves)
            self._curves[first] = curves[0]
            self._noise = Noise(seeds=seeds, losses=last, curves=curves, deviation=statistics.stdev(last))
        return self._noise

    @property
    def noise_if_run(self) -> Noise | None:
        """The same, where something asked for it."""
        return self._noise

    def curve(self, setting: Setting) -> tuple[float, ...]:
        """Losses of a setting, step by step; none where no loss runs are made."""
        if self.noise is None:
            return ()
        if setting not in self._curves:
            self._curves[setting] = tuple(self.arena.trained(setting, self.seed, self.steps).losses)
        return self._curves[setting]

    def known(self, setting: Setting) -> tuple[float, ...]:
        """The same, of those that were run."""
        return self._curves.get(setting, ())

    def difference(self, setting: Setting) -> float | None:
        """Loss less the baseline's, from the same weights and samples; none where it was not run."""
        curve = self.known(setting)
        return tail_mean(curve) - self._noise.losses[0] if curve and self._noise is not None else None

    def within_noise(self, setting: Setting) -> bool | None:
        """Whether chance explains the difference; none where it was not run."""
        change = self.difference(setting)
        if change is None or self._noise is None:
            return None
        return abs(change) <= DEVIATIONS * self._noise.deviation  # never for a loss that is no number

    def seconds(self, setting: Setting) -> float:
        """Seconds that the loss run of a setting takes; 0 where it was run."""
        if setting in self._curves:
            return 0.0
        return self.steps * self.arena.step_seconds.get(setting, 0.0)

    def _fit(self) -> None:
        """Shorten all runs alike, so that they take no more than their share."""
        step = self.arena.step_seconds[self.arena.baseline]
        affordable = int(SHARE * self._budget / ((self._seeds + 3) * step))
        if affordable < self.steps:
            wished, self.steps = self.steps, affordable if affordable >= LEAST_STEPS else 0
            length = f"to {self.steps} steps" if self.steps else "to none"
            self.notes.append(f"The budget shortened loss runs from {wished} steps {length}.")
