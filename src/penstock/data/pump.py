"""Background reading: a thread that stays a few batches of host memory ahead of the training loop."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.data.source import Pixels, Reading, Source


class Reader(Protocol):
    """Reads requests in the order they were submitted."""

    def submit(self, indices: NDArray[np.int64]) -> None: ...

    def receive(self) -> tuple[Pixels, Reading]:
        """The oldest request's images and labels. The pixels are only valid until the next call."""
        ...

    def discard(self) -> None:
        """Drop what was submitted and not received."""
        ...

    def abort(self) -> None:
        """Release a thread that waits in `receive`. Called from another thread."""
        ...

    def close(self) -> None:
        """End. Nobody may be using the reader."""
        ...


class InProcess:
    """Reads in the calling thread."""

    def __init__(self, source: Source, batch: int) -> None:
        self._source = source
        self._pending: list[NDArray[np.int64]] = []
        self._room = np.empty((batch, source.size, source.size, source.channels), np.uint8)

    def submit(self, indices: NDArray[np.int64]) -> None:
        self._pending.append(indices)

    def receive(self) -> tuple[Pixels, Reading]:
        indices = self._pending.pop(0)
        out = self._room[: len(indices)]
        return out, self._source.read_into(indices, out)

    def discard(self) -> None:
        self._pending.clear()

    def abort(self) -> None:
        pass  # an image is read to its end

    def close(self) -> None:
        self.discard()


@dataclass(frozen=True, slots=True)
class HostBatch:
    """A batch in host memory, pinned where it goes to a GPU."""

    images: Tensor
    """(B, size, size, C) uint8"""
    labels: Tensor
    """(B,) int64"""
    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    bad: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Request:
    """The content of a batch: sample numbers, and their positions in the stream."""

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]


class Pump:
    """A thread that passes requests to a reader, and puts what it read into a bounded queue, in order.

    It has no reference to the Loader, so that a Loader without users is collected, and stops its pump.
    """

    def __init__(self, reader: Reader, requests: Iterator[Request], *, depth: int, pin: bool) -> None:
        self._reader = reader
        self._requests = requests
        self._depth = depth
        self._pin = pin
        self._queue: queue.Queue[HostBatch | BaseException | None] = queue.Queue(maxsize=depth)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-data", daemon=True)
        self._thread.start()

    def get(self) -> HostBatch | None:
        """The next batch, or None at the end. Raises what the reader raised."""
        item = self._queue.get()
        if item is None or isinstance(item, BaseException):
            self._put(item)  # the next call gets the same answer
            if item is not None:
                raise item
            return None
        return item

    def halt(self) -> None:
        """Tell the thread to end, without waiting for it."""
        self._stopped.set()

    def stop(self) -> None:
        """End the thread, and drop what it had in flight. The reader can be used again."""
        self.halt()
        if threading.current_thread() is not self._thread:  # where the garbage collector may run as well
            self._thread.join()

    def _run(self) -> None:
        in_flight: list[Request] = []
        try:
            while not self._stopped.is_set():
                while len(in_flight) < self._depth and (request := next(self._requests, None)) is not None:
                    self._reader.submit(request.ids)
                    in_flight.append(request)
                if not in_flight:
                    self._put(None)
                    return
                pixels, reading = self._reader.receive()
                self._put(self._keep(in_flight.pop(0), pixels, reading))
        except BaseException as error:  # noqa: BLE001 - handed over whole to the consumer, who raises it
            self._put(error)
        finally:
            self._reader.discard()

    def _keep(self, request: Request, pixels: Pixels, reading: Reading) -> HostBatch:
        images = torch.empty(pixels.shape, dtype=torch.uint8, pin_memory=self._pin)
        np.copyto(images.numpy(), pixels)
        labels = torch.from_numpy(reading.labels)
        if self._pin:
            labels = labels.pin_memory()
        return HostBatch(images, labels, reading.ids, request.positions, reading.bad)

    def _put(self, item: HostBatch | BaseException | None) -> None:
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return
