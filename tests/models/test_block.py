"""The parts of a block: activations, and stochastic depth, which drops whole samples at its rate and keeps the mean."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.activations import ACT2FN

from penstock.config.activations import ACTIVATIONS, Mlp
from penstock.kernels.bias_activation import activate, bias_activation
from penstock.models.block import drop_path


def test_both_activations_are_their_formulas() -> None:
    x = torch.linspace(-4, 4, 101, dtype=torch.float64)
    torch.testing.assert_close(activate(x, "gelu"), x * 0.5 * (1 + torch.erf(x / math.sqrt(2))))
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    torch.testing.assert_close(activate(x, "gelu_tanh"), x * 0.5 * (1 + torch.tanh(inner)))


@pytest.mark.parametrize("name", [name for name, row in ACTIVATIONS.items() if row.gate is None])
def test_activations_are_those_of_transformers(name: Mlp) -> None:
    """Forward and backward, as torch's operators compute them and as the fused one does, which falls back to these
    where it has no kernel."""
    x, bias = torch.linspace(-4, 4, 101).requires_grad_(), torch.zeros(101).requires_grad_()
    ours, fused = activate(x, name), bias_activation(x, bias, name)
    slopes = [*torch.autograd.grad(ours.sum(), x), *torch.autograd.grad(fused.sum(), (x, bias))]
    for word in ACTIVATIONS[name].names:
        theirs = ACT2FN[word](x)
        (slope,) = torch.autograd.grad(theirs.sum(), x)
        torch.testing.assert_close([ours, fused], [theirs] * 2, rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(slopes, [slope] * 3, rtol=1e-5, atol=2e-6)
        assert type(ACT2FN[word]).__name__ in ACTIVATIONS[name].classes


@pytest.mark.parametrize("batch_dim", [0, 1])
def test_samples_are_dropped_whole_and_the_rest_scaled(batch_dim: int) -> None:
    shape = [3, 3]
    shape[batch_dim] = 4000
    out = drop_path(torch.ones(*shape, 2), torch.tensor(0.25), batch_dim=batch_dim)
    samples = out.movedim(batch_dim, 0).flatten(1)
    assert torch.equal(samples.amin(1), samples.amax(1))
    torch.testing.assert_close(samples.unique(), torch.tensor([0.0, 4 / 3]))
    # 4000 draws of deviation 0.43: 3.5 deviations of the share.
    assert (samples[:, 0] == 0).float().mean().item() == pytest.approx(0.25, abs=0.024)


def test_nothing_is_dropped_at_rate_zero() -> None:
    branch = torch.randn(5, 3, 2)
    assert torch.equal(drop_path(branch, torch.tensor(0.0), batch_dim=0), branch)


def test_both_orders_drop_the_same_samples() -> None:
    branch = torch.randn(8, 3, 2)
    torch.manual_seed(3)
    first = drop_path(branch, torch.tensor(0.5), batch_dim=0)
    torch.manual_seed(3)
    second = drop_path(branch.transpose(0, 1), torch.tensor(0.5), batch_dim=1)
    assert torch.equal(first, second.transpose(0, 1))


def test_the_type_of_the_branch_is_kept() -> None:
    branch = torch.randn(8, 3, 2, dtype=torch.bfloat16)
    assert drop_path(branch, torch.tensor(0.5), batch_dim=0).dtype == torch.bfloat16
