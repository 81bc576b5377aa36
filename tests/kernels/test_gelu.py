"""GELU by its tanh approximation, as it is compiled on a CPU, against torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.bias_activation import _SigmoidForm, gelu_tanh


def _both(x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    out = _SigmoidForm.apply(x)
    (slope,) = torch.autograd.grad(out, x, gradient)
    return out, slope


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(0, 3), (7,), (3, 5, 17)])
def test_the_sigmoid_form_is_as_exact_as_torchs(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, gradient = (4 * torch.randn(2, *shape)).to(dtype)
    wide = x.double().requires_grad_()
    exact = F.gelu(wide, approximate="tanh")
    (exact_slope,) = torch.autograd.grad(exact, wide, gradient.double())
    plain = x.clone().requires_grad_()
    theirs = F.gelu(plain, approximate="tanh")
    (their_slope,) = torch.autograd.grad(theirs, plain, gradient)
    out, slope = _both(x, gradient)
    assert out.dtype == slope.dtype == dtype
    room = torch.finfo(dtype).eps
    for own, other, right in ((out, theirs, exact), (slope, their_slope, exact_slope)):
        limit = 2 * (other.double() - right).abs() + room * (1 + right.abs())
        assert bool(((own.double() - right).abs() <= limit).all())


def test_its_gradient_is_that_of_its_function() -> None:
    x = torch.linspace(-6, 6, 31, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(_SigmoidForm.apply, (x,))
    torch.testing.assert_close(_SigmoidForm.apply(x), F.gelu(x, approximate="tanh"))


def test_large_numbers_neither_overflow_nor_turn_into_nan() -> None:
    x = torch.tensor([-1e12, -1e4, -30.0, 0.0, 30.0, 1e4, 1e12])
    out, slope = _both(x, torch.ones_like(x))
    torch.testing.assert_close(out, x.clamp(min=0))
    torch.testing.assert_close(slope, torch.tensor([0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0]))


def test_a_compiled_graph_has_no_tanh_and_an_eager_one_torchs_own() -> None:
    graphs = []

    def keep(graph: Any, _: list[Tensor]) -> Any:
        graphs.append(graph.code)
        return graph

    x = torch.randn(3, 4)
    torch._dynamo.reset()
    out = torch.compile(gelu_tanh, backend=keep)(x)
    torch.testing.assert_close(out, gelu_tanh(x))
    assert "exp" in graphs[0]
    assert "tanh" not in graphs[0].replace("gelu_tanh", "")
    assert torch.equal(gelu_tanh(x), F.gelu(x, approximate="tanh"))
    exported = torch.export.export(torch.nn.GELU(approximate="tanh"), (x,))  # the form that exports know
    assert "gelu" in str(exported.graph)


def test_an_export_keeps_the_operator() -> None:
    class Activation(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return gelu_tanh(x)

    assert "aten.gelu" in str(torch.export.export(Activation(), (torch.randn(2, 3),)).graph)
