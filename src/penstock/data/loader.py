"""The Loader: batches on the device, in the stream's order, read ahead in the background.

Host work (reading, decoding) runs in a thread or in processes. Copies and augmentation run on the device: on a GPU one
batch ahead on a stream of its own, so that they overlap the training step; on a CPU, where they would only take threads
from the step, when the batch is requested. The caller decides what a batch looks like.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.containers import tensors
from penstock.data.pool import Pool, Reader, SampleRequest
from penstock.data.sampler import Stream, padding_share
from penstock.data.source import ImageSource, Source, Tally
from penstock.errors import ConfigError, DataError

log = logging.getLogger(__name__)

DEPTH = 3
"""Batches read ahead."""


@dataclass(frozen=True, slots=True)
class HostBatch:
    """A batch as its source returns it, in host memory; pinned where it goes to a GPU."""

    samples: Any
    """A tensor (B, *the shape of a sample); where a sample has several fields, a dict of such tensors."""
    ids: NDArray[np.int64]
    """(B,) which samples of the source they are."""
    positions: NDArray[np.int64]
    """(B,) where in the stream they are."""
    bad: tuple[tuple[str, str], ...]
    """(path, why) of each sample that was replaced."""


class Loader:
    """Iterates over batches of `batch` samples for rank `rank` of `world`; `prepare` makes each from the samples that
    were read.

    With `endless` (training) it follows the shuffled stream from `position` and never stops. Without (evaluation) each
    `for` loop over it is one pass in order, in which the last batch may be short and a rank may get one batch less. For
    a source with `group_by_length`, the stream puts samples of similar length into the same `group` samples, the global
    batch of an optimizer step (0: the samples of one `next`). Close it, or use it in a `with`, to end its threads and
    processes early.

    Raises DataError for unreadable samples, when more than 1 % are bad, and when a reading process dies.
    """

    def __init__(
        self, source: Source, prepare: Callable[[HostBatch, torch.device], Any], *, batch: int, seed: int = 0,
        device: torch.device | str = "cpu", workers: int = 0, rank: int = 0, world: int = 1, position: int = 0,
        endless: bool = True, group: int = 0,
    ) -> None:  # fmt: skip
        _check(source, batch, workers, rank, world)
        self.source = source
        self.batch = batch
        self.seed = seed
        self.device = torch.device(device)
        self.rank, self.world = rank, world
        self.endless = endless
        self.position = position
        """Samples of the stream consumed so far, over all ranks."""
        self.wait_seconds = 0.0
        """Time the consumer has spent in `next` in total: waiting for data, and on a CPU preparing it."""
        self.tally = Tally(len(source))
        self._prepare = prepare
        by_length = endless and source.group_by_length and source.lengths is not None
        self.group = (group or batch * world) if by_length else 0
        self._stream = Stream(len(source), seed, source.lengths if by_length else None, self.group)
        self._reader = Pool(source, batch, workers, DEPTH) if workers else Reader(source, batch)
        self._reading: _ReadAhead | None = None
        self._ahead: tuple[Any, torch.cuda.Event] | None = None
        """A batch that was prepared ahead, and the event that marks it as ready."""
        self._side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._ended, self._read_none = False, True
        self._finalizer = weakref.finalize(self, _close, self._reader)

    def __len__(self) -> int:
        """Batches of one pass for this rank."""
        whole, rest = divmod(len(self.source), self.batch * self.world)
        return whole + (rest > self.rank * self.batch)

    def __iter__(self) -> Iterator[Any]:
        if not self.endless:
            self._restart(0)
        return self

    def __next__(self) -> Any:
        start = time.perf_counter()
        try:
            return self._next()
        finally:
            self.wait_seconds += time.perf_counter() - start

    def state_dict(self) -> dict[str, Any]:
        """The position in the stream, as values that JSON can hold."""
        state = {"position": self.position, "seed": self.seed, "samples": len(self.source)}
        digest = self.source.digest
        return state | ({"group": self.group} if self.group else {}) | ({"digest": digest} if digest else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. Raises DataError if the data or the seed differ from the saved ones."""
        for key, now in (("samples", len(self.source)), ("seed", self.seed), ("group", self.group)):
            if state.get(key, 0) != now:
                raise DataError(
                    f"The saved position belongs to a sample stream with {key} {state.get(key, 0)}, but "
                    f"{self.source.name} has {key} {now}, so its order would not continue. Use the same data "
                    "and seed, or start a new run."
                )
        # Copies on other nodes may have other modification times.
        if self.rank == 0 and state.get("digest", self.source.digest) != self.source.digest:
            raise DataError(
                f"{self.source.name} changed since the position was saved: a file was replaced, renamed or written "
                "again, so the run would go on with other samples. Restore the files, with their times of change, or "
                "start a new run (--no-resume)."
            )
        self._restart(int(state["position"]))

    @property
    def padding_share(self) -> float | None:
        """Share of padding in batches that are padded to their longest sample, over the first 100,000 samples of the
        stream; None where samples have no lengths."""
        lengths = self.source.lengths
        if lengths is None:
            return None
        positions = np.arange(min(len(lengths), 100_000))
        stream = Stream(len(lengths), self.seed, lengths if self.group else None, self.group)
        order = stream.ids(0, len(positions)) if self.endless else positions
        return padding_share(lengths[order], self.batch)

    def close(self) -> None:
        """End threads and processes. The Loader can not be used afterwards."""
        self._finalizer()
        self._reading = self._ahead = None
        self._ended = True

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _restart(self, position: int) -> None:
        if not self._finalizer.alive:
            raise RuntimeError("This Loader has been closed.")
        if self._reading is not None:
            self._reading.stop()
        self._reading = self._ahead = None
        self.position = position
        self._ended = False

    def _next(self) -> Any:
        if self._ended:
            raise StopIteration
        if self._reading is None:
            self._start()
        if self._side is None:
            host = self._take()
            batch = None if host is None else self._prepare(host, self.device)
        else:
            batch = self._next_from_side_stream(self._side)
        if batch is None:
            self._ended = True
            raise StopIteration
        self.position += self.batch * self.world
        if not self.endless:
            self.position = min(self.position, len(self.source))
        return batch

    def _start(self) -> None:
        place = self.position, self.batch, self.rank, self.world
        requests = _requests(self._stream, *place, endless=self.endless)
        self._reading = _ReadAhead(self._reader, requests, pin=self.device.type == "cuda")
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _close, self._reader, self._reading)

    def _take(self) -> HostBatch | None:
        assert self._reading is not None
        host = self._reading.next()
        if host is not None:
            if self.endless and self._read_none and self.rank == 0 and isinstance(self.source, ImageSource):
                self._report_levels(host.samples[..., : self.source.channels].numpy())
            self._read_none = False
            for path, why in host.bad:
                log.warning("Skipped the bad sample %s: %s.", path, why)
            self.tally.add(len(host.ids), len(host.bad), host.bad[-1][0] if host.bad else "")
        return host

    def _report_levels(self, images: NDArray[np.uint8]) -> None:
        """Log how bright images (B, S, S, C) of 8 bits are, to reveal a set that is read as black."""
        mean, deviation = images.mean() / 255, images.std() / 255
        words = (
            "%s: the first batch has a mean of %.3f and a deviation of %.3f, where black is 0 and white 1."
        )
        log.info(words, self.source.name, mean, deviation)
        if deviation < 1 / 255:
            log.warning(
                "%s: all images of the first batch are the same even grey of %.3f. Check the files, and data.range if "
                "they have more than 8 bits.", self.source.name, mean,
            )  # fmt: skip

    def _stage_aside(self, side: torch.cuda.Stream) -> tuple[Any, torch.cuda.Event] | None:
        host = self._take()
        if host is None:
            return None
        with torch.cuda.stream(side):
            batch = self._prepare(host, self.device)
            return batch, side.record_event()

    def _next_from_side_stream(self, side: torch.cuda.Stream) -> Any:
        """Return the batch that was prepared ahead, and prepare the next during the coming step."""
        staged = self._ahead or self._stage_aside(side)
        if staged is None:
            return None
        batch, ready = staged
        current = torch.cuda.current_stream(self.device)
        current.wait_event(ready)
        for tensor in tensors(batch):
            tensor.record_stream(current)
        self._ahead = self._stage_aside(side)
        return batch


class _ReadAhead:
    """Reads requests in a thread, a few batches ahead of their use, in order.

    It has no reference to the Loader, so that a Loader without users is collected, and stops reading.
    """

    def __init__(self, reader: Reader, requests: Iterator[SampleRequest], *, pin: bool) -> None:
        self._reader = reader
        self._requests = requests
        self._pin = pin
        self._queue: queue.Queue[HostBatch | BaseException | None] = queue.Queue(maxsize=DEPTH)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-data", daemon=True)
        self._thread.start()

    def next(self) -> HostBatch | None:
        """The next batch, or None at the end. Raises what reading raised. A later call has the same result then."""
        item = self._queue.get()
        if isinstance(item, HostBatch):
            return item
        self._put(item)
        if item is not None:
            raise item
        return None

    def stop(self) -> None:
        """End the thread, and drop what it had in flight. The reader can be used again."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:  # where the garbage collector may run as well
            self._thread.join()

    def _run(self) -> None:
        try:
            with closing(self._reader.read(self._requests)) as batches:
                for request, samples, (ids, bad) in batches:
                    self._put(HostBatch(as_tensor(samples, pin=self._pin), ids, request.positions, bad))
                    if self._stopped.is_set():
                        return
            self._put(None)
        except BaseException as error:  # noqa: BLE001 - handed over whole to the consumer, who raises it
            self._put(error)

    def _put(self, item: HostBatch | BaseException | None) -> None:
        while not self._stopped.is_set():
            with suppress(queue.Full):
                self._queue.put(item, timeout=0.1)
                return


def as_tensor(array: NDArray[Any], *, pin: bool = False) -> Any:
    """The samples of a `HostBatch`, copied from an array, because a reader reuses its memory."""
    if array.dtype.names:
        return {name: as_tensor(array[name], pin=pin) for name in array.dtype.names}
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    tensor = torch.empty(array.shape, dtype=dtype, pin_memory=pin)
    np.copyto(tensor.numpy(), array)
    return tensor


def _close(reader: Reader, reading: _ReadAhead | None = None) -> None:
    reader.abort()
    if reading is not None:
        reading.stop()
    reader.close()


def _requests(
    stream: Stream, position: int, batch: int, rank: int, world: int, *, endless: bool
) -> Iterator[SampleRequest]:
    """This rank's slices of the global batches from `position` on."""
    while endless or position < stream.samples:
        start, stop = position + rank * batch, position + (rank + 1) * batch
        if not endless:
            stop = min(stop, stream.samples)
            if start >= stop:
                return
        positions = np.arange(start, stop)
        yield SampleRequest(stream.ids(start, stop) if endless else positions, positions)
        position += batch * world


def _check(source: Source, batch: int, workers: int, rank: int, world: int) -> None:
    problems = []
    if batch < 1:
        problems.append(f"A Loader's batch is {batch}, but must be at least 1.")
    if workers < 0:
        problems.append(f"data.workers is {workers}, but must be 0 (read in this process) or more.")
    if not 0 <= rank < world:
        problems.append(f"Rank {rank} is not one of a world of {world}.")
    if problems:
        raise ConfigError(problems)
    if not len(source):
        raise DataError(f"{source.name} holds no samples. Check its path.")
