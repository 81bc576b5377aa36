"""The activations against their formulas."""

from __future__ import annotations

import math

import torch

from penstock.kernels.activation import activate


def test_both_activations_are_their_formulas() -> None:
    x = torch.linspace(-4, 4, 101, dtype=torch.float64)
    torch.testing.assert_close(activate(x, "gelu"), x * 0.5 * (1 + torch.erf(x / math.sqrt(2))))
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    torch.testing.assert_close(activate(x, "gelu_tanh"), x * 0.5 * (1 + torch.tanh(inner)))
