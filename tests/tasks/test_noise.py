"""Noise schedules, held to what defines them and to derivatives by automatic differentiation."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from penstock.config.graph import NoiseKind, Target
from penstock.tasks.noise import NoiseSchedule

NAMES, KINDS = get_args(NoiseKind), get_args(Target)
TIMES = torch.linspace(0.01, 0.99, 50, dtype=torch.float64)


@pytest.mark.parametrize("name", NAMES)
def test_samples_and_noise_come_back_from_every_target(name: NoiseKind) -> None:
    schedule = NoiseSchedule(name)
    x0, noise = torch.randn(2, len(TIMES), 3, 4, 4, dtype=torch.float64)
    x = schedule.add_noise(x0, noise, TIMES)
    for kind in KINDS:
        pair = schedule.to_x0_eps(kind, schedule.target(kind, x0, noise, TIMES), x, TIMES)
        torch.testing.assert_close(pair, (x0, noise), rtol=1e-7, atol=1e-7)
    at = schedule.coefficients(TIMES)
    torch.testing.assert_close(at.alpha * at.b - at.sigma * at.a, torch.ones_like(TIMES))


@pytest.mark.parametrize("name", NAMES)
def test_time_goes_from_the_sample_to_noise(name: NoiseKind) -> None:
    schedule = NoiseSchedule(name)
    ends = torch.tensor([0.0, 1.0])
    torch.testing.assert_close(schedule.coefficients(ends).alpha, torch.tensor([1.0, 0.0]), atol=0.01, rtol=0)
    torch.testing.assert_close(schedule.coefficients(ends).sigma, ends, atol=1e-4, rtol=0)
    assert (schedule.coefficients(TIMES).alpha.diff() < 0).all()
    assert (schedule.coefficients(TIMES).sigma.diff() > 0).all()


def test_v_is_the_direction_of_the_velocity() -> None:
    x0, noise = torch.randn(2, dtype=torch.float64)
    for name in NAMES:
        schedule = NoiseSchedule(name)
        for t in (0.2, 0.7):
            moment = torch.tensor([t], dtype=torch.float64, requires_grad=True)
            (speed,) = torch.autograd.grad(schedule.add_noise(x0[None], noise[None], moment), moment)
            v = schedule.target("v", x0[None], noise[None], moment)
            torch.testing.assert_close(speed, schedule.speed(moment) * v)


def test_the_linear_schedule_is_ddpms_in_the_limit_of_many_steps() -> None:
    steps = 1000
    betas = torch.linspace(1e-4, 0.02, steps, dtype=torch.float64)
    alphas = (1 - betas).log().cumsum(0).mul(0.5).exp()
    times = torch.arange(1, steps + 1, dtype=torch.float64) / steps
    torch.testing.assert_close(NoiseSchedule("linear").coefficients(times).alpha, alphas, rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_the_same_error_of_the_sample_whatever_is_predicted(name: NoiseKind) -> None:
    """An error of the output times its weight is min(snr, γ) times the error of x0 that it makes."""
    schedule = NoiseSchedule(name)
    x, output, error = torch.randn(3, len(TIMES), 5, dtype=torch.float64)
    for gamma in (1.0, 5.0):
        snr = (schedule.coefficients(TIMES).alpha / schedule.coefficients(TIMES).sigma) ** 2
        for kind in KINDS:
            right, _ = schedule.to_x0_eps(kind, output, x, TIMES)
            wrong, _ = schedule.to_x0_eps(kind, output + error, x, TIMES)
            made = (wrong - right).square().mean(1) * snr.clamp(max=gamma)
            weight = schedule.min_snr_weight(kind, TIMES, gamma)
            torch.testing.assert_close(weight * error.square().mean(1), made, rtol=1e-5, atol=1e-8)
    for kind in KINDS:
        assert schedule.min_snr_weight(kind, torch.tensor([0.0, 1.0]), 5.0).isfinite().all()
