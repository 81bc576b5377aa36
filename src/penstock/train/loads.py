"""The load record of a run: filled from the mixtures' own counts, kept in checkpoints, written beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.boundary.files import own_file, write_text
from penstock.models.experts import MixtureOfExperts
from penstock.parallel import ParallelDims
from penstock.parallel.data import add_up_all
from penstock.planner.loads import LoadRecord, count_sum, imbalance
from penstock.planner.loads_page import loads_page


class LoadMeter:
    """Counts of a model's mixtures over all ranks and all steps of a run, which `add_up` adds up, in place, over ranks
    that route other tokens. `labels` name the labels of samples, where the model counts by label. All ranks must call
    `read` and `close_window` alike; both wait for the device."""

    def __init__(
        self,
        model: nn.Module,
        dims: ParallelDims,
        add_up: Callable[[list[Tensor]], None],
        labels: Sequence[str] = (),
    ) -> None:
        named = {name: each for name, each in model.named_modules() if isinstance(each, MixtureOfExperts)}
        self._mixtures = list(named.values())
        self._dims, self._add_up = dims, add_up
        self._device = next(model.parameters()).device
        count = max((mixture.labels for mixture in self._mixtures), default=0)
        names = tuple(labels) if len(labels) == count else tuple(map(str, range(count)))
        zero = tuple(((0,) * mixture.experts,) * max(1, count) for mixture in self._mixtures)
        self._before = LoadRecord(tuple(named), names, zero)
        """The counts that the mixtures no longer hold themselves."""

    def __bool__(self) -> bool:
        """Whether the model has mixtures."""
        return bool(self._mixtures)

    @torch.no_grad()
    def read(self) -> LoadRecord:
        """The record up to now."""
        sums = [self._visits_here(mixture) for mixture in self._mixtures]
        self._add_up(sums)
        if sums and self._dims.degree("pp") > 1:
            add_up_all(sums, self._dims.group("pp"))
        before = self._before
        counts = tuple(count_sum([old, new.tolist()], old) for old, new in zip(before.counts, sums))
        return LoadRecord(before.layers, before.labels, counts, before.windows)

    def close_window(self, step: int) -> list[float]:
        """End a window at `step`: the largest load over the mean one in it, of each layer."""
        record = self.read()
        worst = [imbalance(row) for row in record.last]
        self._before = record.closed(step)
        self._clear()
        return worst

    def state(self) -> Mapping[str, Any] | None:
        """The record in the form that checkpoints keep; None without mixtures."""
        return self.read().to_dict() if self else None

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Restore the record of `state`; None is of a checkpoint without a record, after which counting starts at 0.

        Raises:
            ValueError: it is the record of another model.
        """
        fresh = self._before
        empty = tuple(tuple((0,) * len(row) for row in layer) for layer in fresh.counts)
        before = LoadRecord(fresh.layers, fresh.labels, empty) if state is None else LoadRecord.of_dict(state)
        shapes = [
            (r.layers, r.labels, [[len(row) for row in layer] for layer in r.counts]) for r in (before, fresh)
        ]
        if shapes[0] != shapes[1]:
            raise ValueError("its record of experts' loads is of other layers, labels or experts")
        self._before = before
        self._clear()

    def write(self, output: Path) -> None:
        """Write the record and its page into the folder `experts` of a run's output, on the main rank."""
        record = self.read()
        if self and self._dims.main:
            write_text(own_file(output, "experts/loads.json"), record.to_json())
            write_text(own_file(output, "experts/loads.html"), loads_page(record))

    def _visits_here(self, mixture: MixtureOfExperts) -> Tensor:
        """A copy of the visits here, none of a mixture that is on another stage of a pipeline."""
        visits: Tensor | None = mixture.visits
        if visits is None:
            shape = max(1, mixture.labels), mixture.experts
            return torch.zeros(shape, dtype=torch.int64, device=self._device)
        return visits.clone()

    def _clear(self) -> None:
        for mixture in self._mixtures:
            visits: Tensor | None = mixture.visits
            if visits is not None:
                visits.zero_()
