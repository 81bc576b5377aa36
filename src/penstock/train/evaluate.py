"""The metrics of a whole split, with one wait for the device at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.models.anatomy import evaluating
from penstock.parallel import ALONE, ParallelDims
from penstock.parallel.agree import add_up, slowest
from penstock.tasks import Task
from penstock.tasks.class_counts import ClassCounts


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The task's metrics over a split, which are attributes too: `evaluation.top1`."""

    samples: int
    metrics: Mapping[str, float]
    counts: ClassCounts | None = field(default=None, compare=False)
    """Counts by class, which records do not hold."""

    def __getattr__(self, name: str) -> float:
        if name not in Evaluation.__slots__ and name in self.metrics:
            return self.metrics[name]
        raise AttributeError(f"This evaluation has no {name!r}. It has samples, {', '.join(self.metrics)}.")

    def record(self) -> dict[str, Any]:
        """All numbers by name, as they are logged and stored."""
        return {"samples": self.samples, **self.metrics}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Evaluation:
        """The evaluation whose `record` this is."""
        return cls(record["samples"], {name: value for name, value in record.items() if name != "samples"})


@torch.no_grad()
def evaluate(
    task: Task,
    model: nn.Module,
    batches: Iterable[Any],
    *,
    dims: ParallelDims = ALONE,
    rounds: int = 0,
    blank: tuple[Any, ...] | None = None,
) -> Evaluation:
    """Evaluate `model` in evaluation mode, and leave it in the mode it was found in.

    Draws no random number, so training goes on as if nothing had been. Each rank of `dims` evaluates its own batches,
    and all get the result of all. A sharded model can only run on all ranks at once: a rank whose batches end before
    `rounds` runs it on `blank`, arguments for one sample of nothing, and throws the outputs away.
    """
    samples = batches_done = 0
    totals: Tensor | None = None
    with evaluating(model):
        for batch in batches:
            batches_done += 1
            sums = task.assess(model, batch)
            totals = sums if totals is None else totals + sums
            samples += len(batch)
        for _ in range(rounds - batches_done):
            assert blank is not None
            task.accompany(model, blank)
    own_sums = torch.zeros(0, dtype=torch.float64) if totals is None else totals
    # A rank that had no batch learns from the others how many sums there are.
    own_sums = F.pad(own_sums, (0, int(slowest(len(own_sums), dims)) - len(own_sums)))
    count = own_sums.new_tensor([samples])  # exact to 2^53
    device = next((tensor.device for tensor in blank or () if isinstance(tensor, Tensor)), own_sums.device)
    *sums_of_all, samples_of_all = add_up(torch.cat([own_sums, count]).to(device), dims).tolist()
    samples = int(samples_of_all)
    if not samples:
        raise ValueError("There is nothing to evaluate: the split has no batches.")
    return Evaluation(samples, task.metrics(samples, sums_of_all), task.class_counts(sums_of_all))
