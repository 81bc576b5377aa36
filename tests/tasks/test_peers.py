"""The contrast of vectors that tasks share, on one rank; those of several ranks are in `test_ranks`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.tasks import peers
from penstock.tasks.peers import Peers


def _with_gradients(rows: Tensor, others: Tensor, groups: Tensor, form: str) -> tuple[Tensor, ...]:
    rows, others = (each.clone().requires_grad_() for each in (rows, others))
    loss = Peers().contrast(rows, others, groups, form)  # type: ignore[arg-type]
    return loss, *torch.autograd.grad(loss, (rows, others))


@pytest.mark.parametrize("chunk", [4096, 3])
def test_contrast_finds_each_row_among_the_others_and_back(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "CHUNK", chunk)
    first, second = torch.randn(2, 8, 5, dtype=torch.float64)
    alone = torch.arange(8)
    rows, others = (each.clone().requires_grad_() for each in (first, second))
    logits = rows @ others.T
    expected = (F.cross_entropy(logits, alone) + F.cross_entropy(logits.T, alone)) / 2
    found = _with_gradients(first, second, alone, "softmax")
    torch.testing.assert_close(found, (expected, *torch.autograd.grad(expected, (rows, others))))
    logits = (first @ second.T).detach()
    signs = 2.0 * torch.eye(8, dtype=torch.float64) - 1.0
    pairs = _with_gradients(first, second, alone, "sigmoid")[0]
    torch.testing.assert_close(pairs, F.softplus(-signs * logits).sum(1).mean())
    # Samples of one group are no negatives of each other.
    groups = alone // 2
    own = (logits.view(8, 4, 2).mean(2)).gather(1, groups[:, None])[:, 0]
    back = (logits.T.reshape(8, 4, 2).mean(2)).gather(1, groups[:, None])[:, 0]
    both = (logits.logsumexp(1) - own + logits.T.logsumexp(1) - back).mean() / 2
    torch.testing.assert_close(_with_gradients(first, second, groups, "softmax")[0], both)
