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
        """Numbers of the samples to read, and afterwards of those that were read, with replacements."""
        self.samples = np.ndarray((slots, batch), sample, memory, offset=self.ids.nbytes)

    @staticmethod
    def bytes(slots: int, batch: int, sample: np.dtype[Any]) -> int:
        return slots * batch * (8 + sample.itemsize)


class _InFlight(NamedTuple):
    """A batch that is being read, and the workers that read a part of it."""

    slot: int
    samples: int
    workers: list[_Worker]


class Reader:
    """Reads batches of up to `batch` samples, in the order of requests, in the thread that receives them."""

    def __init__(self, source: Source, batch: int) -> None:
        self._source = source
        self._requests: deque[NDArray[np.int64]] = deque()
        self._out = np.empty(batch, source.sample)

    def submit(self, indices: NDArray[np.int64]) -> None:
        """Request a batch of these samples."""
        self._requests.append(indices)

    def receive(self) -> tuple[NDArray[Any], ReadResult]:
        """The oldest batch that was requested. Its samples are only valid until the next call."""
        indices = self._requests.popleft()
        out = self._out[: len(indices)]
        return out, self._source.read_into(indices, out)

    def discard(self) -> None:
        """Drop batches that were requested and not received."""
        self._requests.clear()

    def abort(self) -> None:
        """Release a thread that waits in `receive`. Called from another thread. Here a batch is read to its end."""

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
        slots = depth + 1
        self._file = _shared_file(_Room.bytes(slots, batch, source.sample))
        self._room = _Room(self._file.fileno(), slots, batch, source.sample)
        self._free = deque(range(slots))
        self._in_flight: deque[_InFlight] = deque()
        self._shown: int | None = None
        """The slot that was returned last. It is free again when the next one is asked for."""
        self._workers: list[_Worker] = []
        try:
            for number in range(workers):
                self._workers.append(_Worker(number, self._file.fileno()))
            for worker in self._workers:
                worker.send((source, slots, batch, str(worker)))
        except BaseException:
            self.close()
            raise

    def submit(self, indices: NDArray[np.int64]) -> None:
        slot = self._free.popleft()
        self._room.ids[slot, : len(indices)] = indices
        edges = np.linspace(0, len(indices), len(self._workers) + 1).astype(int).tolist()
        busy = [(worker, *part) for worker, part in zip(self._workers, pairwise(edges)) if part[0] < part[1]]
        self._in_flight.append(_InFlight(slot, len(indices), [worker for worker, *_ in busy]))
        for worker, start, stop in busy:
            worker.send((slot, slice(start, stop)))

    def receive(self) -> tuple[NDArray[Any], ReadResult]:
        if self._shown is not None:
            self._free.append(self._shown)
        request = self._in_flight.popleft()
        self._shown = request.slot
        bad: list[tuple[str, str]] = []
        failures: list[str] = []
        for worker in request.workers:  # all of them, because each has an answer in its pipe
            answer = worker.receive()
            if isinstance(answer, str):
                failures.append(answer)
            else:
                bad += answer
        if failures:
            raise DataError(failures[0])
        rows = (request.slot, slice(request.samples))
        return self._room.samples[rows], ReadResult(self._room.ids[rows].copy(), tuple(bad))

    def discard(self) -> None:
        while self._in_flight:
            with contextlib.suppress(DataError, OSError):  # OSError: the pipes have been closed
                self.receive()

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
        # Schedulers ask every process of a job to stop. Workers serve on until the one that reads from them has saved:
        # a signal that is blocked here stays so in them.
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
    """Read samples `ids` into the shared memory, and write there the numbers of those that were read."""
    try:
        reading = source.read_into(ids.copy(), samples)
    except DataError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - sent to the parent, which raises it
        return f"{worker} failed on {source.name}: {type(error).__name__}: {error}"
    ids[:] = reading.ids
    return reading.bad
