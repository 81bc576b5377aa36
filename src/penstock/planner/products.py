"""How fast a machine multiplies matrices: as measured nearby, or as its tiles and waves allow."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from penstock.config.machine import GemmSample, Machine
from penstock.planner.constants import DEFAULT
from penstock.planner.gemm import Chip, tiled_seconds
from penstock.planner.rates import DEFAULT_MULTIPROCESSORS

NEAR_SAMPLES = 4
"""Measured products between which the rate of an unmeasured shape is interpolated."""
NEAR = 1e-6
"""Squared distance in logarithms below which a shape is as good as measured."""


def gemm_rate(
    machine: Machine, type_: str, m: int, n: int, k: int, batch: int = 1, *, over_rows: bool = False
) -> float:
    """FLOP/s of `batch` products (m, k) @ (k, n) in one launch.

    Measured shapes are interpolated (by inverse square distance in the logarithms of m, n and k, over the nearest
    few); without any, the best known rate is lowered by what tiles and waves leave idle, as for layouts.
    Raises KeyError where the machine cannot compute in this type.
    """
    return products(machine, type_).rate(m, n, k, batch, over_rows=over_rows)


class Near(NamedTuple):
    """The measured products, as seen from products of which one size varies."""

    points: tuple[tuple[float, float], ...]
    """Of each the squared distance in logarithms from where that size is 1, and how fast it shrinks with the size's
    logarithm x; x² comes on top."""
    rates: tuple[float, ...]
    ceiling: float

    @classmethod
    def of(
        cls, samples: tuple[GemmSample, ...], ceiling: float, m: int, n: int, k: int, *, inner: bool
    ) -> Near:
        """As seen from (m, k) @ (k, n), where k varies if `inner`, and else m."""
        points = []
        for sample in samples:
            others = [(sample.n, n), (sample.m, m) if inner else (sample.k, k)]
            along = math.log(sample.k if inner else sample.m)
            apart = sum(math.log(measured / asked) ** 2 for measured, asked in others)
            points.append((apart + along * along, 2.0 * along))
        return cls(tuple(points), tuple(sample.flops_per_second for sample in samples), ceiling)

    def rate(self, size: int) -> float:
        """FLOP/s where that size is `size`."""
        x = math.log(size)
        apart = [square - slope * x for square, slope in self.points]
        bound = sorted(apart)[NEAR_SAMPLES - 1] if len(apart) > NEAR_SAMPLES else math.inf
        least = x * x + NEAR
        total = rates = 0.0
        for distance, rate in zip(apart, self.rates):
            if distance <= bound:
                weight = 1.0 / (least + distance)
                total += weight
                rates += weight * rate
        rate = rates / total
        return rate if rate < self.ceiling else self.ceiling


class Products(NamedTuple):
    """How fast a machine multiplies in one type."""

    samples: tuple[GemmSample, ...]
    ceiling: float
    """No product is faster."""
    chip: Chip | None
    """How a GPU without measured products cuts them up."""

    def rate(self, m: int, n: int, k: int, batch: int, *, over_rows: bool) -> float:
        """As `gemm_rate`."""
        near = self.near(m, n, k, inner=False)
        if near:
            return near.rate(m)
        if self.chip is None:
            return self.ceiling
        return 2.0 * m * n * k * batch / tiled_seconds(self.chip, m, n, k, batch, over_rows=over_rows)

    def near(self, m: int, n: int, k: int, *, inner: bool) -> Near | None:
        """What was measured, as seen from products of which k varies, if `inner`, or m; None without."""
        return Near.of(self.samples, self.ceiling, m, n, k, inner=inner) if self.samples else None


@lru_cache(maxsize=256)
def products(machine: Machine, type_: str) -> Products:
    peak, best = machine.peak_flops[type_], machine.achievable_flops.get(type_)
    samples = tuple(sample for sample in machine.gemm if sample.dtype == type_)
    if samples or machine.device == "cpu":
        return Products(samples, peak if samples else best or peak, None)
    rate = (best or DEFAULT.unmeasured_share * peak) * DEFAULT.gemm_share
    memory = bandwidth(machine) * DEFAULT.memory_share
    sms = machine.multiprocessors or DEFAULT_MULTIPROCESSORS
    return Products((), peak, Chip(rate, sms, DEFAULT.tile_depth, memory))


def bandwidth(machine: Machine) -> float:
    """Bytes per second of a machine's memory; of one that does not say, more than any."""
    return machine.memory_bytes_per_second or math.inf
