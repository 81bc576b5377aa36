"""The gradient of a table that embeds tokens and makes logits, with only the rows of tokens added."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.apply import compile_model
from penstock.config.plan import Plan
from penstock.kernels.embedding_gradient import AddTouchedRows

VOCABULARY, WIDTH = 61, 24


class Tied(torch.nn.Module):
    """A table read by two embeddings, of which one leaves out the padding, and by the logits."""

    def __init__(self, dtype: torch.dtype, *, logits: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(VOCABULARY, WIDTH, dtype=torch.float64).to(dtype))
        self.logits = logits

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        x = F.embedding(left, self.weight, padding_idx=0) * 3.0 + F.embedding(right, self.weight)
        return F.linear(x, self.weight) if self.logits else x


def tokens() -> tuple[Tensor, Tensor]:
    """Few tokens, so that most come many times, and the padding too."""
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randint(0, 5, (3, 17), generator=generator),
        torch.randint(0, VOCABULARY, (3, 17), generator=generator),
    )


def gradient(model: Tied, forward: Callable[..., Tensor]) -> Tensor:
    model.weight.grad = None
    out = forward(*tokens())
    out.backward(
        torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).to(out.dtype)
    )
    assert model.weight.grad is not None
    return model.weight.grad.double()


@pytest.mark.parametrize(
    ("dtype", "logits"),
    [
        (torch.bfloat16, True),
        *(pytest.param(torch.float32, logits, marks=pytest.mark.slow) for logits in (False, True)),
        pytest.param(torch.bfloat16, False, marks=pytest.mark.sweep),
    ],
)
def test_gradients_are_as_near_to_fp64_as_those_of_torch(dtype: torch.dtype, logits: bool) -> None:
    model = Tied(dtype, logits=logits)
    exact_model = Tied(dtype, logits=logits).double()
    exact_model.weight.data.copy_(model.weight.data)
    exact, eager = gradient(exact_model, exact_model.forward), gradient(model, model.forward)
    compiled = torch.compile(
        model.forward, dynamic=False, options={"post_grad_custom_pre_pass": AddTouchedRows()}
    )
    error = (gradient(model, compiled) - exact).norm()
    assert error <= 1.1 * (eager - exact).norm() + 1e-6 * exact.norm()


@pytest.mark.slow
def test_no_table_is_added_or_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph of a whole compiled model adds rows, where torch alone adds two tables of fp32 zeros, or casts them."""
    counts: list[list[int]] = []
    rewrite = AddTouchedRows.__call__

    def tables(graph: torch.fx.Graph) -> list[int]:
        """Sums, and zeros in fp32, of the table's size."""
        return [
            sum(
                node.meta["val"].shape == (VOCABULARY, WIDTH) and node.meta["val"].dtype in dtypes
                for node in graph.find_nodes(op="call_function", target=target)
            )
            for target, dtypes in (
                (torch.ops.aten.add.Tensor, (torch.float32, torch.bfloat16)),
                (torch.ops.aten.full.default, (torch.float32,)),
            )
        ]

    def watched(self: AddTouchedRows, graph: torch.fx.Graph) -> None:
        before = tables(graph)
        rewrite(self, graph)
        counts.append([*before, *tables(graph)])

    monkeypatch.setattr(AddTouchedRows, "__call__", watched)
    monkeypatch.setattr(AddTouchedRows, "uuid", lambda self: None)  # nothing comes from the cache
    for dtype, logits, before in ((torch.float32, True, [2, 1]), (torch.bfloat16, False, [1, 1])):
        model = Tied(dtype, logits=logits)
        compile_model(model, Plan(compile="whole"))
        gradient(model, model)
        assert counts[-1] == [*before, 0, 0]
