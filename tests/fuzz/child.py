"""The process in which the cases of a door run: `python -m fuzz.child DOOR --from BLOCK --to BLOCK`.

A case must end in a value or in a PenstockError, within limits of processor time and memory. What Python can see is
judged here. The system ends a case that takes far too much memory with a MemoryError, and this process with SIGALRM
where a case waits for ever. Then the process that started it finds the case in `case.bin`, and starts another for the
next block. Cases are a pure function of the door and of the number of their block.

Each line written to standard output is one JSON document: a case that failed, or the counts of one block.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import signal
import sys
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fuzz.doors import Case, Door, load
from penstock.errors import PenstockError

BLOCK = 50
"""Cases of one block."""
SECONDS = 2.0
"""Processor time that a case may take."""
WALL_SECONDS = 60
"""Seconds after which a case is taken to hang. Many, because the machine may be busy."""
BYTES = 500_000_000
"""Memory that a case may add to the process."""


class Room:
    """Runs cases of one door and counts how they end."""

    def __init__(self, door: Door, out: Any, seconds: float = SECONDS) -> None:
        self._door = door
        self._seconds = seconds
        self._out = out
        self._case = os.open("case.bin", os.O_RDWR | os.O_CREAT)
        self.block = -1
        self.seeds = door.seeds()
        for name, data in self.seeds.items():  # what is imported and cached on the way counts for no case
            door.enter(name, data)
        self.clear()

    def clear(self) -> None:
        self.ended: Counter[str] = Counter()
        self.slowest = 0.0
        self.largest = 0

    def run(self, case: Case) -> None:
        """Run one case, and report it if it fails."""
        name, data = case
        note = f"{self.block} {name}\n".encode() + data
        os.ftruncate(self._case, 0)
        os.pwrite(self._case, note, 0)
        problem = self._judge(name, data)
        if problem is not None and problem.startswith("It took"):
            problem = self._judge(name, data)  # once may have been the machine
        if problem is not None:
            self.ended["failed"] += 1
            self._say({"failed": problem, "block": self.block, "name": name, "hex": data.hex()})

    def _judge(self, name: str, data: bytes) -> str | None:
        """How it failed, or None."""
        problem = None
        before = _reset_peak()
        signal.alarm(WALL_SECONDS)
        start = time.process_time()
        try:
            self._door.enter(name, data)
            end = "let in"
        except PenstockError as error:
            end = type(error).__name__
            problem = _no_sentence(str(error))
        except BaseException as error:
            end = "failed"
            problem = f"{type(error).__name__} and its traceback: {_tail(error)}"
        seconds = time.process_time() - start
        signal.alarm(0)
        growth = _peak() - before
        if problem is None and seconds > self._seconds:
            problem = f"It took {seconds:.1f} s of processor time."
        if problem is None and growth > BYTES:
            problem = f"It took {growth:,} bytes of memory."
        if problem is None:
            self.ended[end] += 1
        self.slowest = max(self.slowest, seconds)
        self.largest = max(self.largest, growth)
        return problem

    def _say(self, document: dict[str, Any]) -> None:
        self._out.write(json.dumps(document) + "\n")
        self._out.flush()

    def finish_block(self) -> None:
        """Report the counts of the block."""
        self._say({"block": self.block, "ended": self.ended, "seconds": self.slowest, "bytes": self.largest})
        self.clear()


def run_block(room: Room, door: Door, label: str, block: int) -> None:
    """The cases of one block: changed bytes in even blocks, and made inputs in odd ones where the door makes some."""
    room.block = block
    if block % 2 and door.made is not None:
        _run_made(room, door.made(), zlib.crc32(f"{label} {block}".encode()))
    else:
        from fuzz.mutate import mutated

        names, values = list(room.seeds), list(room.seeds.values())
        for number in range(BLOCK):
            rng = random.Random(f"{label} {block} {number}")
            name = rng.choice(names)
            room.run((name, mutated(room.seeds[name], rng, values, door.tokens)))
    room.finish_block()


def _run_made(room: Room, strategy: Any, seed: int) -> None:
    import hypothesis

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=BLOCK,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategy)
    def run(case: Case) -> None:
        room.run(case)

    run()


def _no_sentence(text: str) -> str | None:
    """What is wrong with the words of an error, or None."""
    if len(text.split()) < 3 or text.rstrip()[-1:] not in ".)!?`'\"":
        return f"Its words are no sentence: {text[:300]!r}"
    if not all(character.isprintable() or character == "\n" for character in text):
        return f"Its words hold control characters: {text[:300]!r}"
    if len(text) > 5000:
        return f"Its words are {len(text):,} characters long: {text[:300]!r}"
    return None


def _tail(error: BaseException) -> str:
    with contextlib.suppress(Exception):
        return "".join(traceback.format_exception(error)[-4:])[-1500:]
    return "(which cannot be shown)"


def _reset_peak() -> int:
    """Start the count of the process' peak of memory anew. Returns what it has now, in bytes."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(key: str) -> int:
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith(key):
                return int(line.split()[1]) * 1024
    raise AssertionError(key)


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Let allocations fail well above the limit, before the machine suffers."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_status("VmData") + 2 * BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fuzz.child")
    parser.add_argument("door")
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--to", dest="last", type=int, default=1)
    parser.add_argument("--case", type=Path, help="a file with one case: run only this")
    parser.add_argument("--name", default="", help="name of the valid input that the case was made from")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="processor time that a case may take")
    options = parser.parse_args()
    case = options.case and (options.name, options.case.read_bytes())
    warnings.simplefilter("error")  # a warning is text that floods a terminal, and says nothing to a user
    door = load(options.door)
    out = os.fdopen(os.dup(1), "w")  # what a case prints goes elsewhere
    os.dup2(2, 1)
    os.makedirs("room", exist_ok=True)
    os.chdir("room")
    with out, _limited():
        room = Room(door, out, options.seconds)
        if case:
            room.run(case)
            room.finish_block()
        else:
            for block in range(options.first, options.last):
                run_block(room, door, options.door, block)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # threads of a library may hang; all is written
