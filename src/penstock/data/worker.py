"""A reading process, which `pool.py` starts. It imports no torch.

It takes its source and then tasks from standard input, reads the samples into memory that it shares with its parent,
and answers on standard output. It ends when its parent does, because that closes the pipe.
"""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import struct
import sys
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.data.source import Pixels
from penstock.errors import DataError

FRAME = struct.Struct("<Q")


class Room(NamedTuple):
    """The shared memory: slots of one batch each."""

    ids: NDArray[np.int64]
    """(slots, batch): what to read, and afterwards what was read, with replacements."""
    labels: NDArray[np.int64]
    """(slots, batch)"""
    images: Pixels
    """(slots, batch, size, size, channels)"""


def room_bytes(shape: tuple[int, ...]) -> int:
    """Bytes of a Room whose images have this shape."""
    return 2 * 8 * shape[0] * shape[1] + int(np.prod(shape))


def open_room(file: int, shape: tuple[int, ...]) -> Room:
    """Map the file of shared memory."""
    memory = mmap.mmap(file, room_bytes(shape))
    numbers = shape[0] * shape[1]
    ids = np.frombuffer(memory, np.int64, numbers).reshape(shape[:2])
    labels = np.frombuffer(memory, np.int64, numbers, 8 * numbers).reshape(shape[:2])
    return Room(ids, labels, np.frombuffer(memory, np.uint8, -1, 16 * numbers).reshape(shape))


class Hello(NamedTuple):
    """First message: the pickled source, and the shape of the shared images."""

    source: bytes
    shape: tuple[int, ...]


class Task(NamedTuple):
    """Read the samples in rows start..stop of a slot. It is small, so that a pipe has room for all in flight."""

    slot: int
    start: int
    stop: int


class Done(NamedTuple):
    """The rows are read; `bad` are the images that were replaced."""

    bad: tuple[tuple[str, str], ...]


class Failed(NamedTuple):
    """Reading failed. `data` says whether the message is already meant for the user."""

    message: str
    data: bool


def send(pipe: IO[bytes], message: object) -> None:
    """Send a length-prefixed message. Only the process at the other end of a private pipe reads it."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.write(FRAME.pack(len(body)) + body)
    pipe.flush()


def receive(pipe: IO[bytes]) -> Any:
    """The next message; EOFError when the other end is gone."""
    head = pipe.read(FRAME.size)
    if len(head) < FRAME.size:
        raise EOFError
    (length,) = FRAME.unpack(head)
    body = pipe.read(length)
    if len(body) < length:
        raise EOFError
    return pickle.loads(body)


def main(shared: int) -> None:
    """Serve until the parent is gone. `shared` is the file descriptor of the shared memory."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes the pipe
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get among the answers
    try:
        hello: Hello = receive(requests)
        room = open_room(shared, hello.shape)
        source = pickle.loads(hello.source)
        while True:
            send(answers, _read(source, receive(requests), room))
    except (EOFError, BrokenPipeError):
        return


def _read(source: Any, task: Task, room: Room) -> Done | Failed:
    rows = slice(task.start, task.stop)
    try:
        reading = source.read_into(room.ids[task.slot, rows].copy(), room.images[task.slot, rows])
    except DataError as error:
        return Failed(str(error), data=True)
    except Exception as error:  # noqa: BLE001 - told to the parent, which raises it
        return Failed(f"{type(error).__name__}: {error}", data=False)
    room.ids[task.slot, rows] = reading.ids
    room.labels[task.slot, rows] = reading.labels
    return Done(reading.bad)
