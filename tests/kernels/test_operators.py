"""Every enrolled operator: results, gradients, compiled code and recomputation, by the kernel and without it; and
torch's contract of operators, of each that we register.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from helpers.native_kernels import needs_compiler
from helpers.operators import OPERATORS, Function, hold
from penstock.cpu import this_cpu
from penstock.kernels import bias_activation, choices, cross_entropy, native, residual_norm
from penstock.kernels.native_grouped import takes_grouped

TYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(params=[pytest.param("native", marks=needs_compiler), "python"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Also with few rows of a loss at a time, the last time fewer."""
    monkeypatch.setitem(choices.LOSS_PIECE, "cpu", 300)
    if request.param == "python":
        for module in (residual_norm, bias_activation):
            monkeypatch.setattr(module, "library", lambda: None)
        monkeypatch.setattr(cross_entropy, "takes_rows", lambda logits: False)
    else:
        assert native.library() is not None
    made: str = request.param
    return made


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kernel", OPERATORS)
def test_results_and_gradients_are_as_exact_as_torchs(kernel: str, dtype: torch.dtype, form: str) -> None:
    for row in OPERATORS[kernel]:
        if form in row.forms and dtype in row.types:
            hold(row, dtype)


WAYS: dict[str, Callable[[Function], Function]] = {
    "compiled": partial(torch.compile, backend="aot_eager", fullgraph=True),
    "recomputed": lambda ours: partial(checkpoint, ours, use_reentrant=False),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kernel", OPERATORS)
def test_compiled_and_recomputed_they_are_too(kernel: str, way: str, form: str) -> None:
    torch._dynamo.reset()
    row = OPERATORS[kernel][-1]
    if form in row.forms:
        hold(row, torch.bfloat16, row.shapes[:1], WAYS[way])


def _drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, learn: bool = True) -> list[Tensor]:
    return [torch.randn(shape).to(dtype).requires_grad_(learn) for shape in shapes]


OPS = torch.ops.penstock
SEED = torch.zeros(1, dtype=torch.int64)


def _norms() -> list[tuple[Any, ...]]:
    x, branch, weight, bias = _drawn((3, 8), (3, 8), (8,), (8,))
    kept = (None, 1.0), (torch.rand(3, 8) > 0.3, 1.5), (SEED, 1.25)
    rest = (weight, bias, 1e-5, False, torch.float32), (weight, None, 1e-5, True, torch.bfloat16)
    return [(OPS.add_norm, x, branch, *some, *more) for some in kept for more in rest]


def _activations() -> list[tuple[Any, ...]]:
    x, second, bias = _drawn((3, 8), (3, 8), (8,))
    cases = (bias, "gelu", False, None), (None, "silu", True, None), (None, "gelu_quick", False, second)
    return [(OPS.bias_activation, x, *case) for case in cases]


def _rows_of_logits() -> list[tuple[Any, ...]]:
    logits, taught = _drawn((3, 5), (3, 5), learn=False)
    terms = 0.1, 0.01, 0.5, 2.0, 1.0, True
    return [(OPS.logit_rows_, logits, torch.tensor([1, -100, 4]), taught, torch.ones(3), *terms)]


def _attention() -> list[tuple[Any, ...]]:
    q, k, v, packed = _drawn(
        (2, 2, 19, 32), (2, 1, 19, 32), (2, 1, 19, 32), (5, 2, 2, 3, 16), dtype=torch.bfloat16
    )
    rest = False, 0.0, 0.2
    return [
        (OPS.attend_packed, packed, None, SEED, *rest, True),
        (OPS.attend, q, k, v, None, SEED, True, *rest[1:]),
    ]


def _grouped(dtype: torch.dtype) -> list[tuple[Any, ...]]:
    x, weight, grad = _drawn((5, 6), (2, 4, 6), (5, 4), dtype=dtype, learn=False)
    ends = torch.tensor([2, 5], dtype=torch.int32)
    learned = OPS.grouped, x.clone().requires_grad_(), weight.clone().requires_grad_(), ends, False
    return [(OPS.native_grouped, x, weight, ends), (OPS.native_grouped_outer, grad, x, ends), learned]


CONTRACTS: dict[str, tuple[Callable[[], list[tuple[Any, ...]]], bool]] = {
    # operators with their arguments, and whether this machine has their kernels
    "add_norm": (_norms, True), "bias_activation": (_activations, True), "logit_rows_": (_rows_of_logits, True),
    "attend": (_attention, this_cpu().bf16_pairs),
    **{f"grouped {dtype}": (partial(_grouped, dtype), takes_grouped(torch.empty(0, dtype=dtype), 1, 8, 8))
       for dtype in (torch.float32, torch.bfloat16)},
}  # fmt: skip


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", CONTRACTS)
def test_torch_accepts_the_operators(name: str) -> None:
    """Their fakes, their gradients and their place in graphs."""
    make, there = CONTRACTS[name]
    if not there:
        pytest.skip("this CPU lacks the instructions that the kernels use")
    for operator, *arguments in make():
        torch.library.opcheck(operator.default, tuple(arguments))
