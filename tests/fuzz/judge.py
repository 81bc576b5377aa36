"""Judges how a case ends at a door: it is let in or refused in a sentence, within limits of processor time and memory.

The limits hold in this process: far above that of memory an allocation fails, and a case that waits for ever ends by
the timeout of its test. A case that ends the process is left in `case.bin` of its room.
"""

from __future__ import annotations

import contextlib
import logging
import random
import resource
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import strategies as st

from fuzz.doors import Case, Door, load
from fuzz.mutate import mutated
from penstock.errors import PenstockError

BLOCK = 200
"""Cases that hypothesis makes from one seed."""
SECONDS = 2.0
"""Processor time that a case may take."""
BYTES = 500_000_000
"""Memory that a case may add to the process."""


@dataclass
class Outcome:
    """How the cases of a door ended."""

    cases: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    """Processor seconds of the slowest case."""
    largest: int = 0
    """Bytes by which the process grew at most in one case."""
    failures: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """As the page of faults shows them."""
        ended = dict(sorted(self.ended.items()))
        return {
            "cases": self.cases,
            "let in": ended.pop("let in", 0),
            "refused": ended,
            "slowest seconds": round(self.slowest, 3),
            "largest growth in MB": round(self.largest / 1e6, 1),
            "tracebacks, hangs or floods": len(self.failures),
        }

    def run(self, door: Door, case: Case, seconds: float = SECONDS) -> None:
        """Run a case and note how it ended; one that took too long runs again, for once may have been the machine."""
        Path("case.bin").write_bytes(f"{case[0]}\n".encode() + case[1])
        problem = self._judge(door, case, seconds)
        if problem.startswith("It took"):
            problem = self._judge(door, case, seconds)
        self.cases += 1
        if problem:
            self.ended["failed"] += 1
            text = case[1].hex()
            shown = text if len(text) <= 4000 else f"{text[:4000]}… ({len(case[1]):,} bytes)"
            self.failures.append(f"made from {case[0]!r}: {problem}\n  input: {shown}")

    def _judge(self, door: Door, case: Case, most: float) -> str:
        """How it failed, or nothing."""
        before, start, problem = _reset_peak(), time.process_time(), ""
        try:
            door.enter(*case)
            end = "let in"
        except PenstockError as error:
            end, problem = type(error).__name__, _no_sentence(str(error))
        except BaseException as error:
            tail = "".join(traceback.format_exception(error)[-4:])[-1500:]
            end, problem = "failed", f"{type(error).__name__} and its traceback: {tail}"
        seconds, growth = time.process_time() - start, _status("VmHWM") - before
        self.slowest, self.largest = max(self.slowest, seconds), max(self.largest, growth)
        if not problem and seconds > most:
            problem = f"It took {seconds:.1f} s of processor time."
        if not problem and growth > BYTES:
            problem = f"It took {growth:,} bytes of memory."
        self.ended[end] += not problem
        return problem


@contextlib.contextmanager
def opened(door: Door, room: Path) -> Iterator[dict[str, bytes]]:
    """The valid inputs of a door, entered in an empty folder, where cases may follow under the limit of memory."""
    room.mkdir()
    disabled, limits = logging.root.manager.disable, resource.getrlimit(resource.RLIMIT_DATA)
    with contextlib.chdir(room):
        seeds = door.seeds()
        for case in seeds.items():  # what is imported and cached on the way counts for no case
            door.enter(*case)
        resource.setrlimit(resource.RLIMIT_DATA, (_status("VmData") + 2 * BYTES, limits[1]))
        try:
            yield seeds
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, limits)
            logging.disable(disabled)


def fuzz(name: str, cases: int, room: Path) -> Outcome:
    """Run cases of a door: valid inputs with changed bytes and, where the door makes some, well-formed nonsense. They
    are a pure function of the door and of the number of their block. Stops after some failures."""
    door, outcome = load(name), Outcome()
    with opened(door, room) as seeds:
        values = list(seeds.values())

        def changed(name: str, seed: int) -> Case:
            return name, mutated(seeds[name], random.Random(seed), values, door.tokens)

        strategy = st.builds(changed, st.sampled_from(list(seeds)), st.integers(0, 1 << 62))
        if door.made is not None:
            strategy |= door.made()
        for block in range(-(-cases // BLOCK)):

            @hypothesis.seed(zlib.crc32(f"{name} {block}".encode()))
            @hypothesis.settings(
                max_examples=min(BLOCK, cases), database=None, phases=[hypothesis.Phase.generate],
                suppress_health_check=list(hypothesis.HealthCheck),
            )  # fmt: skip
            @hypothesis.given(strategy)
            def run(case: Case) -> None:
                if len(outcome.failures) < 5:
                    outcome.run(door, case)

            run()
    return outcome


def _no_sentence(text: str) -> str:
    """What is wrong with the words of an error, or nothing."""
    if len(text.split()) < 3 or text.rstrip()[-1:] not in ".)!?`'\"":
        return f"Its words are no sentence: {text[:300]!r}"
    if not all(character.isprintable() or character == "\n" for character in text):
        return f"Its words hold control characters: {text[:300]!r}"
    return f"Its words are {len(text):,} characters long: {text[:300]!r}" if len(text) > 5000 else ""


def _reset_peak() -> int:
    """Start the count of the process' peak of memory again. Returns what it has now, in bytes."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _status("VmRSS")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text(errors="replace").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
