"""Cross entropy that overwrites its logits, beside torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels import choices
from penstock.kernels import cross_entropy as kernel
from penstock.kernels.cross_entropy import cross_entropy


def _reference(logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)


def test_masked_entries_count_nothing() -> None:
    """Logits of -inf at the front, more than the kernel reads at a time."""
    logits = torch.full((2, 5_000), -torch.inf)
    logits[:, 4_000:4_003] = torch.tensor([1.0, 2.0, 3.0])
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    targets = torch.tensor([4_001, 4_002])
    cross_entropy(ours * 1.0, targets).backward()
    _reference(theirs, targets, 0.0).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("compiled", [False, True])
def test_columns_that_pad_a_product_are_no_words(compiled: bool) -> None:
    torch._dynamo.reset()
    loss_of = torch.compile(cross_entropy, backend="aot_eager", fullgraph=True) if compiled else cross_entropy
    made = torch.randn(11, 101)
    made[:, 97:] = 0
    ours, theirs = (made.clone().requires_grad_() for _ in range(2))
    targets = torch.arange(11)
    loss_of(ours * 1.0, targets, 0.1, 97).backward()
    _reference(theirs[:, :97], targets, 0.1).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_large_logits_neither_overflow_nor_vanish() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-3e38, 0.0, 1.0]])
    targets = torch.tensor([1, 2])
    found = []
    for loss_of in (cross_entropy, _reference):
        given = logits.clone().requires_grad_()
        loss = loss_of(given * 1.0, targets, 0.0)
        loss.backward()
        found.append((loss.detach(), given.grad))
    torch.testing.assert_close(*found)


def test_the_gradient_takes_the_place_of_the_logits() -> None:
    """Nothing else as large as they are is made."""
    made: list[Any] = []
    logits = (torch.randn(64, 50_000, dtype=torch.bfloat16).requires_grad_()) * 1.0
    logits.register_hook(made.append)
    cross_entropy(logits, torch.zeros(64, dtype=torch.int64), 0.1).backward()
    assert made[0].data_ptr() == logits.data_ptr()


def test_a_second_backward_pass_is_refused() -> None:
    logits = torch.randn(4, 9, requires_grad=True)
    loss = cross_entropy(logits * 1.0, torch.zeros(4, dtype=torch.int64))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="overwritten"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("target", [-1, 9])
def test_a_target_that_is_no_column_is_refused(target: int, dtype: torch.dtype) -> None:
    """The C++ kernel would write beside the logits; torch's form raises the same error."""
    with pytest.raises((IndexError, RuntimeError), match=r"Targets go from|out of bounds"):
        cross_entropy(torch.randn(4, 9, dtype=dtype), torch.tensor([0, kernel.IGNORED, target, 8]))


def test_without_gradients_the_logits_stay() -> None:
    logits = torch.randn(4, 9)
    before = logits.clone()
    found = cross_entropy(logits, torch.zeros(4, dtype=torch.int64))
    torch.testing.assert_close(found, _reference(before, torch.zeros(4, dtype=torch.int64), 0.0))
    assert torch.equal(logits, before)


@pytest.mark.gpu
def test_a_gpu_makes_little_besides_the_logits() -> None:
    """8,192 rows of 50,304 logits in bf16 are 786 MiB, and torch's loss makes 3 GiB of fp32 of them."""
    rows, columns = 8192, 50_304
    torch.manual_seed(0)
    given = torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda").requires_grad_()
    targets = torch.randint(columns, (rows,), device="cuda")
    targets[::7] = kernel.IGNORED
    theirs = _reference(given, targets, 0.1)
    (wanted,) = torch.autograd.grad(theirs, given)
    logits = given * 1.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ours = cross_entropy(logits, targets, 0.1)
    (found,) = torch.autograd.grad(ours, logits)
    assert torch.cuda.max_memory_allocated() - before < 5 * 4 * choices.LOSS_PIECE["cuda"]
    assert found.data_ptr() == logits.data_ptr()
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(found, wanted)
