"""Builds contenders, keeps those still needed, times them in turns, and records the timings of each round."""

from __future__ import annotations

import math
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, get_args

from penstock.errors import ConfigError, PenstockError, ran_out_of_memory
from penstock.ladder.contender import Contender, ContenderEnded, Contenders, LossRun
from penstock.ladder.result import Estimate, Status
from penstock.ladder.rung import Setting
from penstock.ladder.statistics import Journal, Verdict, verdict

_SIGNAL = signal.SIGUSR2
_AGAIN = 1.0
"""Seconds between two attempts to stop the block: the first may be swallowed by code that catches every exception."""


class OutOfTime(PenstockError):
    """The block was stopped because it ran out of time."""


class _Stop(BaseException):
    """Raised inside the block; no `except Exception` there catches it."""


@contextmanager
def stopped_at(end: float, what: str) -> Iterator[None]:
    """Raise OutOfTime with the message `what` from the block if it still runs at `end` (`time.perf_counter()`).

    Python runs signal handlers in the main thread only, so a block in another thread is not stopped.
    """
    if math.isinf(end) or threading.current_thread() is not threading.main_thread():
        yield
        return
    main, over = threading.get_ident(), threading.Event()

    def stop(*_: Any) -> None:
        if not over.is_set():
            raise _Stop

    def watch() -> None:
        wait = max(0.1, end - time.perf_counter())  # not before the block has begun
        while not over.wait(wait):
            signal.pthread_kill(main, _SIGNAL)
            wait = _AGAIN

    before = signal.signal(_SIGNAL, stop)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        try:
            yield
        finally:
            over.set()
    except _Stop:
        raise OutOfTime(what) from None
    finally:
        watcher.join()
        signal.signal(_SIGNAL, before)


T = TypeVar("T")

COMPILE_SECONDS = {"none": 0.0, "blocks": 10.0, "whole": 30.0, "graphs": 30.0}
"""Expected seconds of compiling, from ViT-Ti/16 on one core; measured times replace them."""
AGAIN = 0.3
"""Time to compile a form again, as a share of the first time: torch's cache already holds its kernels."""

Tell = Callable[[str, str, Sequence[Setting], float], None]
"""Called before each long activity, with its name, its subject in words, the settings and the expected seconds."""


class Arena:
    """The contenders that are built, and the timings of all rounds."""

    def __init__(self, contenders: Contenders, rounds: int, round_seconds: float, tell: Tell) -> None:
        """`rounds` is the least number of rounds after which a small difference is believed."""
        self.contenders = contenders
        self.rounds, self.round_seconds = rounds, round_seconds
        self.baseline = contenders.first
        self.keep: set[Setting] = {contenders.first}
        """Settings that stay built as long as memory allows, because they race again and again."""
        self.wall: Journal[Setting] = Journal()
        self.processor: Journal[Setting] = Journal()
        self.timed_alone: set[Setting] = set()
        """Settings that were timed by themselves, because memory could not hold them beside the others."""
        self.floor = 0.0
        self.compile_until: Callable[[], float] = lambda: math.inf
        """Time, by `time.perf_counter()`, at which a compilation is stopped."""
        self.step_seconds: dict[Setting, float] = {}
        self.build_seconds: dict[Setting, float] = {}
        self.compile_seconds: dict[Setting, float | None] = {}
        self._built: dict[Setting, Contender] = {}
        self._playing: frozenset[Setting] = frozenset()
        self._tell = tell
        self._turn = 0

    # Building

    def build(self, setting: Setting) -> Contender:
        """The contender of a setting, built now unless it exists. Raises whatever building raises."""
        contender = self._built.pop(setting, None)
        if contender is None or not contender.alive:
            compiles = setting.plan.compile != "none"
            self._make_room(setting)
            words = "compiling" if compiles else "building"
            self._tell(words, setting.words, (setting,), self.building(setting))
            start, end = time.perf_counter(), math.inf
            if compiles and setting not in self.build_seconds:  # else its kernels come from torch's cache
                end = self.compile_until()
            with stopped_at(end, f"compiling was stopped after {end - start:.0f} s, when its time was over"):
                contender = self.contenders.contend(setting)
            self.build_seconds[setting] = time.perf_counter() - start
            self.compile_seconds[setting] = contender.compile_seconds
            self.step_seconds[setting] = contender.step_seconds
        self._built[setting] = contender  # moves to the end of the queue of contenders to drop
        return contender

    def building(self, setting: Setting) -> float:
        """Expected seconds to build a setting; 0 if it is built already."""
        if setting in self._built:
            return 0.0
        eager = [s for at, s in self.build_seconds.items() if at.plan.compile == "none"]
        least, region = statistics.median(eager) if eager else 1.0, setting.plan.compile
        if region == "none":
            return least
        alike = [s for at, s in self.build_seconds.items() if at.plan.compile == region]
        compiling = max(alike) if alike else COMPILE_SECONDS[region]
        compiled_before = any(_form(at) == _form(setting) for at in self.build_seconds)
        return least + compiling * (AGAIN if compiled_before else 1.0)

    def _make_room(self, setting: Setting) -> None:
        """Drop the contenders that have been idle longest, until the rest fit into memory beside `setting`."""
        room = self.contenders.room(setting)
        while len(self._built) + 1 > room:
            waiting = [built for built in self._built if built not in self._playing]
            free = [built for built in waiting if built not in self.keep] or waiting
            if not free:
                return
            self.retire(free[0])

    def retire(self, setting: Setting) -> None:
        """Drop a setting and free its memory."""
        contender = self._built.pop(setting, None)
        if contender is not None:
            contender.close()

    def clear(self) -> None:
        """Drop all settings that are not in `keep`."""
        for setting in [built for built in self._built if built not in self.keep]:
            self.retire(setting)

    # Measuring

    def play(self, settings: Sequence[Setting], rounds: int) -> None:
        """Play rounds in which all settings take turns, starting with a different one each time. Settings with the same
        form of host memory follow each other, because each change of the form costs a step.

        If memory cannot hold all of them, the last is timed by itself and compared with the latest timings of the
        others. Raises whatever building one of them raises.
        """
        settings = list(dict.fromkeys(settings))
        room = self.contenders.room(settings[0])
        if len(settings) > room:
            # Play groups that share one setting, through which all settings can be compared.
            for at in range(0, len(settings) - 1, room - 1):
                self.play(settings[at : at + room], rounds)
            return
        self._playing = frozenset(settings)
        last = settings[-1]
        together = self._with_room(lambda: [(setting, self.build(setting)) for setting in settings], last)
        contenders = together or [(last, self._built[last])]
        self._tell("timing", "", settings, rounds * self.round_of(settings))
        for _ in range(rounds):
            first = self._turn % len(contenders)
            self._turn += 1
            order = contenders[first:] + contenders[:first]
            form = self.contenders.form(order[0][0])
            order.sort(key=lambda pair: self.contenders.form(pair[0]) != form)
            timings = {setting: contender.timed(self.round_seconds) for setting, contender in order}
            walls = {setting: timing.wall for setting, timing in timings.items()}
            self.step_seconds |= walls
            if together is None:
                walls |= {s: self.step_seconds[s] for s in settings if s not in walls}
                self.timed_alone.add(last)
            else:
                busy = {s: timing.processor for s, timing in timings.items() if timing.processor is not None}
                if busy:
                    self.processor.add({s: max(seconds, 1e-9) for s, seconds in busy.items()})
            self.wall.add(walls)

    def turn_seconds(self, setting: Setting) -> float:
        """Expected seconds of a setting's turn in one round."""
        return max(self._step(setting), self.round_seconds)

    def round_of(self, settings: Sequence[Setting]) -> float:
        """Expected seconds of one round in which these settings, already built, take turns."""
        seconds = sum(map(self.turn_seconds, settings))
        forms = {self.contenders.form(setting): setting for setting in settings}
        if len(forms) > 1:  # the first turn after a change of form begins with a step that is not timed
            seconds += sum(map(self._step, forms.values()))
        return seconds

    def _step(self, setting: Setting) -> float:
        return self.step_seconds.get(setting, self.step_seconds.get(self.baseline, 0.0))

    def ratio(self, setting: Setting, over: Setting) -> Estimate | None:
        """Speed of a setting relative to `over`, in samples per second, from all rounds of the run."""
        step_speed = self.wall.joint().ratio(setting, over, self.floor)
        return step_speed and step_speed.times(self.work(setting, over))

    def speed(self, setting: Setting) -> float | None:
        """Speed of a setting relative to the baseline, from all rounds, without an interval."""
        if setting == self.baseline:
            return 1.0
        step_speed = self.wall.joint().speed(setting, self.baseline)
        return step_speed and step_speed * self.work(setting, self.baseline)

    def work(self, setting: Setting, over: Setting) -> float:
        """Samples per step of a setting, divided by those of `over`."""
        return self.contenders.samples(setting) / self.contenders.samples(over)

    def verdict_of(self, setting: Setting, over: Setting) -> Verdict:
        """The verdict on two settings after all rounds so far."""
        ratio = self.ratio(setting, over)
        return "open" if ratio is None else verdict(ratio, ratio.rounds, self.rounds)

    def faster(self, setting: Setting, over: Setting) -> bool:
        """Whether all rounds so far show that a setting is faster than `over`, beyond the noise."""
        return self.verdict_of(setting, over) == "faster"

    def race(self, settings: Sequence[Setting], pairs: Sequence[tuple[Setting, Setting]], end: float) -> None:
        """Let settings take turns until all pairs are decided or the time is up; settings of decided pairs drop out."""
        for _ in range(self.contenders.most_rounds):
            undecided = [pair for pair in pairs if self.verdict_of(*pair) == "open"]
            running = [s for s in settings if any(s in pair for pair in undecided)]
            left = end - time.perf_counter()
            if not running or left < self.round_of(running) + sum(map(self.building, running)):
                return
            self.play(running, 1)

    def memory(self, setting: Setting) -> list[int]:
        """Peak bytes of one step of a setting, by rank; builds it if necessary."""
        self._tell("weighing", setting.words, (setting,), 2 * self.turn_seconds(setting))
        return self.build(setting).memory()

    def trained(self, setting: Setting, seed: int, steps: int) -> LossRun:
        """The loss run of a setting; the built contenders stay if memory allows."""
        if self.contenders.loss_runs:
            self._tell("training", setting.words, (setting,), steps * self._step(setting))

        def run() -> LossRun:
            return self.contenders.trained(setting, seed, steps)

        return self._with_room(run) or run()

    def _with_room(self, work: Callable[[], T], alone: Setting | None = None) -> T | None:
        """Result of `work`. If a GPU's memory runs out, drop all contenders, build `alone` and return None."""
        try:
            return work()
        except Exception as error:
            if not self.contenders.shares_gpu or failure(error)[0] != "out of memory":
                raise
        # Outside `except`, because the exception's frames hold tensors until it ends.
        for contender in self._built.values():
            contender.close()
        self._built.clear()
        if alone is not None:
            self.build(alone)
        return None


def _form(setting: Setting) -> tuple[object, ...]:
    """Everything that determines the compiled code: two settings with the same form share it."""
    p = setting.plan
    return (
        setting.model, p.compile, p.precision, p.dtype, p.matmul, p.attention, p.token_order, p.micro_batch, p.products,
        p.experts, p.gpus,
    )  # fmt: skip


def busy_seconds() -> float | None:
    """Processor time of all programs so far on the cores that this process may use; None if unknown."""
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
        own_cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    except (OSError, AttributeError):
        return None
    # user, nice, system, then idle and waiting, then interrupts
    ticks = [[int(word) for word in line.split()[1:7]] for line in lines if line.split()[0] in own_cores]
    return sum(sum(t[:3]) + t[5] for t in ticks) / os.sysconf("SC_CLK_TCK")


def failure(error: BaseException) -> tuple[Status, str]:
    """Status of a rung that raised an exception, and a line for the report."""
    lines = str(error).strip().splitlines()
    first = lines[0] if lines else type(error).__name__
    if isinstance(error, ContenderEnded):
        return next((status for status in get_args(Status) if status == error.status), "failed"), first
    if ran_out_of_memory(error):
        return "out of memory", first
    if isinstance(error, OutOfTime):
        return "not run", first
    if isinstance(error, ConfigError):
        return "unsupported", first
    return "failed", f"{type(error).__name__}: {first}"
