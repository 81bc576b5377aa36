"""Heats and rounds: which of many ways to take a training step is the fastest of its kind, and by how much.

In a heat a contestant is alone in memory. What cannot win its kind is dropped early, with the reason stored:

- A step is timed from the second on; the first compiles or warms. A contestant whose first two both take more than
  1.5 times (`DROPPED`) the time of the best of its kind so far is dropped after them. Others are timed 3 times in all,
  or 2 times where a step takes more than 3 s (`LONG`). The least time counts.
- A compiled form enters only if its eager form took at most 1.3 times (`COMPILES`) the best eager time of its kind.
  One in half precision always enters: a cast may pay only once it is compiled.
- The second of a kind takes part in the rounds only within 1.1 times (`NEAR`) the time of the first. So does the plain
  loop with fast products only if these make it faster by more than that.

The rounds go A B C, B C A, …, so that drift of the machine cancels. They end after `LEAST` rounds, once the intervals
of ours against the best plain loop and the best by hand lie wholly on one side of what is aimed at (`AIMS`).
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.errors import PenstockError
from penstock.ladder.result import Estimate
from penstock.ladder.statistics import Journal

DROPPED = 1.5
COMPILES = 1.3
NEAR = 1.1
LONG = 3.0
LEAST = 5
FINALISTS = {"plain": 1, "fair": 1, "trainer": 1, "hand": 2, "penstock": 2}
"""How many of each kind take part in the rounds."""
AIMS = {"plain": 1.25, "hand": 1.05}
"""How many times as fast as the best of a kind ours should be."""


@dataclass
class Contestant:
    """A way to train, and its measurements. `make` builds it; what it returns takes so many steps and says the seconds
    of one."""

    name: str
    kind: str
    """`plain`, `fair`, `trainer`, `hand` or `penstock`."""
    make: Callable[[], Callable[[int], float]]
    eager: str | None = None
    """The name of the same without compile, if this is compiled."""
    half: bool = False
    """Whether products are in half precision."""
    warms_itself: bool = False
    """Whether each call of what `make` returns takes a step first that is not counted."""
    heat: dict[str, Any] = field(default_factory=dict)
    rounds: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float | None:
        """Of a step in its heat; None where there was none."""
        return self.heat.get("seconds")


class Deadline:
    """A moment after which nothing new begins; None: never."""

    def __init__(self, seconds: float | None) -> None:
        self.at = None if seconds is None else time.monotonic() + seconds

    def passed(self) -> bool:
        return self.at is not None and time.monotonic() > self.at


def fastest(entries: list[Contestant], kind: str) -> Contestant | None:
    """The best of a kind by its heat."""
    timed = [entry for entry in entries if entry.kind == kind and entry.seconds is not None]
    return min(timed, key=lambda entry: entry.heat["seconds"], default=None)


def not_worth_compiling(entry: Contestant, entries: list[Contestant]) -> str | None:
    """Why a compiled form does not enter. One whose eager form is not among `entries` does."""
    eager = next((other for other in entries if other.name == entry.eager), None)
    best = fastest([other for other in entries if other.eager is None], entry.kind)
    if entry.half or eager is None or eager.seconds is None or best is None:
        return None
    ratio = eager.seconds / best.heat["seconds"]
    return (
        f"its eager form took {ratio:.2f} times as long as {best.name}, {COMPILES} at most may be compiled"
        if ratio > COMPILES
        else None
    )


def heat(entry: Contestant, best: float | None) -> dict[str, Any]:
    """The heat of one contestant; `best` is the least seconds of its kind so far."""
    run = entry.make()
    first = run(1)
    seconds = first if entry.warms_itself else run(1)
    found = {"first_seconds": first, "seconds": seconds}
    if best is not None and min(first, seconds) > DROPPED * best:
        return found | {"dropped": f"{min(first, seconds) / best:.2f} times as slow as the best of its kind"}
    more = 1 if seconds > LONG else 2
    return found | {"seconds": min(seconds, *(run(1) for _ in range(more)))}


def heats(
    entries: list[Contestant], device: torch.device, store: Callable[[], None], deadline: Deadline
) -> bool:
    """Each contestant alone: seconds of a step, of its first one besides, and why there are none. False if the time
    was over before all had theirs."""
    for entry in entries:
        if entry.heat:
            continue
        if deadline.passed():
            return False
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        why = not_worth_compiling(entry, entries)
        best = fastest(entries, entry.kind)
        try:
            entry.heat = {"dropped": why} if why else heat(entry, best.seconds if best else None)
        except (RuntimeError, ValueError, PenstockError) as error:
            entry.heat = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
        if device.type == "cuda":
            entry.heat["peak_bytes"] = torch.cuda.max_memory_allocated(device)
        forget()
        print(f"  heat: {entry.name}: {entry.heat}", flush=True)
        store()
    return True


def forget() -> None:
    """Let go of contestants and of their compiled code."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def finalists(entries: list[Contestant]) -> list[Contestant]:
    """The fastest of each kind, in the order in which they entered."""
    chosen: set[str] = set()
    for kind, count in FINALISTS.items():
        ranked = sorted(
            (e for e in entries if e.kind == kind and e.seconds is not None), key=lambda e: e.heat["seconds"]
        )
        chosen |= {e.name for e in ranked[:count] if e.heat["seconds"] <= NEAR * ranked[0].heat["seconds"]}
    plain, fair = fastest(entries, "plain"), fastest(entries, "fair")
    if plain and fair and plain.heat["seconds"] <= NEAR * fair.heat["seconds"]:
        chosen.discard(fair.name)
    return [entry for entry in entries if entry.name in chosen]


def race(
    entries: list[Contestant], most: int, steps: int, store: Callable[[], None], deadline: Deadline
) -> None:
    """Rounds in which all take part, until what is aimed at is decided or there are so many."""
    done = min((len(entry.rounds) for entry in entries), default=0)
    for entry in entries:
        del entry.rounds[done:]  # of a round that was interrupted
    if not entries or deadline.passed() or _over(entries, most):
        return
    runs = []
    for entry in entries:
        run = entry.make()
        run(1)
        runs.append((entry, run))
    while True:
        shift = done % len(runs)
        for entry, run in runs[shift:] + runs[:shift]:
            if not entry.warms_itself and entry.heat["seconds"] <= LONG:
                run(1)  # the one before has left its own state in the caches and the allocator
            entry.rounds.append(run(steps))
        done += 1
        store()
        print(f"  round {done}, of {most} at most", flush=True)
        if deadline.passed() or _over(entries, most):
            return


def _over(entries: list[Contestant], most: int) -> bool:
    done = len(entries[0].rounds)
    return done >= most or (done >= LEAST and decided(entries))


def bests(entries: list[Contestant]) -> dict[str, Contestant]:
    """The fastest of each kind in the rounds."""
    raced = [entry for entry in entries if entry.rounds]
    return {
        kind: min((e for e in raced if e.kind == kind), key=lambda e: statistics.median(e.rounds))
        for kind in FINALISTS
        if any(e.kind == kind for e in raced)
    }


def ratios(entries: list[Contestant]) -> dict[str, Estimate]:
    """How many times as fast as the best of each other kind ours is, with an interval that holds at whatever round
    the race stops."""
    best = bests(entries)
    journal: Journal[str] = Journal()
    for seconds in zip(*(entry.rounds for entry in entries if entry.rounds)):
        journal.add({e.name: taken for e, taken in zip((e for e in entries if e.rounds), seconds)})
    ours = best.pop("penstock", None)
    found = {kind: journal.joint().ratio(ours.name, other.name) for kind, other in best.items() if ours}
    return {kind: ratio for kind, ratio in found.items() if ratio is not None}


def decided(entries: list[Contestant]) -> bool:
    """Whether the interval of each ratio that something is aimed at lies on one side of the aim."""
    found = ratios(entries)
    return all(not found[kind].low <= aim <= found[kind].high for kind, aim in AIMS.items() if kind in found)
