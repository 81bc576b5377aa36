"""Top-1, top-5 and loss over a whole split, with one wait for the device at the end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.parallel import ALONE, ParallelDims
from penstock.parallel.agree import add_up


class Labelled(Protocol):
    """What evaluation needs of a batch."""

    @property
    def images(self) -> Tensor: ...
    @property
    def targets(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Shares in [0, 1] of samples whose class is the best, or among the five best; mean cross-entropy in
    nats."""

    samples: int
    top1: float
    top5: float
    loss: float


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Labelled],
    *,
    dims: ParallelDims = ALONE,
    rounds: int = 0,
    blank: Tensor | None = None,
) -> Evaluation:
    """Evaluate `model` in evaluation mode, and leave it in the mode it was found in.

    Targets are class numbers, (B,) int64. Draws no random number, so training goes on as if nothing had been.
    With fewer than five classes, top-5 counts as many as there are. The ranks of `dims` evaluate each their batches,
    and all get the result of all. A sharded model can only run on all ranks at once: a rank whose batches end before
    `rounds` runs it on `blank`, one image, and throws the output away.
    """
    training = model.training
    model.eval()
    samples = seen = 0
    totals: Tensor | None = None
    try:
        for batch in batches:
            seen += 1
            logits = model(batch.images).float()  # (B, classes)
            best = logits.topk(min(5, logits.shape[1]), dim=1).indices  # (B, 5)
            hits = best == batch.targets[:, None]
            loss = F.cross_entropy(logits, batch.targets, reduction="sum")
            sums = torch.stack([hits[:, 0].sum(), hits.sum()]).double()
            sums = torch.cat([sums, loss.double()[None]])
            totals = sums if totals is None else totals + sums
            samples += len(batch.targets)
        for _ in range(rounds - seen):
            model(blank)
    finally:
        model.train(training)
    device = totals.device if totals is not None else blank.device if blank is not None else "cpu"
    counted = torch.tensor([samples], dtype=torch.float64, device=device)  # exact to 2^53
    own = torch.zeros(3, dtype=torch.float64, device=device) if totals is None else totals
    top1, top5, loss_sum, every = add_up(torch.cat([own, counted]), dims).tolist()
    samples = int(every)
    if not samples:
        raise ValueError("There is nothing to evaluate: the split has no batches.")
    return Evaluation(samples, top1 / samples, top5 / samples, loss_sum / samples)
