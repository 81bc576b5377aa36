"""A rank's sign of life: at every step it writes a few bytes of a file that it shares with its agent.

The file is mapped into memory, so writing takes a few hundred nanoseconds and no system call. The agent can always read
it.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

T = TypeVar("T")

VARIABLE: Final = "PENSTOCK_HEARTBEAT"
"""Environment variable with the path of this rank's file; not set without an agent."""
_BEAT = struct.Struct("<qd")
"""The step and `time.monotonic()` of the last beat, which is one clock for all processes."""
_PROMISED = -1


@dataclass(frozen=True, slots=True)
class Beat:
    """A rank's heartbeat, as its agent reads it."""

    step: int
    seconds: float
    """`time.monotonic()` at the last beat; 0: none yet, so nothing is known of the rank."""

    @property
    def stepping(self) -> bool:
        """Whether the rank has finished a step; before its first it has only announced that steps will come."""
        return self.step != _PROMISED


class Heartbeat:
    """One rank's file, for the rank and for its agent."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _BEAT.size)

    @staticmethod
    def create(path: Path) -> Heartbeat:
        """Create a new file at `path`, without a beat; called by the agent."""
        path.write_bytes(bytes(_BEAT.size))
        return Heartbeat(path)

    def beat(self, step: int) -> None:
        """Record that `step` is done."""
        _BEAT.pack_into(self._memory, 0, step, time.monotonic())

    def read(self) -> Beat:
        """Read the last beat."""
        return Beat(*_BEAT.unpack_from(self._memory, 0))

    def close(self) -> None:
        """Unmap the file."""
        self._memory.close()


def beat(step: int) -> None:
    """Tell the agent, if there is one, that `step` is done. For any training loop under `penstock launch`."""
    if path := os.environ.get(VARIABLE):
        _opened(path).beat(step)


def promise() -> None:
    """Tell the agent, if there is one, that steps will come, so that a hang before the first is noticed."""
    beat(_PROMISED)


def beating(items: Iterable[T], step: int) -> Iterator[T]:
    """Yield `items` with a beat before each, for long work between two steps, such as an evaluation after `step`."""
    for item in items:
        beat(step)
        yield item


@functools.cache
def _opened(path: str) -> Heartbeat:
    return Heartbeat(Path(path))
