"""Noise schedules of diffusion models, and the targets that such a model learns.

A noisy sample at time t in [0, 1] is x = α(t)·x₀ + σ(t)·ε, where x₀ is the sample and ε normal noise: clean at t = 0,
only noise at t = 1. There are three schedules:

- `cosine`: α = cos(πt/2), σ = sin(πt/2) (Nichol & Dhariwal, ICML 2021, section 3.2, without their offset);
- `linear`: DDPM's β from 0.1 to 20 in continuous time (Ho et al., NeurIPS 2020; Song et al., ICLR 2021, appendix C):
  log α = −t²·19.9/4 − t·0.1/2, σ² = 1 − α²;
- `flow`: α = 1 − t, σ = t, a straight line from sample to noise (Liu et al., ICLR 2023, "rectified flow").

A model predicts one of three targets: `x0`; `eps`; or `v`, which is α·ε − σ·x₀ in the first two schedules (Salimans &
Ho, ICLR 2022, appendix D) and the velocity ε − x₀ in `flow`. Shapes: B samples; t (B,), all else (B, …).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.config.graph import NoiseKind, Target

BETAS = 0.1, 20.0
"""DDPM's first and last β, 10⁻⁴ and 0.02, times its 1,000 steps."""


class Coefficients(NamedTuple):
    """The factors of x₀ and ε in a noisy sample, and in `v`, each in t's shape. In every schedule α·b − σ·a is 1, so
    x₀ = b·x − σ·v and ε = α·v − a·x."""

    alpha: Tensor
    sigma: Tensor
    a: Tensor
    """Factor of x₀ in v."""
    b: Tensor
    """Factor of ε in v."""


def ranges_of(times: Tensor, count: int) -> Tensor:
    """The number of the range of each time in [0, 1], among `count` equal ranges, as `routes` of a model: int64."""
    return (times * count).long().clamp(max=count - 1)


@dataclass(frozen=True, slots=True)
class NoiseSchedule:
    """A schedule by name. Its functions compute in the dtype of t."""

    name: NoiseKind

    def coefficients(self, t: Tensor) -> Coefficients:
        """α, σ and the factors of v at times t in [0, 1]."""
        if self.name == "flow":
            ones = torch.ones_like(t)
            return Coefficients(1 - t, t, -ones, ones)
        if self.name == "cosine":
            angle = t * (math.pi / 2)
            # π/2 is not exact in this dtype, and its cosine is slightly below 0.
            alpha, sigma = angle.cos().clamp(min=0.0), angle.sin()
        else:
            first, last = BETAS
            log_alpha = -t * t * ((last - first) / 4) - t * (first / 2)
            alpha, sigma = log_alpha.exp(), (-torch.expm1(2 * log_alpha)).sqrt()
        return Coefficients(alpha, sigma, -sigma, alpha)

    def speed(self, t: Tensor) -> Tensor:
        """The factor of v in dx/dt of the probability flow (Song et al., ICLR 2021, eq. 13), in t's shape."""
        if self.name == "flow":
            return torch.ones_like(t)
        if self.name == "cosine":
            return torch.full_like(t, math.pi / 2)
        at, (first, last) = self.coefficients(t), BETAS
        return (first + (last - first) * t) / 2 * at.alpha / at.sigma

    def add_noise(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """The noisy sample x at time t."""
        at = self._wide(t, x0)
        return at.alpha * x0 + at.sigma * noise

    def target(self, kind: Target, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """The tensor that a model which predicts `kind` should return for `add_noise(x0, noise, t)`."""
        if kind == "v":
            at = self._wide(t, x0)
            return at.a * x0 + at.b * noise
        return x0 if kind == "x0" else noise

    def to_x0_eps(self, kind: Target, output: Tensor, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """The sample and the noise that a model's output for x at time t implies.

        Each is computed from the other by division, so start below t = 1 (where α of `cosine` and `flow` is 0) with a
        model that predicts `eps`, and stop above t = 0 with a model that predicts `x0`; `v` has neither limit.
        """
        at = self._wide(t, x)
        if kind == "v":
            return at.b * x - at.sigma * output, at.alpha * output - at.a * x
        if kind == "x0":
            return output, (x - at.alpha * output) / at.sigma
        return (x - at.sigma * output) / at.alpha, output

    def min_snr_weight(self, kind: Target, t: Tensor, gamma: float) -> Tensor:
        """The weight of a sample's squared error in `kind`, (B,): min(α²/σ², γ) times the squared error in x₀ (Hang et
        al., ICCV 2023, "Efficient Diffusion Training via Min-SNR Weighting", section 3.4)."""
        at = self.coefficients(t)
        snr = (at.alpha / at.sigma).square()  # infinite at t = 0
        if kind == "v":
            return torch.minimum(at.alpha.square(), gamma * at.sigma.square())
        return snr.clamp(max=gamma) if kind == "x0" else (gamma / snr).clamp(max=1.0)

    def _wide(self, t: Tensor, like: Tensor) -> Coefficients:
        """Coefficients that broadcast to tensors such as `like`."""
        shape = (-1, *[1] * (like.ndim - 1))
        return Coefficients(*(each.reshape(shape) for each in self.coefficients(t)))
