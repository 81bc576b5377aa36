"""The perceptron against its definition."""

from __future__ import annotations

import math

import pytest
import torch

from penstock.config.model import Mlp
from penstock.kernels.mlp import activate, mlp


def test_both_activations_are_their_formulas() -> None:
    x = torch.linspace(-4, 4, 101, dtype=torch.float64)
    torch.testing.assert_close(activate(x, "gelu"), x * 0.5 * (1 + torch.erf(x / math.sqrt(2))))
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    torch.testing.assert_close(activate(x, "gelu_tanh"), x * 0.5 * (1 + torch.tanh(inner)))


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_it_is_two_products_around_an_activation(activation: Mlp) -> None:
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    up, up_bias = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    down, down_bias = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    out = mlp(x, (up, up_bias), (down, down_bias), activation)
    torch.testing.assert_close(out, activate(x @ up.T + up_bias, activation) @ down.T + down_bias)
    assert torch.autograd.gradcheck(lambda t: mlp(t, (up, up_bias), (down, None), activation), (x,))
