"""The part of each of a model's heads in the loss and in the gradients, since the last log."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed

from penstock.models.model import Model
from penstock.parallel import ParallelDims
from penstock.parallel.agree import add_up, average
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
