"""The part common to all climbs: time, noise, the last race, advice on the budget; and the greedy climb. Free of torch.

`Greedy` adds each rung in turn to the best setting so far, and keeps it if it pays. That is how scripts are tuned, and
how a model's rungs that change results are tried.
"""

from __future__ import annotations

import logging
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.ladder import page  # noqa: F401  # registers how a report looks in a notebook
from penstock.ladder.account import NO_GAIN, UNPROVEN, Account, equality, judged
from penstock.ladder.arena import Arena, busy_seconds, failure
from penstock.ladder.contender import Contenders
from penstock.ladder.result import Control, Estimate, LadderReport, Nearest, Phase, Progress, RungResult
from penstock.ladder.rung import Rung, Setting, Situation
from penstock.ladder.statistics import FEWEST, FLOOR, SMALL, Verdict, verdict
from penstock.report import record

log = logging.getLogger(__name__)

STANDINGS = 5
"""Number of fastest settings that are shown while the climb goes on."""
BUSY = 0.1
"""Share of the cores that other programs may keep busy before the report mentions it."""
MOST_LONGER = 50.0
"""A longer climb is not advised if it would need more than this many times the budget."""

EQUAL_STEPS = 6
"""Number of steps after which the losses of several processes are compared with those of one process."""

OnProgress = Callable[[Progress], None]
"""Called before any activity that takes time."""


class Course(ABC):
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

    @abstractmethod
    def _climb(self, rungs: Sequence[Rung]) -> LadderReport:
        """Run all phases."""

    def run(self, rungs: Sequence[Rung]) -> LadderReport:
        """Climb and report on all rungs. A note is added if other programs used the machine meanwhile, unless the climb
        itself has several processes. All of these are ended, even after an error."""
        busy, own, began = busy_seconds(), time.process_time(), time.perf_counter()
        try:
            report = self._climb(rungs)
        finally:
            self.contenders.end()
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
        """Race the first and the last setting once more, with the settings between them that are still built, until the
        intervals are narrow or the time is up. The joint estimate of all steps depends most on the two ends."""
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
            title=self.contenders.title, unit=self.contenders.unit, noise=losses.noise, rounds=self.arena.rounds,
            loss_steps=losses.steps, environment=record.environment(), wall_seconds=time.perf_counter() - self.start,
            notes=(*self.notes, *losses.notes), **own,
        )  # fmt: skip

    def _tell(self, doing: Any, words: str, settings: Sequence[Setting], expected: float) -> None:
        """Report the next activity and the current standings."""
        ranked = [*self.ranked()][:STANDINGS]
        standings = [(setting.words, self.account.ratio(setting, self.first)) for setting in ranked]
        progress = Progress(
            phase=self.phase, doing=doing, subject=words or f"{len(settings)} settings in turn",
            plans=tuple(setting.words for setting in settings), expected_seconds=expected,
            spent=time.perf_counter() - self.start, budget=self.budget,
            standings=tuple((plan, ratio) for plan, ratio in standings if ratio is not None),
        )  # fmt: skip
        self._on_progress(progress)


@dataclass(frozen=True, slots=True)
class Attempt:
    """A rung, measured on top of the setting before it."""

    rung: Rung
    result: RungResult
    setting: Setting
    before: Setting

    @property
    def paid(self) -> bool:
        """Whether the climb continued from its setting."""
        return self.result.status in ("kept", "offered")


class Greedy:
    """A greedy climb: adds one rung after the other to `best`, the best setting so far."""

    def __init__(
        self, account: Account, situation: Situation, best: Setting, refusal: Callable[[Rung, Setting], str | None],
        seed: int = 0,
    ) -> None:  # fmt: skip
        """`refusal` returns why a rung cannot be added to a setting, or None."""
        self.account, self.arena, self.situation = account, account.arena, situation
        self.best, self._refusal, self._seed = best, refusal, seed
        self.attempts: dict[str, Attempt] = {}
        """The last attempt with each rung; those that paid are in the order in which they were added."""

    @property
    def taken(self) -> tuple[str, ...]:
        """Names of the rungs that pay, except those replaced by a later rung of the same choice."""
        paid = {a.rung.alternatives: a.rung.name for a in self.attempts.values() if a.paid}
        return tuple(paid.values())

    def climb(self, rungs: Iterable[Rung], end: float, *, share: bool = True) -> None:
        """Try each rung until `end`; with `share` each gets an equal part of the remaining time."""
        rungs = [*rungs]
        for index, rung in enumerate(rungs):
            seconds = (end - time.perf_counter()) / (len(rungs) - index if share else 1)
            attempt = self._attempt(rung, seconds, end)
            before = self.attempts.get(rung.name)
            if before is None or attempt.result.measured:
                self.attempts.pop(rung.name, None)
                self.attempts[rung.name] = attempt
            if attempt.paid:
                self.best = attempt.setting
            self.arena.keep = {self.arena.baseline, self.best}
            self.arena.clear()

    def results(self, names: Iterable[str], *, carried: Sequence[str]) -> list[RungResult]:
        """Results of these attempts, with figures from all rounds so far. A rung that paid counts as not kept unless it
        is `carried`, that is, part of a setting that is reported."""
        results = []
        for attempt in (self.attempts[name] for name in names):
            result = attempt.result
            if result.measured:
                change, allowed = result.loss_difference, result.allowed_difference
                result = self.account.with_figures(result, attempt.setting, attempt.before)
                result = replace(result, loss_difference=change, allowed_difference=allowed)
                if attempt.paid and attempt.rung.name not in carried:
                    result = replace(result, status="not kept", reason=NO_GAIN["open"])
                elif attempt.paid and self._verdict(result) != "faster":
                    result = replace(result, status="unproven", reason=UNPROVEN)
            results.append(result)
        return results

    def _attempt(self, rung: Rung, seconds: float, end: float) -> Attempt:
        """Result of one rung, even if it cannot be applied or fails."""
        before = self.best
        refusal = self._refusal(rung, before)
        if refusal is not None:
            return Attempt(rung, replace(self.account.result(rung), reason=refusal), before, before)
        setting = rung.apply(before, self.situation)
        result = self.account.result(rung, setting)
        try:
            result = replace(result, forecast=self.account.forecast(setting, before, rung.compared_by))
            if self._least_seconds(rung, setting) > end - time.perf_counter():
                result = replace(result, status="not run", reason="too little of the budget was left")
            else:
                result = self._measured(rung, result, setting, time.perf_counter() + seconds)
        except Exception as error:  # a rung is an experiment: every kind of failure is its result
            status, reason = failure(error)
            log.info("%s: %s: %s", rung.name, status, reason, exc_info=error if status == "failed" else None)
            result = replace(result, status=status, reason=reason)
        return Attempt(rung, result, setting, before)

    def _least_seconds(self, rung: Rung, setting: Setting) -> float:
        """Least seconds to measure a setting if its speed is as predicted; stores its predicted step time."""
        arena, losses = self.arena, self.account.losses
        slower = self.account.contenders.slower(setting, self.best)
        step = arena.step_seconds.setdefault(setting, arena.step_seconds[self.best] * slower)
        trained = 2 * EQUAL_STEPS * step if rung.twin else losses.seconds(setting)
        turns = arena.turn_seconds(setting) + arena.turn_seconds(self.best)
        return arena.building(setting) + arena.building(self.best) + 3 * turns + trained

    def _measured(self, rung: Rung, result: RungResult, setting: Setting, end: float) -> RungResult:
        """Time a rung, train with it and judge it. Raises whatever the rung raises."""
        arena, account = self.arena, self.account
        arena.keep = {arena.baseline, self.best}
        arena.play([self.best, setting], 1)
        arena.race([self.best, setting], [(setting, self.best)], end - account.losses.seconds(setting))
        account.weigh(setting)
        equal = change = None
        if rung.twin:
            plan = setting.plan
            single = replace(
                plan, dp=1, tp=1, sp=False, pp=1, schedule="1f1b", virtual=1, cp=1, cp_exchange="ring", sharding="ddp",
                shard=1, offload="none", accumulate=plan.accumulate * plan.dp,
            )  # fmt: skip
            ranks = arena.trained(setting, self._seed, EQUAL_STEPS)
            on_one = arena.trained(replace(setting, plan=single), self._seed, EQUAL_STEPS)
            equal = equality(plan, ranks, on_one)
            change = ranks.losses[-1] - on_one.losses[-1]
        else:
            account.losses.measure(setting)
        result = account.with_figures(result, setting, self.best)
        if rung.twin:
            result = replace(result, equality=equal, loss_difference=change)
        status, reason = judged(result, rung, self._verdict(result))
        return replace(result, status=status, reason=reason)

    def _verdict(self, result: RungResult) -> Verdict:
        assert result.to_previous is not None  # it was measured
        return verdict(result.to_previous, result.to_previous.rounds, self.arena.rounds)
