"""Samplers of diffusion models: from noise at t = 1 to a sample at t = 0, in a number of steps.

Each solves the probability-flow ODE (Song et al., ICLR 2021, "Score-Based Generative Modeling through Stochastic
Differential Equations", eq. 13), whose marginal at every t is that of x = α(t)·x₀ + σ(t)·ε:

- `ddim` is exact if the denoised sample does not change within a step (Song et al., ICLR 2021, "Denoising Diffusion
  Implicit Models", eq. 12); with `eta` above 0 it adds fresh noise, and with 1 it is DDPM's ancestral sampler;
- `euler` moves along dx/dt; with the schedule `flow` this is `ddim`;
- `dpm` is DPM-Solver++(2M) (Lu et al., 2022, algorithm 2): `ddim` with the denoised sample extrapolated from the last
  two, of second order.

A step evaluates the denoiser once, at the first of its two times, so never at t = 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.tasks.noise import NoiseSchedule

Denoiser = Callable[[Tensor, float], tuple[Tensor, Tensor]]
"""Splits noisy samples x (B, …), all at one time t in (0, 1], into estimates of x₀ and ε, (B, …) each."""
Sampler = Callable[[Denoiser, Tensor, Sequence[float], NoiseSchedule], Tensor]
"""A function of a denoiser, noisy samples x (B, …) at the first of several descending times, the times and the
schedule; returns samples (B, …) at the last time. Raises ConfigError for times that do not descend within [0, 1]."""


class Level(NamedTuple):
    """The schedule at one time."""

    t: float
    alpha: float
    sigma: float


def even_times(steps: int, *, start: float = 1.0) -> list[float]:
    """`steps` + 1 evenly spaced times, from `start` down to 0."""
    return [start * (steps - step) / steps for step in range(steps + 1)]


def levels(schedule: NoiseSchedule, times: Sequence[float]) -> list[Level]:
    """The schedule at each of several times. Raises ConfigError unless they descend within [0, 1]."""
    if len(times) < 2 or not all(1 >= t > s >= 0 for t, s in pairwise(times)):
        raise ConfigError("A sampler needs two times or more, each less than the one before, from 1 to 0.")
    at = schedule.coefficients(torch.tensor(times, dtype=torch.float64))
    return [Level(*each) for each in zip(times, at.alpha.tolist(), at.sigma.tolist(), strict=True)]


def ddim(
    denoise: Denoiser,
    x: Tensor,
    times: Sequence[float],
    schedule: NoiseSchedule,
    *,
    eta: float = 0.0,
    draw: Callable[[], Tensor] | None = None,
) -> Tensor:
    """DDIM. `eta` is the share of the ancestral sampler's noise that each step adds; `draw` returns standard normal
    noise like x."""
    for at, to in pairwise(levels(schedule, times)):
        x0, eps = denoise(x, at.t)
        new = eta * to.sigma * math.sqrt(max(0.0, 1 - (at.alpha * to.sigma / (to.alpha * at.sigma)) ** 2))
        x = to.alpha * x0 + math.sqrt(to.sigma**2 - new**2) * eps
        if new:
            x = x + new * (torch.randn_like(x) if draw is None else draw())
    return x


def euler(denoise: Denoiser, x: Tensor, times: Sequence[float], schedule: NoiseSchedule) -> Tensor:
    """Euler's method in t."""
    times = [level.t for level in levels(schedule, times)]
    at = torch.tensor(times, dtype=torch.float64)
    _, _, of_sample, of_noise = schedule.coefficients(at)
    strides = schedule.speed(at[:-1]) * at.diff()
    for number, t in enumerate(times[:-1]):
        x0, eps = denoise(x, t)
        x = x + float(strides[number]) * (float(of_sample[number]) * x0 + float(of_noise[number]) * eps)
    return x


def dpm(denoise: Denoiser, x: Tensor, times: Sequence[float], schedule: NoiseSchedule) -> Tensor:
    """DPM-Solver++(2M). The first step, and one that ends at t = 0, are of first order."""
    before: tuple[Tensor, float] | None = None
    for at, to in pairwise(levels(schedule, times)):
        x0, _ = denoise(x, at.t)
        # The step in λ = log(α / σ), which is infinite if it ends at σ = 0 or begins at α = 0.
        ratio = at.alpha * to.sigma / (to.alpha * at.sigma)
        step = math.inf if ratio == 0 else -math.log(ratio)
        ahead = x0
        if before is not None and math.isfinite(step):
            last, last_step = before
            ahead = x0 + (x0 - last) * (step / last_step / 2)
        before = x0, step
        x = (to.sigma / at.sigma) * x + (to.alpha - at.alpha * to.sigma / at.sigma) * ahead
    return x


SAMPLERS: dict[str, Sampler] = {"ddim": ddim, "dpm": dpm, "euler": euler}
"""Samplers by their names in `penstock sample`."""


def guide(with_condition: Tensor, without: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance of a model's outputs (B, …) with and without the condition: at scale 1 the output with
    the condition, above 1 further away from the output without it (Ho & Salimans, 2022, eq. 6, whose w is scale −
    1)."""
    return without + scale * (with_condition - without)
