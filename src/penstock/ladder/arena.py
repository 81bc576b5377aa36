"""Builds contenders, keeps those that are needed, lets them take turns, and writes down what each round took."""

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
"""Seconds between two attempts to stop: code that swallows every exception is asked again."""


class OutOfTime(PenstockError):
    """The block was stopped because its time was over."""


class _Stop(BaseException):
    """Raised in the block; no `except Exception` inside it takes it for a failure of its own."""


@contextmanager
def stopped_at(end: float, what: str) -> Iterator[None]:
    """Raise OutOfTime with `what` as its message from the block if it still runs at `end` (`time.perf_counter()`).

    Python runs signal handlers in the main thread only, so that a block in another thread is not stopped.
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

COMPILE_SECONDS = {"none": 0.0, "blocks": 10.0, "whole": 30.0}
"""Seconds of compiling before any was measured: those of ViT-Ti/16 on one core. What is compiled first corrects it."""
AGAIN = 0.3
"""Compile time of a form that was compiled before, as a share of the first time: torch's cache has its kernels."""

Tell = Callable[[str, str, Sequence[Setting], float], None]
"""Called before anything that takes long with the activity, its subject in words, the settings and the seconds."""


class Arena:
    """The contenders that are built, and the journals of all rounds."""

    def __init__(self, contenders: Contenders, rounds: int, round_seconds: float, tell: Tell) -> None:
        """`rounds` are the least before a small difference is believed."""
        self.contenders = contenders
        self.rounds, self.round_seconds = rounds, round_seconds
        self.baseline = contenders.first
        self.keep: set[Setting] = {contenders.first}
        """Settings that stay built while there is memory: they race again and again."""
        self.wall: Journal[Setting] = Journal()
        self.processor: Journal[Setting] = Journal()
        self.timed_alone: set[Setting] = set()
        """Settings that memory did not hold beside the others, so that they were timed by themselves."""
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
        """The contender of a setting; built now if it is not there. Raises whatever building raises."""
        contender = self._built.pop(setting, None)
        if contender is None or not contender.alive:
            compiles = setting.plan.compile != "none"
            self._make_room(setting)
            words = "compiling" if compiles else "building"
            self._tell(words, setting.words, (setting,), self.building(setting))
            start, end = time.perf_counter(), math.inf
            if compiles and setting not in self.build_seconds:  # again, its kernels come from torch's cache
                end = self.compile_until()
            with stopped_at(end, f"compiling was stopped after {end - start:.0f} s, when its time was over"):
                contender = self.contenders.contend(setting)
            self.build_seconds[setting] = time.perf_counter() - start
            self.compile_seconds[setting] = contender.compile_seconds
            self.step_seconds[setting] = contender.step_seconds
        self._built[setting] = contender  # the last in the queue for being let go
        return contender

    def building(self, setting: Setting) -> float:
        """Seconds that building a setting should take; 0 where it is built."""
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
        """Let go of those that waited longest, so that those who wait fit into memory beside this one."""
        room = self.contenders.room(setting)
        while len(self._built) + 1 > room:
            waiting = [setting_built for setting_built in self._built if setting_built not in self._playing]
            free = [setting_built for setting_built in waiting if setting_built not in self.keep] or waiting
            if not free:
                return
            self.retire(free[0], force=True)

    def retire(self, setting: Setting, *, force: bool = False) -> None:
        """Let go of a setting, unless it is to stay, and give its memory back."""
        if setting in self.keep and not force:
            return
        contender = self._built.pop(setting, None)
        if contender is not None:
            contender.close()

    def clear(self) -> None:
        """Let go of all that need not stay."""
        for setting in list(self._built):
            self.retire(setting)

    def close(self) -> None:
        """End the processes, if there are any."""
        self.contenders.end()

    # Measuring

    def play(self, settings: Sequence[Setting], rounds: int) -> None:
        """Play rounds in which all settings take turns; each begins with another. Those of one form of host memory
        follow each other, because each change of it costs a step.

        Where memory does not hold all of them, the last is timed by itself, and compared with what the others took
        last. Raises whatever building one of them raises.
        """
        settings = list(dict.fromkeys(settings))
        room = self.contenders.room(settings[0])
        if len(settings) > room:
            # Groups that share a setting: through it each can be compared with all.
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
        """Seconds of one turn of a setting."""
        return max(self._step(setting), self.round_seconds)

    def round_of(self, settings: Sequence[Setting]) -> float:
        """Seconds of one round in which settings that are built take turns."""
        seconds = sum(map(self.turn_seconds, settings))
        forms = {self.contenders.form(setting): setting for setting in settings}
        if len(forms) > 1:  # whoever follows one of the other form takes a step that is not timed
            seconds += sum(map(self._step, forms.values()))
        return seconds

    def _step(self, setting: Setting) -> float:
        return self.step_seconds.get(setting, self.step_seconds.get(self.baseline, 0.0))

    def ratio(self, setting: Setting, over: Setting) -> Estimate | None:
        """Speed of a setting over another's in samples per second, from all rounds of the run."""
        step_speed = self.wall.joint().ratio(setting, over, self.floor)
        return step_speed and step_speed.times(self.work(setting, over))

    def speed(self, setting: Setting) -> float | None:
        """A setting's speed over the baseline's by all rounds, without an interval."""
        if setting == self.baseline:
            return 1.0
        step_speed = self.wall.joint().speed(setting, self.baseline)
        return step_speed and step_speed * self.work(setting, self.baseline)

    def work(self, setting: Setting, over: Setting) -> float:
        """Samples of a step of one setting, over those of another."""
        return self.contenders.samples(setting) / self.contenders.samples(over)

    def verdict_of(self, setting: Setting, over: Setting) -> Verdict:
        """The verdict of all rounds so far on the two."""
        ratio = self.ratio(setting, over)
        return "open" if ratio is None else verdict(ratio, ratio.rounds, self.rounds)

    def faster(self, setting: Setting, over: Setting) -> bool:
        """Whether all rounds so far say that one setting is faster than another, beyond the noise."""
        return self.verdict_of(setting, over) == "faster"

    def race(self, settings: Sequence[Setting], pairs: Sequence[tuple[Setting, Setting]], end: float) -> None:
        """Let settings take turns until each pair is decided, or the time is up. Those that are decided step out."""
        for _ in range(self.contenders.most_rounds):
            undecided = [pair for pair in pairs if self.verdict_of(*pair) == "open"]
            running = [s for s in settings if any(s in pair for pair in undecided)]
            left = end - time.perf_counter()
            if not running or left < self.round_of(running) + sum(map(self.building, running)):
                return
            self.play(running, 1)

    def memory(self, setting: Setting) -> list[int]:
        """Peak bytes of one step of a setting that is built, by rank."""
        self._tell("weighing", setting.words, (setting,), 2 * self.turn_seconds(setting))
        return self.build(setting).memory()

    def trained(self, setting: Setting, seed: int, steps: int) -> LossRun:
        """The loss run of a setting, beside the built contenders if memory allows."""
        step = self.step_seconds.get(setting, self.step_seconds.get(self.baseline, 0.0))
        if self.contenders.loss_runs:
            self._tell("training", setting.words, (setting,), steps * step)

        def run() -> LossRun:
            return self.contenders.trained(setting, seed, steps)

        return self._with_room(run) or run()

    def _with_room(self, work: Callable[[], T], alone: Setting | None = None) -> T | None:
        """Result of `work`; None where a GPU's memory runs out: then all others are let go, and `alone` is built."""
        try:
            return work()
        except Exception as error:
            if not self.contenders.shares_gpu or failure(error)[0] != "out of memory":
                raise
        # Only here, where the exception and the frames it held are gone, is its memory free.
        for contender in self._built.values():
            contender.close()
        self._built.clear()
        if alone is not None:
            self.build(alone)
        return None


def _form(setting: Setting) -> tuple[object, ...]:
    """Everything that decides the code that is compiled: two settings of one form share it."""
    p = setting.plan
    return (
        setting.model, p.compile, p.precision, p.dtype, p.matmul, p.attention, p.token_order, p.micro_batch, p.products,
        p.experts, p.gpus,
    )  # fmt: skip


def busy_seconds() -> float | None:
    """Processor time that all programs together took so far on the cores that this one may use; None if unknown."""
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
