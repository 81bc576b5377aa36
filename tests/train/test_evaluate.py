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
    model = nn.Sequential(nn.Linear(6, 11), nn.Dropout(0.5))
    images, targets = torch.randn(23, 6), torch.randint(11, (23,))
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


@pytest.mark.parametrize("classes", [3, 10, 11])
def test_five_best_are_counted_of_more_than_ten_classes(classes: int) -> None:
    found = evaluate(TASK, nn.Identity(), batches(torch.eye(classes), torch.arange(classes), 2))
    assert ("top5" in found.metrics) == (classes > 10)
    assert ("top-5" in TASK.describe(found.metrics)) == (classes > 10)


@pytest.mark.parametrize("most", [1024, 2], ids=["matrix", "counts"])
def test_classes_are_counted_over_all_batches(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.tasks.class_counts.MOST_CLASSES", most)
    outputs = torch.eye(3)[[0, 1, 1, 2, 0]]
    found = evaluate(TASK, nn.Identity(), batches(outputs, torch.tensor([0, 1, 0, 0, 0]), 2))
    assert found.metrics == {"top1": pytest.approx(3 / 5), "loss": pytest.approx(found.loss)}
    assert found.counts is not None
    first, second, third = found.counts.table(("a", "b", "c"))
    assert first == {
        "name": "a", "samples": 4, "predicted": 2, "right": 2, "precision": 1.0, "recall": 0.5, "f1": 4 / 6,
    }  # fmt: skip
    assert (second["precision"], second["recall"]) == (0.5, 1.0)
    assert (third["samples"], third["precision"], third["recall"], third["f1"]) == (0, 0.0, None, 0.0)
    confusion = found.counts.confusion
    if most == 2:
        assert confusion is None
    else:
        assert confusion is not None
        assert confusion.tolist() == [[2, 1, 1], [0, 1, 0], [0, 0, 0]]


def test_a_model_in_evaluation_mode_stays_there() -> None:
    model = nn.Linear(2, 2).eval()
    evaluate(TASK, model, batches(torch.randn(2, 2), torch.tensor([0, 1]), 2))
    assert not model.training


def test_nothing_to_evaluate_is_said() -> None:
    with pytest.raises(ValueError, match="nothing to evaluate"):
        evaluate(TASK, nn.Identity(), [])
