"""Dropout from 16 bits a number, beside torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.kernels.dropout import Dropout, dropout

COUNT = 1 << 20


@pytest.mark.parametrize("p", [0.001, 0.1, 0.3, 0.5, 0.9])
def test_as_many_are_left_out_as_torch_leaves_out(p: float) -> None:
    torch.manual_seed(0)
    ours, theirs = ((drop(torch.ones(COUNT), p) == 0).sum().item() for drop in (dropout, F.dropout))
    # Six standard deviations of a binomial count; 2^-17 is what rounding p changes at most.
    spread = 6 * (COUNT * p * (1 - p)) ** 0.5
    assert abs(ours - COUNT * p) < spread + COUNT * 2.0**-17
    assert abs(ours - theirs) < 1.5 * spread + COUNT * 2.0**-17


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(0,), (), (5,), (3, 7, 11), (2, 64, 64)])
def test_what_is_kept_is_scaled_forward_and_backward(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x = (1 + torch.rand(shape)).to(dtype).requires_grad_()
    out = dropout(x, 0.25)
    assert (out.dtype, out.shape) == (dtype, x.shape)
    kept = out.detach() != 0
    # 0.25 is a multiple of 2^-16, so that the scale is exactly 4 / 3, as torch's.
    torch.testing.assert_close(out, torch.where(kept, x * (4 / 3), 0.0))
    gradient = torch.rand(shape).to(dtype)
    out.backward(gradient)
    torch.testing.assert_close(x.grad, torch.where(kept, gradient * (4 / 3), 0.0))


def test_the_mean_stays_whatever_p_is_rounded_to() -> None:
    torch.manual_seed(2)
    for p in (1e-4, 0.1, 0.33333):
        kept = 1 - round(p * 65536) / 65536
        out = dropout(torch.ones(COUNT), p)
        assert out.max().item() == pytest.approx(1 / kept, rel=1e-6)


def test_neighbours_and_calls_are_independent() -> None:
    """Elements whose bits came from one number of 64, and two calls, agree as often as chance has it."""
    torch.manual_seed(3)
    first, second = ((dropout(torch.ones(COUNT), 0.5) == 0) for _ in range(2))
    spread = 6 * 0.5 / COUNT**0.5
    for distance in (1, 2, 3, 4, 5, 64):
        same = (first[distance:] == first[:-distance]).double().mean().item()
        assert abs(same - 0.5) < spread, distance
    assert abs((first == second).double().mean().item() - 0.5) < spread


def test_a_seed_tells_what_is_kept() -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(4)
        found.append(dropout(torch.ones(100), 0.5))
    assert torch.equal(*found)
    before = torch.get_rng_state()
    own = [dropout(torch.ones(100), 0.5, generator=torch.Generator().manual_seed(4)) for _ in range(2)]
    assert torch.equal(*own)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (1.0, True), (0.5, False), (1e-9, True)])
def test_where_nothing_is_drawn_it_is_torchs(p: float, training: bool) -> None:
    x = torch.rand(9)
    assert torch.equal(dropout(x, p, training), F.dropout(x, p, training) if p != 1e-9 else x)
    module = Dropout(p).train(training)
    assert isinstance(module, nn.Dropout)
    assert torch.equal(module(x), dropout(x, p, training))


def test_a_share_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="probability"):
        dropout(torch.ones(3), 1.5)


def test_a_byte_is_kept_of_each_number() -> None:
    kept: list[Tensor] = []
    x = torch.rand(64, 64, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        dropout(x, 0.1)
    assert sum(t.untyped_storage().nbytes() for t in kept) == x.numel()


def test_compiled_code_draws_it_as_one_operation() -> None:
    graphs = []

    def kept(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    module = torch.compile(Dropout(0.5), backend=kept, fullgraph=True)
    torch.manual_seed(5)
    found = module(torch.ones(1000))
    torch.manual_seed(5)
    assert torch.equal(found, Dropout(0.5)(torch.ones(1000)))
    assert sum("kept" in name for name in graphs[0]) == 1
    assert not torch.equal(module(torch.ones(1000)), found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inductor imports torch.jit
def test_inductor_draws_the_same_numbers() -> None:
    module = torch.compile(nn.Sequential(nn.Linear(16, 16), Dropout(0.5), nn.ReLU()), fullgraph=True)
    x = torch.randn(8, 16)

    def run(model: nn.Module) -> tuple[Tensor, Tensor]:
        torch.manual_seed(6)
        given = x.clone().requires_grad_()
        out = model(given)
        out.sum().backward()
        assert given.grad is not None
        return out.detach(), given.grad

    torch.testing.assert_close(run(module), run(module._orig_mod))
