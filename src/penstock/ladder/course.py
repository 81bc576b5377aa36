"""The part common to all climbs: time, noise, the last race, and advice on the budget. Free of torch."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from penstock.ladder import page  # noqa: F401  # registers how a report looks in a notebook
from penstock.ladder.account import Account
from penstock.ladder.arena import Arena, busy_seconds, failure
from penstock.ladder.contender import Contenders
from penstock.ladder.result import Control, Estimate, LadderReport, Nearest, Phase, Progress, RungResult
from penstock.ladder.rung import Setting
from penstock.ladder.statistics import FEWEST, FLOOR, SMALL
from penstock.report import record

log = logging.getLogger(__name__)

STANDINGS = 5
"""Number of fastest settings that are shown while the climb goes on."""
BUSY = 0.1
"""Share of the cores that other programs may keep busy before the report mentions it."""
MOST_LONGER = 50.0
"""A longer climb is not advised if it would need more than this many times the budget."""

OnProgress = Callable[[Progress], None]
"""Called before any activity that takes time."""


class Course:
    """Everything that climbs of models and of scripts have in common."""

    account: Account

    def __init__(
        self, contenders: Contenders, budget: float, rounds: int, round_seconds: float, on_progress: OnProgress,
    ) -> None:  # fmt: skip
        self.contenders, self.budget = contenders, budget
        self.start = time.perf_counter()
        self.phase: Phase = "baseline"
        self.notes: list[str] = []
        self.ranked: Callable[[], Iterable[Setting]] = tuple
        """Settings that were measured, the fastest first."""
        self._on_progress = on_progress
        self.arena = Arena(contenders, rounds, round_seconds, self._tell)
        self.arena.compile_until = lambda: self.start + self.budget

    @property
    def first(self) -> Setting:
        """The baseline."""
        return self.arena.baseline

    def watched(self, climb: Callable[[], LadderReport]) -> LadderReport:
        """The report of `climb`, with a note if other programs used the machine meanwhile and this process was alone in
        it. All processes are ended in any case."""
        busy, own, began = busy_seconds(), time.process_time(), time.perf_counter()
        try:
            report = climb()
        finally:
            self.arena.close()
        after, own = busy_seconds(), time.process_time() - own
        if busy is None or after is None or report.procs > 1 or report.script:
            return report
        others = max(0.0, (after - busy - own) / max(time.perf_counter() - began, 1e-9))
        if others > BUSY * (os.cpu_count() or 1):
            note = f"Other programs kept {others:.1f} of {os.cpu_count()} cores busy while this measured: "
            note += "settings took turns, so ratios are valid, but a quiet machine detects smaller gains."
            report = replace(report, notes=(*report.notes, note))
        return replace(report, others_busy=others)

    def control(self, twin: Setting) -> Control | None:
        """Race the baseline against itself and measure how much the two differ; None if not even two rounds fit."""
        arena, first, most = self.arena, self.first, self.contenders.control_rounds
        turn = arena.turn_seconds(first)
        affordable = int(self.contenders.control_share * self.budget / (2 * turn))
        if affordable < 2:
            arena.floor = FLOOR
            self.notes.append(
                f"A step of the baseline takes {turn:.1f} s. Too few fit into the time to compare the baseline with "
                f"itself, so the noise floor is taken to be {FLOOR:.1%}. A larger --budget detects more, "
                f"{self.contenders.shorter}."
            )
            return None
        arena.play([first, twin], max(FEWEST, min(most, affordable)))
        ratio, processor = self.account.ratio(twin, first), self.account.processor_ratio(twin, first)
        assert ratio is not None  # the two have just raced
        arena.floor = arena.wall.joint().noise_floor(first, twin)
        return Control(ratio=ratio, processor_ratio=processor, floor=arena.floor)

    def last_race(self, ends: Sequence[Setting], between: Sequence[Setting], end: float) -> None:
        """Race the first and the last setting once more, with the settings between them that are still built: both ends
        fix the whole ladder in the joint estimate. It ends when the intervals are narrow, or the time is up."""
        arena = self.arena
        racing = list(dict.fromkeys([*ends, *(s for s in between if not arena.building(s))]))
        if len(racing) == 1:
            return
        arena.keep = set(racing)
        arena.clear()
        end -= sum(map(arena.building, ends))
        if FEWEST * arena.round_of(racing) > end - time.perf_counter():
            racing = list(dict.fromkeys(ends))
        for turn in range(self.contenders.most_rounds):
            done = turn >= arena.rounds and all(map(self._narrow, racing))
            if turn >= FEWEST and (done or arena.round_of(racing) > end - time.perf_counter()):
                return
            try:
                arena.play(racing, 1)
            except Exception as error:  # earlier measurements stay valid
                log.info("the last race", exc_info=error)
                self.notes.append(f"The last race ended early: {failure(error)[1]}.")
                return

    def _narrow(self, setting: Setting) -> bool:
        """Whether the interval of a setting's ratio to the baseline is narrow enough to stop early."""
        ratio = self.account.ratio(setting, self.first)
        return ratio is not None and ratio.high <= (1 + SMALL) * ratio.value

    def nearest(self, settings: Iterable[Setting]) -> Nearest | None:
        """The most promising setting that is not faster beyond the noise, and the budget that would decide it."""
        ratios = {setting: self.account.ratio(setting, self.first) for setting in settings}
        known = {s: ratio for s, ratio in ratios.items() if ratio is not None and s != self.first}
        if not known:
            return None
        best = max(known, key=lambda setting: known[setting].value)
        return Nearest(plan=best.words, ratio=known[best], budget=self._deciding_budget(known[best]))

    def _deciding_budget(self, ratio: Estimate) -> float | None:
        """Seconds after which a climb should distinguish this gain from none; None if unreasonably long."""
        limit = math.log1p(self.arena.floor)
        gain, width = math.log(ratio.value), math.log(ratio.high / ratio.value)
        longer = (width**2 - limit**2) / (gain**2 - limit**2) if gain > limit else math.inf
        # Half as long again, because the gain itself is only known this well.
        return 1.5 * longer * self.budget if longer < MOST_LONGER else None

    def baseline(self, title: str, why: str) -> RungResult:
        """The first row of the report."""
        forecast = self.account.forecast(self.first, self.first)
        result = RungResult(
            name="baseline", title=title, why=why, status="baseline", plan=self.first.words, forecast=forecast
        )
        return self.account.with_figures(result, self.first, self.first)

    def report(self, **own: Any) -> LadderReport:
        """The report: the fields that every climb has, and its `own`."""
        losses = self.account.losses
        return LadderReport(
            title=self.contenders.title, unit=self.contenders.unit, noise=losses.noise_if_run, rounds=self.arena.rounds,
            loss_steps=losses.steps, environment=record.environment(), wall_seconds=time.perf_counter() - self.start,
            notes=(*self.notes, *losses.notes), **own,
        )  # fmt: skip

    def _tell(self, doing: Any, words: str, settings: Sequence[Setting], expected: float) -> None:
        """Report the next activity and the current standings."""
        ranked = [*self.ranked()][:STANDINGS]
        standings = [(setting.words, self.account.ratio(setting, self.first)) for setting in ranked]
        progress = Progress(
            phase=self.phase, doing=doing, what=words or f"{len(settings)} settings in turn",
            plans=tuple(setting.words for setting in settings), expected_seconds=expected,
            spent=time.perf_counter() - self.start, budget=self.budget,
            standings=tuple((plan, ratio) for plan, ratio in standings if ratio is not None),
        )  # fmt: skip
        self._on_progress(progress)
