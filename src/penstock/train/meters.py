"""Meters that gather on the device: the part of each head in the loss and in the gradients, and the loads of experts,
which are kept in checkpoints and written beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from penstock.boundary.files import own_file, write_text
from penstock.models.experts import MixtureOfExperts
from penstock.models.model import Model
from penstock.parallel import ParallelDims
from penstock.parallel.agree import add_up, average
from penstock.parallel.data import add_up_all
from penstock.planner.loads import LoadRecord, count_sum, imbalance
from penstock.planner.loads_page import loads_page
from penstock.tasks import Task


class HeadMeter:
    """Gathers on the device; reading it is one transfer, for which all ranks meet."""

    def __init__(self, model: Any, task: Task, dims: ParallelDims, device: torch.device) -> None:
        graph = getattr(model, "graph", None)
        names = [] if graph is None else [head.name for head in graph.heads]
        self.names = [name for name in task.losses if name in names]
        self._places = [task.losses.index(name) for name in self.names]
        self._dims, self._device, self._steps = dims, device, 0
        self._losses = torch.zeros(len(task.losses), device=device)
        self._model = model if self.names and isinstance(model, Model) else None
        if self._model is not None:
            self._model.head_squares = {}

    def add(self, parts: Tensor | None) -> None:
        """Note the parts of a step's loss. Waits for nothing."""
        if parts is not None:
            self._losses += parts.to(self._losses.dtype)
            self._steps += 1

    def read(self) -> dict[str, dict[str, float]]:
        """By head, the mean of its weighted `loss`, and as `gradient` its share of the squares of all gradients that
        heads send back into the model. Forgets them. Waits for the device."""
        if not self.names or not self._steps:
            return {}
        losses = average(self._losses / self._steps, self._dims)
        head_squares = self._losses.new_zeros(len(self.names))
        if self._model is not None:
            squares = self._model.head_squares or {}
            for place, name in enumerate(self.names):
                if name in squares:
                    head_squares[place] = squares[name]
            self._model.head_squares = {}
        head_squares = add_up(head_squares, self._dims)
        if self._dims.pp > 1:  # heads are on the last stage
            distributed.all_reduce(head_squares, group=self._dims.group("pp"))
        shares = head_squares / head_squares.sum().clamp(min=torch.finfo(head_squares.dtype).tiny)
        columns = torch.stack([losses[self._places], shares]).tolist()
        self._losses.zero_()
        self._steps = 0
        return {name: {"loss": loss, "gradient": share} for name, loss, share in zip(self.names, *columns)}


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
