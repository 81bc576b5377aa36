"""Messages between the stages of a pipeline: tensors whose shapes both ends know, in a fixed order per pair of ranks.

The type of tensors at a boundary is sent once, before the first tensors; it does not change.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor, distributed

from penstock.containers import replaced, tensors
from penstock.dtypes import FLOATS
from penstock.parallel.dims import ParallelDims

_MOST = 8
"""Most tensors in transfer at a time."""


class Links:
    """This rank's transfers within one step. It waits for a tensor only when that is used, or in `finish`."""

    def __init__(
        self, dims: ParallelDims, device: torch.device,
        types: dict[tuple[int, bool], torch.dtype] | None = None,
    ) -> None:  # fmt: skip
        self._group, self._place = dims.group("pp"), dims.place()["pp"]
        self._device = device
        self._types = {} if types is None else types
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._coming: dict[int, Any] = {}

    def send(self, boundary: int, to: int, values: tuple[Tensor, ...]) -> None:
        """Send activations over the boundary after stage `boundary` to the rank at pipeline coordinate `to`."""
        key = (boundary, True)
        if values and key not in self._types:
            self._types[key] = values[0].dtype
            number = torch.tensor([FLOATS.index(values[0].dtype)], device=self._device)
            self._post(number, to)
        for value in values:
            self._post(value, to)

    def send_back(self, to: int, values: tuple[Tensor, ...]) -> None:
        """Send gradients to the rank at pipeline coordinate `to`."""
        for value in values:
            self._post(value, to)

    def receive(self, boundary: int, source: int, shapes: list[torch.Size]) -> tuple[Tensor, ...]:
        """Tensors that will receive the activations from the boundary after stage `boundary`: see `wait`."""
        key = (boundary, False)
        if not shapes:
            return ()
        if key not in self._types:
            number = torch.zeros(1, dtype=torch.int64, device=self._device)
            distributed.recv(number, group=self._group, group_src=source)
            self._types[key] = FLOATS[int(number)]
        return self._receive(source, shapes, self._types[key])

    def receive_back(self, source: int, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Tensors that will receive the gradients of tensors that were sent."""
        return self._receive(source, [value.shape for value in like], like[0].dtype)

    def wait(self, values: tuple[Tensor, ...]) -> None:
        """Wait until these received tensors are complete."""
        for value in values:
            work = self._coming.pop(id(value), None)
            if work is not None:
                work.wait()

    def finish(self) -> None:
        """Wait until all sent tensors have left."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def everywhere(self, outputs: Any, source: int) -> Any:
        """Copy the outputs of the rank at pipeline coordinate `source` to all ranks: any nest of tensors."""
        is_source = self._place == source
        described: list[Any] = [replaced(outputs, lambda t: t.detach().to("meta")) if is_source else None]
        distributed.broadcast_object_list(described, group=self._group, group_src=source)
        if not is_source:
            outputs = replaced(described[0], lambda t: torch.empty_like(t, device=self._device))
        for tensor in tensors(outputs):
            value = tensor.detach().contiguous() if is_source else tensor
            distributed.broadcast(value, group=self._group, group_src=source)
        return outputs

    def _post(self, value: Tensor, to: int) -> None:
        value = value.detach().contiguous()
        self._sent.append((distributed.isend(value, group=self._group, group_dst=to), value))
        # Sent tensors stay in memory until they are waited for. The order of a schedule's transfers lets every wait
        # end.
        if len(self._sent) > _MOST:
            self._sent.popleft()[0].wait()

    def _receive(self, source: int, shapes: list[torch.Size], dtype: torch.dtype) -> tuple[Tensor, ...]:
        values = tuple(torch.empty(shape, dtype=dtype, device=self._device) for shape in shapes)
        for value in values:
            self._coming[id(value)] = distributed.irecv(value, group=self._group, group_src=source)
        return values
