"""Forecasts beyond the planner: one machine divided among several processes, and corrections from measurements. Free of
torch.

Ranks on one CPU share it: each gets its part of every rate. The cost of their collectives is measured.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import replace

from penstock.config.machine import Link, Machine
from penstock.ladder.statistics import inverse


def rank_machine(machine: Machine, ranks: int, link: Link) -> Machine:
    """The part of this machine that each of `ranks` processes has, as a Machine."""
    linked = replace(machine.linked(link, ranks), devices_per_node=max(ranks, machine.devices_per_node))
    if machine.device != "cpu":
        return linked
    return replace(
        linked,
        peak_flops={name: rate / ranks for name, rate in machine.peak_flops.items()},
        achievable_flops={name: rate / ranks for name, rate in machine.achievable_flops.items()},
        memory_bytes=machine.memory_bytes / ranks,
        memory_bytes_per_second=machine.memory_bytes_per_second / ranks,
        gemm=tuple(replace(s, flops_per_second=s.flops_per_second / ranks) for s in machine.gemm),
        kernels=tuple(replace(s, per_second=s.per_second / ranks) for s in machine.kernels),
    )


class Corrected:
    """Forecasts of settings' speeds, corrected by the measurements of other settings.

    The logarithm of the correction is a sum of terms, one for the answer to each choice (a rung or none) and one for
    each pair of answers, each of an unknown size around zero: ridge regression on the measurements. It is solved in its
    kernel form, in which two settings that agree in m answers share m single terms and m (m - 1) / 2 pairs.
    """

    SINGLE, PAIR = 0.15, 0.08
    """Standard deviations of a single term and of a pair's: the planner's own errors between settings."""
    LEAST = 1e-5
    """Least variance of a measurement: the variance between two builds of one setting."""

    def __init__(self) -> None:
        self._keys: list[tuple[str, ...]] = []
        self._errors: list[float] = []
        self._inverse: list[list[float]] = []
        self._means: dict[tuple[str, ...], float] = {}

    def learn(self, errors: Mapping[tuple[str, ...], tuple[float, float]]) -> None:
        """Fit to all measurements so far: for each key, the logarithm of measured over predicted speed (both relative
        to the baseline) and its variance."""
        self._keys, values = list(errors), [error for error, _ in errors.values()]
        matrix = [
            [
                self._shared(a, b) + (self.LEAST + errors[a][1] if i == j else 0.0)
                for j, b in enumerate(self._keys)
            ]
            for i, a in enumerate(self._keys)
        ]
        self._inverse = inverse(matrix)
        self._errors = [sum(a * b for a, b in zip(row, values, strict=True)) for row in self._inverse]
        self._means.clear()

    def mean(self, key: tuple[str, ...]) -> float:
        """The correction to add to the logarithm of a setting's predicted speed."""
        if key not in self._means:
            shared = (self._shared(key, k) * e for k, e in zip(self._keys, self._errors, strict=True))
            self._means[key] = float(sum(shared))
        return self._means[key]

    def deviation(self, key: tuple[str, ...]) -> float:
        """Standard deviation of the corrected forecast's error, in the logarithm of the speed."""
        shared = [self._shared(key, k) for k in self._keys]
        explained = sum(
            a * sum(b * c for b, c in zip(row, shared, strict=True))
            for a, row in zip(shared, self._inverse, strict=True)
        )
        return math.sqrt(max(0.0, self._shared(key, key) - explained))

    @classmethod
    def _shared(cls, first: tuple[str, ...], second: tuple[str, ...]) -> float:
        same = float(sum(map(operator.eq, first, second)))
        return cls.SINGLE**2 * same + cls.PAIR**2 * same * (same - 1) / 2


def expected_gain(mean: float, deviation: float) -> float:
    """Expected value of max(0, x) for a normal x with this mean and deviation."""
    if deviation <= 0:
        return max(0.0, mean)
    z = mean / deviation
    density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return mean * 0.5 * (1 + math.erf(z / math.sqrt(2))) + deviation * density
