"""Top-1, top-5 and loss are those of all samples, however they are batched."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock.data import Batch
from penstock.tasks import ImageClassification
from penstock.train.evaluate import evaluate

TASK = ImageClassification()


def batches(images: torch.Tensor, targets: torch.Tensor, size: int) -> list[Batch]:
    return [
        Batch(i, t, np.arange(len(t))) for i, t in zip(images.split(size), targets.split(size), strict=True)
    ]


def test_the_last_short_batch_counts_by_its_samples() -> None:
    model = nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.5))
    images, targets = torch.randn(23, 6), torch.randint(9, (23,))
    state = torch.get_rng_state()
    found = evaluate(TASK, model, batches(images, targets, 10))
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    logits = model[0](images)
    order = logits.argsort(dim=1, descending=True)
    assert found.samples == 23
    assert found.top1 == pytest.approx((order[:, 0] == targets).float().mean().item())
    assert found.top5 == pytest.approx((order[:, :5] == targets[:, None]).any(1).float().mean().item())
    assert found.loss == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-6)
    assert found.top1 < found.top5 < 1


def test_fewer_than_five_classes() -> None:
    found = evaluate(TASK, nn.Identity(), batches(torch.eye(3), torch.tensor([0, 1, 0]), 2))
    assert (found.top1, found.top5) == (pytest.approx(2 / 3), 1.0)


def test_a_model_in_evaluation_mode_stays_there() -> None:
    model = nn.Linear(2, 2).eval()
    evaluate(TASK, model, batches(torch.randn(2, 2), torch.tensor([0, 1]), 2))
    assert not model.training


def test_nothing_to_evaluate_is_said() -> None:
    with pytest.raises(ValueError, match="nothing to evaluate"):
        evaluate(TASK, nn.Identity(), [])
