"""Activations wait in host memory: the tensors that a block saves for its backward pass go there while the next block
computes, and come back during the backward pass of the block after it (Rajbhandari et al., "ZeRO-Infinity", SC 2021,
section 5.2).

The device keeps the saved tensors of two blocks, and all of the last one, whose backward pass comes first. Weights stay
too: they are not activations. Copies run on separate streams; memory is freed only after a copy's end, so that the
device's allocator needs to know one stream only.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.errors import ConfigError
from penstock.models.anatomy import anatomy_of
from penstock.models.wrap import Around, put_around
from penstock.optim.tensors import local
from penstock.products.eight_bits import Fp8Linear

LEAST_BYTES = 1 << 16
"""Smaller tensors stay on the device: a copy costs more than it frees."""
ON_DEVICE = 2
"""Blocks whose activations are on the device during the forward pass: the one that computes, and the previous one,
whose copy is in progress."""


def offload_blocks(model: nn.Module, device: torch.device, *, keep_last: bool = True) -> None:
    """Keep the activations of each block in host memory, in place. Results stay bit-identical.

    With `keep_last` the last block's activations stay on the device, which is best if its backward pass comes next.
    Raises ConfigError if the blocks of a foreign model cannot be found.
    """
    blocks = [block for stack in anatomy_of(model).stacks for block in stack.blocks]
    transfers = Transfers(device, LEAST_BYTES)
    for number, block in enumerate(blocks):
        module = model.get_submodule(block.name)
        last = keep_last and number == len(blocks) - 1
        put_around(module, _Offloaded(module, transfers, first=number == 0, last=last))


class Transfers:
    """Copies between a device and its host, for all blocks of a model."""

    def __init__(self, device: torch.device, least_bytes: int) -> None:
        # With its number too, as in tensors' devices.
        self.device, self.least_bytes = torch.empty(0, device=device).device, least_bytes
        self.last: _Shelf | None = None
        """Shelf of the previous block in this pass."""
        self.on_device: deque[_Shelf] = deque()
        """Shelves whose tensors are still on the device, oldest first."""
        self._streams: dict[str, torch.cuda.Stream] = {}

    def __deepcopy__(self, memo: Any) -> Transfers:
        return Transfers(self.device, self.least_bytes)  # streams cannot be copied, and belong to no model

    def __reduce__(self) -> Any:
        return Transfers, (self.device, self.least_bytes)

    def aside(self, name: str) -> AbstractContextManager[Any]:
        """Run work inside on a separate stream, after all work queued so far."""
        if self.device.type != "cuda":
            return nullcontext()
        if name not in self._streams:
            self._streams[name] = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream = self._streams[name]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(stream)

    def mark(self) -> torch.cuda.Event | None:
        """An event at the end of the work that the current stream has queued so far."""
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None

    def wait(self, mark: torch.cuda.Event | None) -> None:
        """Make the current stream wait for the event; the host does not wait."""
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def make_room(self, shelves: int) -> None:
        """Free the device memory of all but the newest shelves."""
        while len(self.on_device) > shelves:
            self.on_device.popleft().let_go()


class _SavedTensor:
    """A tensor that the backward pass needs: on the device, in host memory, or both."""

    def __init__(self, tensor: Tensor, shelf: _Shelf) -> None:
        once = tensor.detach()
        for dim, step in enumerate(tensor.stride()):
            if step == 0 and tensor.shape[dim] > 1:  # expanded, so that one is enough
                once = once.narrow(dim, 0, 1)
        self.device_tensor: Tensor | None = once
        self.shape = tensor.shape
        self.version = tensor._version
        self.host: Tensor | None = None
        self.shelf = shelf


class _Shelf:
    """The tensors that one block saves in one pass. It lives as long as the backward pass needs any of them."""

    def __init__(self, transfers: Transfers, before: _Shelf | None, weights: set[int]) -> None:
        self.transfers, self.weights = transfers, weights
        self.before = None if before is None else weakref.ref(before)
        self.saved: list[weakref.ref[_SavedTensor]] = []
        self.by_place: dict[Any, weakref.ref[_SavedTensor]] = {}
        """Saved tensors by memory location, so that a tensor saved by several operators is copied once."""
        self.copied_away: torch.cuda.Event | None = None
        self.copied_back: torch.cuda.Event | None = None
        self.away = False

    def pack(self, tensor: Tensor) -> Tensor | _SavedTensor:
        """Replace a tensor that autograd saves; a tensor that stays on the device is returned unchanged."""
        memory = tensor.untyped_storage().data_ptr()
        small = tensor.nbytes < self.transfers.least_bytes
        if small or tensor.device != self.transfers.device or memory in self.weights:
            return tensor
        key = (memory, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        earlier = self.by_place.get(key)
        saved = None if earlier is None else earlier()
        if saved is None:
            saved = _SavedTensor(tensor, self)
            self.saved.append(weakref.ref(saved))
            self.by_place[key] = self.saved[-1]
        return saved

    def _alive(self) -> list[_SavedTensor]:
        return [saved for reference in self.saved if (saved := reference()) is not None]

    def send(self) -> None:
        """Start copying the shelf's tensors to the host."""
        self.by_place.clear()
        pinned = self.transfers.device.type == "cuda"
        with self.transfers.aside("away"):
            for saved in self._alive():
                assert saved.device_tensor is not None
                if saved.device_tensor._version != saved.version:
                    raise ConfigError(
                        f"A tensor {tuple(saved.device_tensor.shape)} that the backward pass needs was changed in "
                        "place, so it cannot wait in host memory; use plan.offload=none."
                    )
                saved.host = _memory_like(saved.device_tensor, torch.device("cpu"), pinned)
                saved.host.copy_(saved.device_tensor, non_blocking=True)
            self.copied_away = self.transfers.mark()
        self.transfers.on_device.append(self)

    def let_go(self) -> None:
        """Free the device's memory after the copy's end."""
        self.transfers.wait(self.copied_away)
        for saved in self._alive():
            if saved.host is not None:
                saved.device_tensor = None
        self.away = True

    def fetch(self) -> None:
        """Start copying the shelf's tensors back, if they are on the host."""
        if not self.away:
            return
        self.away = False
        coming: list[tuple[Tensor, Tensor]] = []
        for saved in self._alive():
            if saved.device_tensor is None and saved.host is not None:
                # Allocated on the computing stream, which reuses memory in its own order.
                saved.device_tensor = _memory_like(saved.host, self.transfers.device)
                coming.append((saved.device_tensor, saved.host))
                saved.host = None
        with self.transfers.aside("back"):
            self.transfers.wait(self.copied_away)
            for target, host in coming:
                target.copy_(host, non_blocking=True)
            self.copied_back = self.transfers.mark()

    def take(self, saved: _SavedTensor) -> Tensor:
        """A saved tensor for the backward pass; also starts copying the previous block's tensors back."""
        self.fetch()
        before = None if self.before is None else self.before()
        if before is not None:
            before.fetch()
        self.transfers.wait(self.copied_back)
        assert saved.device_tensor is not None
        return saved.device_tensor.expand(saved.shape)


class _Offloaded(Around):
    """A block's forward pass, with activations offloaded to host memory."""

    kind = "offload"

    def __init__(self, module: nn.Module, transfers: Transfers, *, first: bool, last: bool) -> None:
        super().__init__(module.forward)
        self.module, self.transfers, self.first, self.last = module, transfers, first, last

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        transfers = self.transfers
        weights = {local(p.detach()).untyped_storage().data_ptr() for p in self.module.parameters()}
        linears = (module for module in self.module.modules() if isinstance(module, Fp8Linear))
        weights |= {one.gathered[0].untyped_storage().data_ptr() for one in linears if one.gathered}
        transfers.make_room(ON_DEVICE - 1)
        shelf = _Shelf(transfers, None if self.first else transfers.last, weights)
        with saved_tensors_hooks(
            shelf.pack, lambda one: one if isinstance(one, Tensor) else one.shelf.take(one)
        ):
            out = self.forward(*args, **kwargs)
        transfers.last = shelf
        if not self.last:
            shelf.send()
        return out


def _memory_like(tensor: Tensor, device: torch.device, pinned: bool = False) -> Tensor:
    """Memory for a tensor on a device, with the same layout: attention kernels need rows of masks that begin at
    multiples of 16 bytes, so that odd rows have gaps. Elements that share memory get their own."""
    sides = sorted((step, size) for step, size in zip(tensor.stride(), tensor.shape) if size > 1)
    if any(low * size > high for (low, size), (high, _) in itertools.pairwise(sides)):
        return torch.empty_like(tensor, device=device, pin_memory=pinned)
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device, pin_memory=pinned
    )
