"""The loss of a student over a vocabulary in chunks: held to the plain form, and that to the formula, both ways."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels import linear_cross_entropy as module
from penstock.kernels.distil import Taught
from penstock.kernels.linear_cross_entropy import linear_cross_entropy

ROWS, WIDTH, TEACHERS, WORDS = 19, 12, 20, 30
BUDGET = 4 * 8 * WORDS * 8
"""Eight rows of fp32 beside a teacher's."""


def _case(dtype: torch.dtype, *, bias: bool = True) -> tuple[list[Tensor], Tensor, Taught]:
    torch.manual_seed(0)
    shapes = [(ROWS, WIDTH), (WORDS, WIDTH), *([(WORDS,)] if bias else [])]
    inputs = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    targets = torch.randint(0, WORDS, (ROWS,))
    targets[::5] = -100
    x, weight = (torch.randn(rows, TEACHERS).to(dtype) for rows in (ROWS, WORDS))
    return inputs, targets, Taught(x, weight, torch.randn(WORDS).to(dtype) if bias else None, 0.3, 2.5)


def _run(
    inputs: list[Tensor], targets: Tensor, taught: Taught, budget: int | None, smoothing: float = 0.1
) -> list[Tensor]:
    x, weight, *bias = inputs
    loss = linear_cross_entropy(
        x, weight, bias[0] if bias else None, targets, smoothing=smoothing, budget=budget, taught=taught
    )
    return [loss.detach(), *torch.autograd.grad(loss * 0.7, inputs)]


@pytest.mark.parametrize("budget", [1, BUDGET, 1 << 30])
@pytest.mark.parametrize(("bias", "padded"), [(False, False), (True, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chunks_equal_the_plain_form(
    dtype: torch.dtype, bias: bool, padded: bool, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PADDED_ON", {"cpu"} if padded else set())
    case = _case(dtype, bias=bias)
    expected, found = _run(*case, None), _run(*case, budget)
    assert len(found) == len(case[0]) + 1
    for one, other in zip(found, expected, strict=True):
        scale = float(other.abs().max())
        torch.testing.assert_close(one / scale, other / scale, rtol=0.0, atol=1e-6)


def test_the_plain_form_is_the_formula() -> None:
    (x, weight, bias), targets, taught = _case(torch.float64)
    assert taught.bias is not None
    p, q = x @ weight.T + bias, taught.x @ taught.weight.T + taught.bias
    logs, smooth = p.log_softmax(1), 0.1
    counted = targets != -100
    hard = -(1 - smooth) * logs[counted, targets[counted]] - smooth / WORDS * logs[counted].sum(1)
    meant = (q / 2.5).softmax(1)
    apart = (meant * (meant.log() - (p / 2.5).log_softmax(1))).sum(1)[counted]
    loss = 0.7 * hard.sum() + 0.3 * 2.5**2 * apart.sum()
    expected = [loss.detach(), *torch.autograd.grad(loss * 0.7, [x, weight, bias])]
    for one, other in zip(_run([x, weight, bias], targets, taught, None), expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_fp32(dtype: torch.dtype) -> None:
    inputs, targets, taught = _case(dtype)
    wide = [tensor.detach().float().requires_grad_() for tensor in inputs]
    assert taught.bias is not None
    exact = _run(
        wide, targets, Taught(*(t.float() for t in (taught.x, taught.weight, taught.bias)), 0.3, 2.5), None
    )
    for one, other in zip(_run(inputs, targets, taught, BUDGET), exact, strict=True):
        # Logits of 8 to 11 bits, some of 10: measured 0.012 in bf16 and 0.002 in fp16.
        assert float(((one.float() - other).norm() / other.norm()).detach()) < 0.03


def test_no_chunk_holds_more_rows_than_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for says how many rows, of student and teacher alike, are there at one time."""
    rows: list[tuple[int, int]] = []
    made = module.divergences_and_gradients

    def note(logits: Tensor, taught: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        rows.append((len(logits), len(taught)))
        return made(logits, taught, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "divergences_and_gradients", note)
    _run(*_case(torch.float32), BUDGET)
    assert rows == [(7, 7), (7, 7), (5, 5)]


def test_a_student_that_equals_its_teacher_learns_nothing_from_it() -> None:
    (x, weight, bias), targets, _ = _case(torch.float64)
    same = Taught(x.detach(), weight.detach(), bias.detach(), 1.0, 3.0)
    for found in _run([x, weight, bias], targets, same, BUDGET):
        assert float(found.detach().abs().max()) < 1e-12
