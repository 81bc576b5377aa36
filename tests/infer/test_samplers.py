"""Samplers against exact solutions: Gaussian data have a denoiser and a flow from noise to samples in closed form.

Of data N(m, s²) the marginal at time t is N(α·m, v) with v = α²·s² + σ², and the flow keeps how many deviations √v a
point is away from α·m.
"""

from __future__ import annotations

import math
from functools import partial
from typing import get_args

import pytest
import torch
from torch import Tensor

from penstock.config.graph import NoiseKind, Target
from penstock.errors import ConfigError
from penstock.infer.samplers import SAMPLERS, Denoiser, Level, ddim, dpm, euler, even_times, guide, levels
from penstock.tasks.noise import NoiseSchedule

MEAN = torch.tensor([0.3, -0.5, 1.0], dtype=torch.float64)
SPREAD = torch.tensor([0.5, 0.2, 1.0], dtype=torch.float64)
SCHEDULES = [NoiseSchedule(name) for name in get_args(NoiseKind)]
INSIDE = 0.98, 0.02
"""First and last times of tests of order: at 0 and 1 log(α / σ) is infinite, and steps in it are never small."""


def at(schedule: NoiseSchedule, t: float) -> Level:
    return levels(schedule, [t, 0.0])[0]


def deviation(level: Level) -> Tensor:
    return (level.alpha**2 * SPREAD**2 + level.sigma**2).sqrt()


def exact(schedule: NoiseSchedule) -> Denoiser:
    def denoise(schedule: NoiseSchedule, x: Tensor, t: float) -> tuple[Tensor, Tensor]:
        level = at(schedule, t)
        x0 = MEAN + level.alpha * (SPREAD / deviation(level)) ** 2 * (x - level.alpha * MEAN)
        return x0, (x - level.alpha * x0) / level.sigma

    return partial(denoise, schedule)


def flow(schedule: NoiseSchedule, x: Tensor, start: float, end: float) -> Tensor:
    """Where the exact flow carries x from one time to another."""
    first, last = at(schedule, start), levels(schedule, [start, end])[1]
    return last.alpha * MEAN + deviation(last) * (x - first.alpha * MEAN) / deviation(first)


def noise(count: int) -> Tensor:
    return torch.randn(count, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def inner(steps: int) -> list[float]:
    first, last = INSIDE
    return [first + (last - first) * step / steps for step in range(steps + 1)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda each: each.name)
@pytest.mark.parametrize(("name", "order"), [("ddim", 1), ("euler", 1), ("dpm", 2)])
def test_errors_shrink_as_the_order_says(schedule: NoiseSchedule, name: str, order: int) -> None:
    x = noise(5)
    expected = flow(schedule, x, *INSIDE)
    errors = [
        float((SAMPLERS[name](exact(schedule), x, inner(steps), schedule) - expected).abs().max())
        for steps in (80, 160, 320)
    ]
    for more, fewer in zip(errors[1:], errors):
        assert math.log2(fewer / more) == pytest.approx(order, abs=0.12)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda each: each.name)
def test_samplers_agree_and_reach_the_distribution_from_pure_noise(schedule: NoiseSchedule) -> None:
    x = noise(400)
    expected = flow(schedule, x, 1.0, 0.0)
    made = {name: sample(exact(schedule), x, even_times(400), schedule) for name, sample in SAMPLERS.items()}
    for name, samples in made.items():
        worst = (samples - expected).abs().max()
        assert worst < (1e-3 if name == "dpm" else 0.03), (name, worst)
        # The map from noise to samples is linear, so the mean and deviation of samples are known from that of x.
        torch.testing.assert_close(samples.mean(0), expected.mean(0), atol=0.01, rtol=0)
        torch.testing.assert_close(samples.std(0), expected.std(0), atol=0.01, rtol=0)
    few = [
        float((sample(exact(schedule), x, even_times(20), schedule) - expected).abs().max())
        for sample in (ddim, dpm)
    ]
    assert few[1] < 0.6 * few[0]
    if schedule.name == "flow":
        torch.testing.assert_close(made["euler"], made["ddim"], rtol=1e-10, atol=1e-10)


def test_noise_that_is_drawn_again_leaves_the_distribution_as_it_is() -> None:
    count, chance = 20_000, torch.Generator().manual_seed(1)
    x = noise(count)
    for schedule in SCHEDULES:
        first = at(schedule, 0.98)
        x_first = first.alpha * MEAN + deviation(first) * x

        def draw() -> Tensor:
            return torch.randn(count, 3, dtype=torch.float64, generator=chance)

        made = ddim(exact(schedule), x_first, inner(200), schedule, eta=1.0, draw=draw)
        last = at(schedule, 0.02)
        # Steps of first order, and 20,000 draws, whose mean varies by 0.007 deviations.
        torch.testing.assert_close(made.mean(0), last.alpha * MEAN, atol=0.04, rtol=0)
        torch.testing.assert_close(made.std(0), deviation(last), atol=0.01, rtol=0.05)
        assert abs(float(torch.corrcoef(torch.stack([x[:, 2], made[:, 2]]))[0, 1])) < 0.5
        again = ddim(exact(schedule), x_first[:50], inner(200), schedule)
        torch.testing.assert_close(again, ddim(exact(schedule), x_first[:50], inner(200), schedule, eta=0.0))


@pytest.mark.parametrize("kind", get_args(Target))
def test_a_step_is_the_formula_of_its_paper(kind: Target) -> None:
    """One step of DDIM by eq. 12, and two of DPM-Solver++ by algorithm 2, from a model of any target."""
    schedule, times = NoiseSchedule("cosine"), [0.9, 0.6, 0.4]
    x = noise(4)
    first, second, third = levels(schedule, times)

    def denoise(x: Tensor, t: float) -> tuple[Tensor, Tensor]:
        each = torch.full((len(x),), t, dtype=x.dtype)
        x0, eps = exact(schedule)(x, t)
        return schedule.to_x0_eps(kind, schedule.target(kind, x0, eps, each), x, each)

    x0, eps = exact(schedule)(x, first.t)
    one = ddim(denoise, x, times[:2], schedule)
    torch.testing.assert_close(one, second.alpha * (x - first.sigma * eps) / first.alpha + second.sigma * eps)
    lambdas = [math.log(level.alpha / level.sigma) for level in (first, second, third)]
    h, before = lambdas[2] - lambdas[1], lambdas[1] - lambdas[0]
    r = before / h
    later, _ = exact(schedule)(one, second.t)
    ahead = (1 + 1 / (2 * r)) * later - 1 / (2 * r) * x0
    expected = third.sigma / second.sigma * one - third.alpha * (math.exp(-h) - 1) * ahead
    torch.testing.assert_close(dpm(denoise, x, times, schedule), expected)
    slope = (math.pi / 2) * (first.alpha * eps - first.sigma * x0)
    torch.testing.assert_close(euler(denoise, x, times[:2], schedule), x - 0.3 * slope)


def test_guidance_moves_away_from_what_no_condition_gives() -> None:
    without, condition = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 1.0])
    assert guide(condition, without, 1.0).tolist() == [1, 1]
    assert guide(condition, without, 0.0).tolist() == [0, 1]
    assert guide(condition, without, 3.0).tolist() == [3, 1]


@pytest.mark.parametrize("times", [[1.0], [0.0, 1.0], [1.0, 0.5, 0.5], [1.1, 0.0], [0.5, -0.1]])
def test_times_must_descend(times: list[float]) -> None:
    for sample in SAMPLERS.values():
        with pytest.raises(ConfigError, match="less than the one before"):
            sample(exact(SCHEDULES[0]), noise(1), times, SCHEDULES[0])
