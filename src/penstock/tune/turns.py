"""Processes of a script under different settings, which take turns of some optimizer steps, and what these showed.

Free of torch, which only those processes load.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from penstock.boundary.files import own_file
from penstock.config.numerics import numerics_of
from penstock.config.plan import Plan
from penstock.ladder.judge import DEVIATIONS, TOLERANCES, tail_mean
from penstock.ladder.result import Estimate
from penstock.ladder.statistics import FEWEST, FLOOR, Journal, Verdict, verdict
from penstock.tune.process import ScriptCommand, ScriptEnded, ScriptProcess
from penstock.tune.settings import TuneConfig

WARM_UP, LONGEST_WARM_UP = 3, 8
"""Steps that are not timed: at the least, and as long as successive ones differ by more than half."""
UNEVEN = 1.5
MOST_STEPS = 64
"""Steps of a turn at the most."""
LOSS_STEPS, LEAST_LOSS_STEPS = 48, 8
"""Steps whose losses are compared, at the most and at the least."""
LOSS_SHARE = 0.05
"""Share of the time that a seed of the script as it is may take for that."""
SEEDS = (1, 2)
"""Numbers added to the seeds of the script as it is, to see how much chance changes its loss."""


class Turns:
    """The script under different lines of settings, each with several seeds, by turns. A key is a line and a seed."""

    def __init__(self, command: ScriptCommand, config: TuneConfig) -> None:
        self.command, self.config = command, config
        self.folder = Path(config.output)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.first = ""
        """The line of the script as it is; recomputation where it runs out of memory without."""
        self.journal: Journal[tuple[str, int]] = Journal()
        self.floor = FLOOR
        self._processes: dict[tuple[str, int], ScriptProcess] = {}
        self.seconds: dict[tuple[str, int], float] = {}
        """Seconds of a step, as last measured."""
        self.compiling: dict[str, float] = {}
        self._losses: dict[tuple[str, int], list[float | None]] = {}
        self.memory: dict[tuple[str, int], int | None] = {}
        self.starting = 0.0
        """Seconds from the start of a process until it is warm."""
        self._length = math.inf
        """Optimizer steps of the script, once it has ended."""
        self._turns = self._started = 0

    def close_all(self) -> None:
        """End all processes."""
        for key in list(self._processes):
            self.close(key)

    def play(self, keys: Sequence[tuple[str, int]]) -> None:
        """One round, in which all take a turn; each round begins with another."""
        first = self._turns % len(keys)
        self._turns += 1
        self.journal.add({key: self._turn(key) for key in (*keys[first:], *keys[:first])})

    def _turn(self, key: tuple[str, int]) -> float:
        """Seconds per step of one turn. A script that is over begins again."""
        process = self.process(key)
        steps = min(MOST_STEPS, max(1, math.ceil(self.config.round_seconds / self.seconds[key])))
        rest = int(min(self._length - process.steps, steps))
        if rest < max(1, steps // 4):
            self.close(key)
            process = self.process(key)
            rest = int(min(self._length - process.steps, steps))
        try:
            taken = process.turn(max(1, rest))
        except ScriptEnded as end:
            self._losses[key] = process.losses
            self.close(key)
            if end.status != "ended" or end.steps < LONGEST_WARM_UP + FEWEST:
                raise
            self._length = min(self._length, end.steps)
            return self._turn(key)
        self.seconds[key], self._losses[key], self.memory[key] = taken, process.losses, process.memory
        return taken

    def lengthen(self, key: tuple[str, int]) -> None:
        """Let a process make as many steps as losses are compared over, if time allows."""
        process = self.process(key)
        affordable = int(LOSS_SHARE * self.config.budget / self.seconds[key])
        wanted = min(LOSS_STEPS - process.steps, affordable, self._length - process.steps - 1)
        if wanted > 0:
            with_end = process.steps + int(wanted)
            try:
                process.turn(int(wanted))
            except ScriptEnded as end:
                self._length = min(self._length, end.steps)
                if end.steps < with_end - 1 and end.status != "ended":
                    raise
                self.close(key)
                self.process(key)  # facts are asked of one that waits
        self._losses.setdefault(key, process.losses)
        if len(process.losses) > len(self._losses[key]):
            self._losses[key] = process.losses

    def process(self, key: tuple[str, int]) -> ScriptProcess:
        """The process of a line and seed, started and warm. Raises ScriptEnded."""
        if key in self._processes:
            return self._processes[key]
        line, seed = key
        began = time.perf_counter()
        self._started += 1
        log = own_file(self.folder, f"{self._started}.log")
        process = ScriptProcess(self.command, line, seed, log, self.config.timeout)
        try:
            taken = [process.first_step()]
            while len(taken) < WARM_UP or (
                len(taken) < LONGEST_WARM_UP and max(taken[-2:]) > UNEVEN * min(taken[-2:])
            ):
                taken.append(process.turn(1))
        except BaseException:
            process.close()
            raise
        self._processes[key] = process
        self.seconds[key] = min(taken[-2:])
        self._losses.setdefault(key, process.losses)
        if Plan.parse(line).compile != "none":
            self.compiling.setdefault(line, max(0.0, sum(taken) - len(taken) * self.seconds[key]))
        self.starting = max(self.starting, time.perf_counter() - began - self.compiling.get(line, 0.0))
        return process

    def keep(self, lines: Sequence[str]) -> None:
        """End the processes of all other lines."""
        for key in list(self._processes):
            if key[0] not in lines and key != (self.first, 0):
                self.close(key)

    def close(self, key: tuple[str, int]) -> None:
        """End the process of a line and seed, if there is one."""
        process = self._processes.pop(key, None)
        if process is not None:
            process.close()

    def ratio(self, line: str, over: str) -> Estimate | None:
        """The speed of a line to that of another, as far as they have taken turns."""
        return self.journal.joint().ratio((line, 0), (over, 0), self.floor)

    def verdict(self, line: str, over: str) -> Verdict:
        """Whether a line is faster than another, slower, or neither yet."""
        ratio = self.ratio(line, over)
        return "open" if ratio is None else verdict(ratio, ratio.rounds, self.config.rounds)

    def curve(self, line: str, seed: int = 0) -> list[float | None]:
        """The losses of the first steps of a line and seed."""
        return self._losses.get((line, seed), [])[:LOSS_STEPS]

    def difference(self, line: str) -> tuple[float | None, float | None]:
        """The loss of a line less the baseline's after the same steps, and what of that chance and rounding explain."""
        curves = [self.curve(line), *(self.curve(self.first, seed) for seed in (0, *SEEDS))]
        curves = [curve for curve in curves if curve]
        steps = min(len(curve) for curve in curves) if curves else 0
        if len(curves) < 2 + len(SEEDS) or steps < LEAST_LOSS_STEPS:
            return None, None
        known = [[loss for loss in curve[:steps] if loss is not None] for curve in curves]
        if any(len(curve) < steps for curve in known):
            return None, None  # the script's losses are no scalars
        tails = [tail_mean(curve) for curve in known]
        rounding = TOLERANCES[numerics_of(Plan.parse(line)).compute] * abs(tails[1])
        return tails[0] - tails[1], max(DEVIATIONS * statistics.stdev(tails[1:]), rounding)

    def is_finite(self, line: str) -> bool:
        """Whether the losses of a line are numbers, or those of the script as it is are none either."""
        baseline = [loss for loss in self.curve(self.first) if loss is not None]
        own = [loss for loss in self.curve(line) if loss is not None]
        return all(map(math.isfinite, own)) or not all(map(math.isfinite, baseline))
