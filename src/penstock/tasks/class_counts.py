"""How often each class was predicted for each true class: the sums behind all classification metrics.

Shapes: B samples, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.tasks.scores import Sums

MOST_CLASSES = 1024
"""Most classes for a confusion matrix, whose size is their square."""


@dataclass(frozen=True, slots=True)
class ClassCounts:
    """Counts of samples by class, (C,) each."""

    right: Sums
    predicted: Sums
    true: Sums
    confusion: Sums | None = None
    """(C, C) samples by true class (row) and predicted class (column); None for more than `MOST_CLASSES`."""

    def record(self) -> dict[str, list[int]]:
        """The counts without the matrix, for JSON: the fields of `ClassCounts` by name."""
        names = ("right", "predicted", "true")
        return {name: getattr(self, name).astype(int).tolist() for name in names}

    def table(self, names: Sequence[str] = ()) -> list[dict[str, Any]]:
        """A row for each class: `name`, `samples`, `predicted`, `right`, `precision`, `recall` and `f1`. A share over
        no samples is None."""
        rows = zip(self.right.tolist(), self.predicted.tolist(), self.true.tolist(), strict=True)
        return [
            {
                "name": names[number] if names else str(number),
                "samples": int(true),
                "predicted": int(predicted),
                "right": int(right),
                "precision": right / predicted if predicted else None,
                "recall": right / true if true else None,
                "f1": 2 * right / (predicted + true) if predicted + true else None,
            }
            for number, (right, predicted, true) in enumerate(rows)
        ]


def count_sums(predicted: Tensor, true: Tensor, classes: int) -> Tensor:
    """A batch's contribution, (1 + K,) float64, from predicted and true classes (B,): the number of samples in the
    confusion matrix, and the matrix; or 0, and how often each class was right, predicted and true. Negative targets
    do not count."""
    counted = true >= 0
    predicted, true = predicted[counted], true[counted]
    if classes <= MOST_CLASSES:
        matrix = torch.bincount(true * classes + predicted, minlength=classes * classes)
        return torch.cat([matrix.sum()[None], matrix]).double()
    counts = [
        torch.bincount(which, minlength=classes) for which in (true[predicted == true], predicted, true)
    ]
    return torch.cat([counts[0].new_zeros(1), *counts]).double()


def read_counts(sums: Sequence[float]) -> ClassCounts:
    """The counts from a sum of `count_sums`."""
    in_matrix, values = sums[0], np.array(sums[1:])
    if not in_matrix:
        return ClassCounts(*values.reshape(3, -1))
    confusion = values.reshape(math.isqrt(len(values)), -1)
    return ClassCounts(confusion.diagonal(), confusion.sum(axis=0), confusion.sum(axis=1), confusion)
