"""Reading batches: in this process, or in several that split each batch among them and write it into shared memory.

The processes of a pool are new Python interpreters, not forks: they inherit no lock or thread, and a script needs no
`if __name__ == "__main__"`. They import no torch. They live as long as the pool, and end when its process does, because
that closes the pipe.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Generator, Iterator
from itertools import pairwise
from multiprocessing.connection import Connection, Pipe
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.data.source import ReadResult, Source
from penstock.errors import DataError

_PROGRAM = "import sys; from penstock.data.pool import serve; serve(int(sys.argv[1]), int(sys.argv[2]))"


_Answer = tuple[tuple[str, str], ...] | str
"""The bad samples of a part of a batch, or why reading it failed."""


class _Room:
    """Shared memory of several processes, in slots of one batch each."""

    def __init__(self, file: int, slots: int, batch: int, sample: np.dtype[Any]) -> None:
        memory = mmap.mmap(file, _Room.bytes(slots, batch, sample))
        self.ids = np.ndarray((slots, batch), np.int64, memory)
        """Numbers of the samples to read, and afterwards of the samples that were read, with replacements."""
        self.samples = np.ndarray((slots, batch), sample, memory, offset=self.ids.nbytes)

    @staticmethod
    def bytes(slots: int, batch: int, sample: np.dtype[Any]) -> int:
        return slots * batch * (8 + sample.itemsize)


class SampleRequest(NamedTuple):
    """A batch to be read: the numbers of its samples, and their positions in the stream."""

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]


Batches = Generator[tuple[SampleRequest, NDArray[Any], ReadResult], None, None]
"""Batches that were read, each with its request. The samples are only valid until the next batch is requested."""


class Reader:
    """Reads batches of up to `batch` samples in the thread that iterates over them."""

    def __init__(self, source: Source, batch: int) -> None:
        self._source, self._out = source, np.empty(batch, source.sample)

    def read(self, requests: Iterator[SampleRequest]) -> Batches:
        """The batches of these requests, in order. Close it before the next call."""
        for request in requests:
            out = self._out[: len(request.ids)]
            yield request, out, self._source.read_into(request.ids, out)

    def abort(self) -> None:
        """Release a thread that waits for a batch. Called from another thread. This reader finishes its batch."""

    def close(self) -> None:
        """End the reader, which nobody may be using."""


class Pool(Reader):
    """`workers` processes that read batches of up to `batch` samples, `depth` of them at a time."""

    def __init__(self, source: Source, batch: int, workers: int, depth: int) -> None:
        if type(source).__module__ == "__main__":
            raise DataError(
                f"The source class {type(source).__name__} is defined in the script itself, where data workers cannot "
                "find it. Move it into a module, or set data.workers to 0."
            )
        self._slots = depth
        self._file = _shared_file(_Room.bytes(depth, batch, source.sample))
        self._room = _Room(self._file.fileno(), depth, batch, source.sample)
        self._workers: list[_Worker] = []
        try:
            for number in range(workers):
                self._workers.append(_Worker(number, self._file.fileno()))
            for worker in self._workers:
                worker.send((source, depth, batch, str(worker)))
        except BaseException:
            self.close()
            raise

    def read(self, requests: Iterator[SampleRequest]) -> Batches:
        free = deque(range(self._slots))
        in_flight: deque[tuple[int, SampleRequest, list[_Worker]]] = deque()
        try:
            while True:
                while free and (request := next(requests, None)) is not None:
                    slot = free.popleft()
                    in_flight.append((slot, request, self._submit(slot, request.ids)))
                if not in_flight:
                    return
                slot, request, workers = in_flight.popleft()
                bad = self._receive(workers)
                rows = (slot, slice(len(request.ids)))
                yield request, self._room.samples[rows], ReadResult(self._room.ids[rows].copy(), bad)
                free.append(slot)
        finally:
            for *_, workers in in_flight:
                with contextlib.suppress(DataError, OSError):  # OSError: the pipes have been closed
                    self._receive(workers)

    def _submit(self, slot: int, ids: NDArray[np.int64]) -> list[_Worker]:
        """Request the samples `ids`. Returns the workers that read them."""
        self._room.ids[slot, : len(ids)] = ids
        edges = np.linspace(0, len(ids), len(self._workers) + 1).astype(int).tolist()
        busy = [(worker, *part) for worker, part in zip(self._workers, pairwise(edges)) if part[0] < part[1]]
        for worker, start, stop in busy:
            worker.send((slot, slice(start, stop)))
        return [worker for worker, *_ in busy]

    @staticmethod
    def _receive(workers: list[_Worker]) -> tuple[tuple[str, str], ...]:
        """The bad samples of a batch that these workers read. Raises DataError."""
        bad: list[tuple[str, str]] = []
        failures: list[str] = []
        for worker in workers:  # all of them, because each has an answer in its pipe
            answer = worker.receive()
            if isinstance(answer, str):
                failures.append(answer)
            else:
                bad += answer
        if failures:
            raise DataError(failures[0])
        return tuple(bad)

    def abort(self) -> None:
        for worker in self._workers:
            worker.process.kill()  # they lose nothing by it

    def close(self) -> None:
        self.abort()
        for worker in self._workers:
            worker.process.wait()
            worker.pipe.close()
        self._file.close()


class _Worker:
    """One reading process and the pipe to it."""

    def __init__(self, number: int, shared: int) -> None:
        self.number = number
        self.pipe, worker_pipe = Pipe()
        # Schedulers ask every process of a job to stop. Workers continue until the training process has saved: they
        # inherit the signals that are blocked here.
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1))
        try:
            with worker_pipe:
                self.process = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM, str(worker_pipe.fileno()), str(shared)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(worker_pipe.fileno(), shared),
                    # The worker must find the caller's modules too, because one may define the source.
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)

    def __str__(self) -> str:
        return f"The data worker {self.number} (process {self.process.pid})"

    def send(self, message: object) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `receive` says that it is gone
            self.pipe.send(message)

    def receive(self) -> _Answer:
        """The answer to the oldest part that was sent. Raises DataError if the process has ended."""
        try:
            answer: _Answer = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            code = self.process.wait(timeout=10)
            end = f"ended with exit code {code} while reading. Its own message is on stderr."
            if code < 0:
                end = (
                    f"was killed by {signal.Signals(-code).name} while reading. If nobody killed it, the machine ran "
                    "out of memory: lower data.workers or the batch."
                )
            raise DataError(f"{self} {end}") from None
        return answer


def _shared_file(size: int) -> IO[bytes]:
    """A file in memory without a name, so that nothing is left however the processes end."""
    if hasattr(os, "memfd_create"):
        file: IO[bytes] = os.fdopen(os.memfd_create("penstock-data"), "r+b")
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the pool
    file.truncate(size)
    return file


def serve(pipe: int, shared_file: int) -> None:
    """Run a worker until its parent is gone: read samples into the shared memory. Both are file descriptors."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes the pipe
    os.dup2(2, 1)  # what a library prints must not get among the parent's output
    requests = Connection(pipe)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        source, slots, batch, name = requests.recv()
        room = _Room(shared_file, slots, batch, source.sample)
        while True:
            slot, rows = requests.recv()
            requests.send(_read_rows(source, room.ids[slot, rows], room.samples[slot, rows], name))


def _read_rows(source: Source, ids: NDArray[np.int64], samples: NDArray[Any], worker: str) -> _Answer:
    """Read the samples `ids` into `samples`; afterwards `ids` has the numbers of the samples that were read."""
    try:
        reading = source.read_into(ids.copy(), samples)
    except DataError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - sent to the parent, which raises it
        return f"{worker} failed on {source.name}: {type(error).__name__}: {error}"
    ids[:] = reading.ids
    return reading.bad
