"""Losses that hold some of their logits at a time: the loss over a vocabulary, of samples, of a student, and contrast.

Each is held to its plain form, forward and backward, and to its budget of memory.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from helpers.spawn import pool
from penstock.cpu import this_cpu
from penstock.kernels import choices
from penstock.kernels.contrast import contrast, plain_contrast
from penstock.kernels.distil import Taught, divergences_and_gradients
from penstock.kernels.linear_cross_entropy import linear_cross_entropy, padded_entries, rows_at_once
from penstock.kernels.sample_losses import sample_losses
from penstock.kernels.vocabulary import Share

ROWS, WIDTH, WORDS, SAMPLES = 36, 24, 60, 4
BUDGET = 8 * WORDS * 8
"""Eight rows of fp32."""
WEIGHTS = torch.tensor([1.0, -0.5, 0.0, 3.0])


def _case(dtype: torch.dtype, *, bias: bool = True, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(seed)
    x = torch.randn(ROWS, WIDTH).to(dtype).requires_grad_()
    weight = (torch.randn(WORDS, WIDTH) * 0.3).to(dtype).requires_grad_()
    offset = [torch.randn(WORDS).to(dtype).requires_grad_()] if bias else []
    targets = torch.randint(0, WORDS, (ROWS,))
    targets[::5] = -100
    return [x, weight, *offset], targets


def _run(inputs: list[Tensor], targets: Tensor, scale: float = 1.0, **options: Any) -> list[Tensor]:
    """The loss and the gradients of what learns, by `scale` times it."""
    x, weight, *bias = inputs
    loss = linear_cross_entropy(x, weight, bias[0] if bias else None, targets, **options)
    return [
        loss.detach(),
        *torch.autograd.grad(loss * scale, [each for each in inputs if each.requires_grad]),
    ]


def _samples(inputs: list[Tensor], targets: Tensor, scale: float = 1.0, **options: Any) -> list[Tensor]:
    """Losses of samples, the second without targets, and the gradients of their squares with weights, so that these
    are not known before the backward pass."""
    x, weight, *bias = inputs
    targets = targets.view(SAMPLES, -1).clone()
    targets[1] = -100
    losses = sample_losses(x.view(SAMPLES, -1, WIDTH), weight, bias[0] if bias else None, targets, **options)
    total = (losses.square() * WEIGHTS).sum() * scale
    gradients = torch.autograd.grad(total, [each for each in inputs if each.requires_grad])
    return [losses.detach(), *(each / scale for each in gradients)]


def _taught(inputs: list[Tensor], targets: Tensor, scale: float = 1.0, **options: Any) -> list[Tensor]:
    """Of a student, whose teacher is wider."""
    generator, dtype = torch.Generator().manual_seed(1), inputs[0].dtype
    x, weight, bias = (
        torch.randn(sizes, generator=generator).to(dtype) for sizes in ((ROWS, 30), (WORDS, 30), (WORDS,))
    )
    taught = Taught(x, weight, bias if len(inputs) > 2 else None, 0.3, 2.5, options.get("cap", 0.0) / 2)
    return _run(inputs, targets, 0.7 * scale, taught=taught, **options)


LOSSES = {
    "whole": _run, "of samples": _samples, "taught": _taught, "capped": partial(_run, cap=2.0),
    "of samples, capped": partial(_samples, cap=2.0), "taught, capped": partial(_taught, cap=2.0),
}  # fmt: skip
CHUNKS = [
    (torch.float64, True, 0.1, 1), (torch.float32, False, 0.0, BUDGET), (torch.float64, False, 0.1, BUDGET),
    (torch.float32, True, 0.1, BUDGET), (torch.float32, True, 0.0, 1 << 30),
]  # fmt: skip
"""A type, whether there is a bias, the smoothing, and bytes: for a row at a time, some rows, and all of them."""


@pytest.mark.parametrize(("dtype", "bias", "smoothing", "budget"), CHUNKS)
@pytest.mark.parametrize("loss", LOSSES)
def test_chunks_are_exact_padded_or_not(
    loss: str, dtype: torch.dtype, bias: bool, smoothing: float, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded as on a GPU, where products want rows of whole pieces."""
    inputs, targets = _case(dtype, bias=bias)
    expected = LOSSES[loss](inputs, targets, smoothing=smoothing)
    assert len(expected) == len(inputs) + 1
    for padded in (False, True):
        monkeypatch.setitem(choices.PADDED_TO, "cpu", 64 if padded else 1)
        assert len(padded_entries(inputs[1])) == (64 if padded else 60)
        found = LOSSES[loss](inputs, targets, smoothing=smoothing, budget=budget)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6 if dtype == torch.float64 else 1e-5, atol=1e-5)
            assert (one - other).norm() <= 1e-6 * other.norm()


def test_a_cap_is_its_formula() -> None:
    (x, weight, bias), targets = _case(torch.float64)
    loss = F.cross_entropy(2.0 * torch.tanh((x @ weight.T + bias) / 2.0), targets, reduction="sum")
    torch.testing.assert_close(_run([x, weight, bias], targets, cap=2.0)[0], loss.detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", ["of samples", "taught"])
def test_half_products_keep_their_range_whatever_the_loss_scale_is(loss: str, dtype: torch.dtype) -> None:
    inputs, targets = _case(torch.float32)
    expected = LOSSES[loss](inputs, targets)
    with torch.autocast("cpu", dtype):
        found = LOSSES[loss](inputs, targets, 2.0**20 if loss == "of samples" else 1.0, budget=BUDGET)
    for one, other in zip(found, expected, strict=True):
        assert one.isfinite().all()
        # The rounding of bf16's logits: measured 0.012, and 0.002 of fp16.
        assert (one - other).norm() <= 0.03 * other.norm()


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_only_what_learns_gets_a_gradient(frozen: int) -> None:
    inputs, targets = _case(torch.float64)
    inputs[frozen].requires_grad_(False)
    for one, other in zip(_samples(inputs, targets, budget=BUDGET), _samples(inputs, targets), strict=True):
        torch.testing.assert_close(one, other)


def test_the_plain_form_of_a_taught_loss_is_the_formula() -> None:
    (x, weight, bias), targets = _case(torch.float64)
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(ROWS, WORDS, generator=generator, dtype=torch.float64)
    p = x @ weight.T + bias
    logs, smooth, counted = p.log_softmax(1), 0.1, targets != -100
    hard = -(1 - smooth) * logs[counted, targets[counted]] - smooth / WORDS * logs[counted].sum(1)
    meant = (q / 2.5).softmax(1)
    apart = (meant * (meant.log() - (p / 2.5).log_softmax(1))).sum(1)[counted]
    loss = 0.7 * hard.sum() + 0.3 * 2.5**2 * apart.sum()
    expected = [loss.detach(), *torch.autograd.grad(loss * 0.7, [x, weight, bias])]
    taught = Taught(q, torch.eye(WORDS, dtype=torch.float64), None, 0.3, 2.5)
    for one, other in zip(
        _run([x, weight, bias], targets, 0.7, smoothing=0.1, taught=taught), expected, strict=True
    ):
        torch.testing.assert_close(one, other)


def test_no_chunk_holds_more_rows_of_student_and_teacher_than_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows: list[tuple[int, int]] = []

    def note(logits: Tensor, taught: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        rows.append((len(logits), len(taught)))
        return divergences_and_gradients(logits, taught, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("penstock.kernels.logit_rows.divergences_and_gradients", note)
    _taught(*_case(torch.float32), budget=4 * BUDGET)
    assert rows == [(8, 8)] * 4 + [(4, 4)]


def test_a_student_that_equals_its_teacher_learns_nothing_from_it() -> None:
    inputs, targets = _case(torch.float64)
    same = Taught(*(each.detach() for each in inputs), 1.0, 3.0)
    for found in _run(inputs, targets, budget=BUDGET, taught=same):
        assert float(found.detach().abs().max()) < 1e-12


@pytest.mark.parametrize("chunk", [None, 1, 4, 100])
@pytest.mark.parametrize("form", ["softmax", "sigmoid"])
def test_contrast_in_chunks_is_that_of_all_logits_and_of_groups_of_one(form: Any, chunk: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, others = (
        (3 * torch.randn(n, 4, dtype=torch.float64, generator=generator)).requires_grad_() for n in (5, 9)
    )
    groups = torch.tensor([0, 1, 2, 0, 7]), torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 5])
    weights = torch.arange(5, dtype=torch.float64) - 1.5
    found, expected = (
        contrast(rows, others, *groups, form=form, chunk=chunk),
        plain_contrast(rows, others, *groups, form),
    )
    torch.testing.assert_close(found, expected)
    got = torch.autograd.grad(found @ weights, (rows, others))
    torch.testing.assert_close(got, torch.autograd.grad(expected @ weights, (rows, others)))
    targets, logits = torch.tensor([4, 2, 0, 8, 1]), rows @ others.T
    alone = contrast(rows, others, targets, torch.arange(9), form=form, chunk=chunk)
    one_hot = F.one_hot(targets, 9).double()
    binary = F.binary_cross_entropy_with_logits(logits, one_hot, reduction="none").sum(1)
    whole = F.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(alone, whole if form == "softmax" else binary)


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
    for loss in LOSSES.values():
        found = loss(inputs, torch.full_like(targets, -100), budget=BUDGET)
        assert all(not tensor.any() for tensor in found)


def _shared(budgets: tuple[int | None, ...]) -> list[list[Tensor]]:
    """By budget, the loss and gradients of this rank's half of the vocabulary: of x, and of its rows of the weight."""
    inputs, targets = _case(torch.float64, bias=False)
    rank, half = torch.distributed.get_rank(), WORDS // 2
    own = [inputs[0], inputs[1].detach()[rank * half :][:half].clone().requires_grad_()]
    share = Share(torch.distributed.group.WORLD.group_name, rank * half, WORDS)
    return [_run(own, targets, smoothing=0.1, z_loss=0.02, budget=budget, share=share) for budget in budgets]


@pytest.mark.slow
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
