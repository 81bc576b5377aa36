"""The loss over a vocabulary in chunks: held to the plain form, forward and backward, and to its budget of memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from helpers.rank_pool import pool
from penstock.cpu import this_cpu
from penstock.kernels import linear_cross_entropy as module
from penstock.kernels.linear_cross_entropy import linear_cross_entropy, rows_at_once
from penstock.kernels.vocabulary import Share

ROWS, WIDTH, WORDS = 37, 24, 60
BUDGET = 8 * WORDS * 8
"""Eight rows of fp32."""


def _case(dtype: torch.dtype, *, bias: bool = True, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(seed)
    x = torch.randn(ROWS, WIDTH).to(dtype).requires_grad_()
    weight = (torch.randn(WORDS, WIDTH) * 0.3).to(dtype).requires_grad_()
    offset = [torch.randn(WORDS).to(dtype).requires_grad_()] if bias else []
    targets = torch.randint(0, WORDS, (ROWS,))
    targets[::5] = -100
    return [x, weight, *offset], targets


def _run(inputs: list[Tensor], targets: Tensor, scale: float = 1.0, **options: Any) -> list[Tensor]:
    for tensor in inputs:
        tensor.grad = None
    x, weight, *bias = inputs
    loss = linear_cross_entropy(x, weight, bias[0] if bias else None, targets, **options)
    (loss * scale).backward()
    return [loss.detach(), *(tensor.grad for tensor in inputs if tensor.grad is not None)]


@pytest.mark.parametrize("budget", [None, 1, BUDGET, 1 << 30])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_padding_of_logits_changes_nothing(
    dtype: torch.dtype, bias: bool, smoothing: float, budget: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where products want rows of whole pieces."""
    inputs, targets = _case(dtype, bias=bias)
    shapes, expected = [], list[Tensor]()
    for padded in (set[str](), {"cpu"}):
        monkeypatch.setattr(module, "_PADDED_ON", padded)
        shapes.append(tuple(module.padded_entries(inputs[1]).shape))
        found = _run(inputs, targets, smoothing=smoothing, budget=budget)
        expected = expected if padded else found
    assert shapes == [(60, WIDTH), (64, WIDTH)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("budget", [1, BUDGET, 1 << 30])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chunks_are_exact(dtype: torch.dtype, bias: bool, smoothing: float, budget: int) -> None:
    inputs, targets = _case(dtype, bias=bias)
    expected = _run(inputs, targets, smoothing=smoothing, budget=None)
    found = _run(inputs, targets, smoothing=smoothing, budget=budget)
    assert len(found) == len(inputs) + 1
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_half_precision_is_as_near_to_fp32_as_the_plain_form(dtype: torch.dtype, smoothing: float) -> None:
    inputs, targets = _case(dtype)
    wide = [tensor.detach().float().requires_grad_() for tensor in inputs]
    exact = _run(wide, targets, smoothing=smoothing, budget=None)
    plain = _run(inputs, targets, smoothing=smoothing, budget=None)
    found = _run(inputs, targets, smoothing=smoothing, budget=BUDGET)
    for one, other, right in zip(found, plain, exact, strict=True):
        assert one.dtype == other.dtype
        # Sums over chunks round once more than one product does.
        allowed = 2 * (other.float() - right).abs().max() + torch.finfo(dtype).eps * right.abs().max()
        assert (one.float() - right).abs().max() <= allowed


def test_small_gradients_of_fp16_survive() -> None:
    """Probabilities of 2e-8 are nothing in fp16, and their sum over words is something."""
    torch.manual_seed(0)
    words, rows = 4096, 8
    x = torch.zeros(rows, 16, dtype=torch.float16)
    x[:, 0] = 1.0
    weight = torch.zeros(words, 16, dtype=torch.float16)
    weight[0, 0] = 17.0  # all others: e^-17 / (1 + 4095 e^-17) = 4e-8
    weight[1:, 1] = 8.0
    inputs = [x.requires_grad_(), weight.requires_grad_()]
    targets = torch.zeros(rows, dtype=torch.int64)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    exact = _run(wide, targets, budget=None)
    found = _run(inputs, targets, budget=1 << 14)
    torch.testing.assert_close(found[1][:, 1].double(), exact[1][:, 1], rtol=2e-3, atol=0.0)


def test_a_long_sum_of_fp16_gradients_does_not_overflow() -> None:
    rows = 4096
    x = torch.full((rows, 4), 30.0, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(8, 4, dtype=torch.float16, requires_grad=True)
    targets = torch.zeros(rows, dtype=torch.int64)
    found = _run([x, weight], targets, 1.0 / rows, budget=1 << 12)
    assert found[2].isfinite().all()
    torch.testing.assert_close(found[2][0].float(), torch.full((4,), -30.0 * 7 / 8), rtol=1e-3, atol=0.0)


def test_tied_weights_get_both_gradients() -> None:
    torch.manual_seed(0)
    tokens, targets = torch.randint(0, WORDS, (ROWS,)), torch.randint(0, WORDS, (ROWS,))
    table = torch.randn(WORDS, WIDTH, requires_grad=True)
    grads = []
    for budget in (None, BUDGET):
        table.grad = None
        linear_cross_entropy(F.embedding(tokens, table), table, None, targets, budget=budget).backward()
        assert table.grad is not None
        grads.append(table.grad)
    torch.testing.assert_close(*grads)


def test_what_is_not_asked_for_is_not_made() -> None:
    inputs, targets = _case(torch.float32)
    x, weight, bias = (tensor.detach() for tensor in inputs)
    frozen = linear_cross_entropy(x.requires_grad_(), weight, bias, targets, budget=BUDGET)
    frozen.backward()
    assert x.grad is not None
    with torch.no_grad():
        alone = linear_cross_entropy(x, weight, bias, targets, budget=BUDGET)
    assert not alone.requires_grad
    torch.testing.assert_close(alone, frozen.detach())


def test_a_second_backward_pass_is_refused() -> None:
    inputs, targets = _case(torch.float32)
    x, weight, bias = inputs
    loss = linear_cross_entropy(x, weight, bias, targets, budget=BUDGET)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autocast_decides_the_type_of_products() -> None:
    inputs, targets = _case(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = _run(inputs, targets, budget=BUDGET)
        expected = _run(inputs, targets, budget=None)
    assert not torch.equal(found[0], _run(inputs, targets, budget=BUDGET)[0])
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_no_rows_and_no_targets() -> None:
    inputs, targets = _case(torch.float32)
    x, weight, bias = inputs
    assert not linear_cross_entropy(x[:0], weight, bias, targets[:0], budget=BUDGET).any()
    found = _run(inputs, torch.full_like(targets, -100), budget=BUDGET)
    assert all(not tensor.any() for tensor in found)


def _shared(budgets: tuple[int | None, ...]) -> list[list[Tensor]]:
    """By budget, the loss and gradients of this rank's half of the vocabulary: of x, and of its rows of the weight."""
    inputs, targets = _case(torch.float64, bias=False)
    rank, half = torch.distributed.get_rank(), WORDS // 2
    own = [inputs[0], inputs[1].detach()[rank * half :][:half].clone().requires_grad_()]
    share = Share(torch.distributed.group.WORLD.group_name, rank * half, WORDS)
    return [_run(own, targets, smoothing=0.1, z_loss=0.02, budget=budget, share=share) for budget in budgets]


def test_a_z_loss_adds_the_square_of_the_sums() -> None:
    """In every form, and with the vocabulary on two ranks."""
    inputs, targets = _case(torch.float64, bias=False)
    logits = F.linear(*inputs)
    squares = torch.logsumexp(logits, 1).square()[targets != -100]
    loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=0.1) + 0.02 * squares.sum()
    expected = [loss.detach(), *torch.autograd.grad(loss, inputs)]
    budgets = None, BUDGET
    for budget, first, second in zip(budgets, *pool(2).run(_shared, budgets)):
        made = _run(inputs, targets, smoothing=0.1, z_loss=0.02, budget=budget)
        joined = [first[0], first[1] + second[1], torch.cat([first[2], second[2]])]
        for one, other, right in zip(made, joined, expected, strict=True):
            torch.testing.assert_close(one, right)
            torch.testing.assert_close(other, right)


def test_chunks_are_as_good_as_equal() -> None:
    assert rows_at_once(8 * 100 * 10, 25, 100, torch.float32) == 9
    assert rows_at_once(1, 25, 100, torch.float32) == 1
    assert rows_at_once(4 * 100 * 10, 25, 100, torch.float32, fused=True) == 9
    assert rows_at_once(1 << 40, 25, 100, torch.float32) == 25


def _peak(budget: int | None, dtype: torch.dtype, rows: int) -> int:
    """Bytes of tensors at the worst moment of a forward and backward pass, beyond the inputs."""
    x = torch.randn(rows, 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(4096, 16, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, 4096, (rows,))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        linear_cross_entropy(x, weight, None, targets, budget=budget).backward()
    held = peak = 0
    assert recorded.profiler is not None and recorded.profiler.kineto_results is not None  # noqa: PT018
    events = recorded.profiler.kineto_results.events()
    for _, change in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        held += change
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_stays_within_the_budget(dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and this_cpu().avx512 and not this_cpu().bf16:
        pytest.skip("oneDNN makes bf16 logits in fp32 on this CPU, beside the budget")
    budget = 2 << 20
    gradients = 4 * 4096 * 16 * 2 + 4 * 512 * 16 * 2  # the weight's sum and one chunk's, those of x
    whole, few, many = _peak(None, dtype, 512), _peak(budget, dtype, 512), _peak(budget, dtype, 2048)
    assert few <= budget + gradients + (64 << 10)
    assert many <= budget + gradients + 4 * 4 * 1536 * 16 + (64 << 10)
    assert whole > 1.5 * few


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inductor imports torch.jit
def test_compiled_code_keeps_the_budget_and_the_results() -> None:
    inputs, targets = _case(torch.float32)
    expected = _run(inputs, targets, smoothing=0.1, budget=None)
    x, weight, bias = inputs
    for tensor in inputs:
        tensor.grad = None

    @torch.compile(fullgraph=True, dynamic=False)
    def loss(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(x * 1.0, weight, bias, targets, smoothing=0.1, budget=BUDGET) * 2.0

    loss(x, weight, bias, targets).backward()
    for one, other in zip([t.grad for t in inputs], expected[1:], strict=True):
        assert one is not None
        torch.testing.assert_close(one, 2.0 * other)
