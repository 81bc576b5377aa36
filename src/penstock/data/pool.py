"""Reading in several processes, which split each batch among them and write it into memory shared with this one.

The processes are new Python interpreters, not forks: they inherit no lock or thread, and a script needs no
`if __name__ == "__main__"`. They import no torch, and live as long as the pool.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections import deque
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.data.source import Pixels, Reading, Source
from penstock.data.worker import Done, Failed, Hello, Task, open_room, receive, room_bytes, send
from penstock.errors import DataError

_PROGRAM = "import sys; from penstock.data.worker import main; main(int(sys.argv[1]))"


class Pool:
    """`workers` processes that read batches of up to `batch` samples, `depth` of them at a time."""

    def __init__(self, source: Source, batch: int, workers: int, depth: int) -> None:
        shape = (depth + 1, batch, source.size, source.size, source.channels)
        self._source = source.name
        self._file = _shared_file(room_bytes(shape))
        self._room = open_room(self._file.fileno(), shape)
        self._free = deque(range(depth + 1))
        self._in_flight: deque[_Request] = deque()
        self._shown: int | None = None
        """The slot that was returned last. It is free again when the next one is asked for."""
        self._workers: list[_Worker] = []
        hello = Hello(_pickled(source), shape)
        try:
            for number in range(workers):
                self._workers.append(_Worker(number, self._file.fileno()))
            for worker in self._workers:
                worker.send(hello)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers, in order."""
        return tuple(worker.process.pid for worker in self._workers)

    def submit(self, indices: NDArray[np.int64]) -> None:
        """Start reading a batch. At most `depth` may be in flight."""
        slot = self._free.popleft()
        self._room.ids[slot, : len(indices)] = indices
        edges = np.linspace(0, len(indices), len(self._workers) + 1).astype(int).tolist()
        parts = [
            (worker, *part) for worker, *part in zip(self._workers, edges, edges[1:]) if part[0] < part[1]
        ]
        self._in_flight.append(_Request(slot, len(indices), [worker for worker, _, _ in parts]))
        for worker, start, stop in parts:
            worker.send(Task(slot, start, stop))

    def receive(self) -> tuple[Pixels, Reading]:
        """The oldest batch in flight. Its pixels are valid until the next call."""
        if self._shown is not None:
            self._free.append(self._shown)
        request = self._in_flight.popleft()
        self._shown = request.slot
        bad: list[tuple[str, str]] = []
        failed: DataError | None = None
        for worker in request.workers:  # all of them, because each has an answer in its pipe
            answer = worker.receive()
            if isinstance(answer, Done):
                bad += answer.bad
            elif failed is None:
                told = (
                    answer.message if answer.data else f"{worker} failed on {self._source}: {answer.message}"
                )
                failed = DataError(told)
        if failed is not None:
            raise failed
        rows = (request.slot, slice(request.samples))
        reading = Reading(self._room.labels[rows].copy(), self._room.ids[rows].copy(), tuple(bad))
        return self._room.images[rows], reading

    def discard(self) -> None:
        """Wait for the batches in flight, and drop them."""
        while self._in_flight:
            with contextlib.suppress(DataError, ValueError):  # ValueError: the pipes have been closed
                self.receive()

    def abort(self) -> None:
        """Kill the processes, which lose nothing by it. Whoever waits for their answers is released."""
        for worker in self._workers:
            worker.process.kill()

    def close(self) -> None:
        """End the processes. Nobody may be using the pool."""
        self.abort()
        for worker in self._workers:
            worker.close()
        self._file.close()


class _Worker:
    """One reading process and the pipes to it."""

    def __init__(self, number: int, shared: int) -> None:
        self.number = number
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(shared)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(shared,),
            # The worker must find the caller's modules too, because one may define the source.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        )

    def __str__(self) -> str:
        return f"The data worker {self.number} (process {self.process.pid})"

    def send(self, message: object) -> None:
        assert self.process.stdin is not None
        try:
            send(self.process.stdin, message)
        except BrokenPipeError:
            raise self._gone() from None

    def receive(self) -> Done | Failed:
        assert self.process.stdout is not None
        try:
            answer: Done | Failed = receive(self.process.stdout)
        except EOFError:
            raise self._gone() from None
        return answer

    def _gone(self) -> DataError:
        code = self.process.wait(timeout=10)
        if code >= 0:
            return DataError(
                f"{self} ended with exit code {code} while reading. Its own message is on stderr."
            )
        return DataError(
            f"{self} was killed by {signal.Signals(-code).name} while reading. If nobody killed it, the machine ran "
            "out of memory: lower data.workers or the batch."
        )

    def close(self) -> None:
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class _Request(NamedTuple):
    """A batch in flight."""

    slot: int
    samples: int
    workers: list[_Worker]
    """The workers that read a part of it."""


def _shared_file(size: int) -> IO[bytes]:
    """A file in memory without a name, so that nothing is left however the processes end."""
    if hasattr(os, "memfd_create"):
        file: IO[bytes] = os.fdopen(os.memfd_create("penstock-data"), "r+b")
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the pool
    file.truncate(size)
    return file


def _pickled(source: Source) -> bytes:
    if type(source).__module__ == "__main__":
        raise DataError(
            f"The source class {type(source).__name__} is defined in the script itself, where data workers cannot "
            "find it. Move it into a module, or set data.workers to 0."
        )
    return pickle.dumps(source, protocol=pickle.HIGHEST_PROTOCOL)
