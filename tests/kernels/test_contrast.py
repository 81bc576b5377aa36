"""The contrast of vectors in chunks against all logits at once, and against what it is for groups of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from penstock.kernels.contrast import contrast, plain_contrast

GROUPS, OTHERS = torch.tensor([0, 1, 2, 0, 7]), torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 5])


def _vectors() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows, others = (3 * torch.randn(n, 4, dtype=torch.float64, generator=generator) for n in (5, 9))
    return rows.requires_grad_(), others.requires_grad_()


@pytest.mark.parametrize("form", ["softmax", "sigmoid"])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_chunks_give_the_loss_and_the_gradients_of_all_logits(form: Any, chunk: int) -> None:
    rows, others = _vectors()
    weights = torch.arange(5, dtype=torch.float64) - 1.5
    found = contrast(rows, others, GROUPS, OTHERS, form=form, chunk=chunk)
    expected = plain_contrast(rows, others, GROUPS, OTHERS, form)
    torch.testing.assert_close(found, expected)
    got = torch.autograd.grad(found @ weights, (rows, others))
    torch.testing.assert_close(got, torch.autograd.grad(expected @ weights, (rows, others)))


@pytest.mark.parametrize("chunk", [None, 3])
def test_groups_of_one_are_found_by_cross_entropy(chunk: int | None) -> None:
    rows, others = _vectors()
    targets = torch.tensor([4, 2, 0, 8, 1])
    found = contrast(rows, others, targets, torch.arange(9), chunk=chunk)
    torch.testing.assert_close(found, F.cross_entropy(rows @ others.T, targets, reduction="none"))
    found = contrast(rows, others, targets, torch.arange(9), form="sigmoid", chunk=chunk)
    same = F.one_hot(targets, 9).double()
    expected = F.binary_cross_entropy_with_logits(rows @ others.T, same, reduction="none").sum(1)
    torch.testing.assert_close(found, expected)
