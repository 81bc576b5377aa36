"""The greedy climb: each rung in turn is added to the best setting so far, and stays if it pays.

Scripts are tuned so, and so are the rungs of a model that change results. Free of torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from penstock.ladder.account import Account
from penstock.ladder.arena import failure
from penstock.ladder.losses import NO_GAIN, UNPROVEN, equality, judged
from penstock.ladder.result import RungResult
from penstock.ladder.rung import Rung, Setting, Situation
from penstock.ladder.statistics import Verdict, verdict

log = logging.getLogger(__name__)

EQUAL_STEPS = 6
"""Number of steps after which the losses of several processes are compared with those of one process."""


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
    """A greedy climb from `best`."""

    def __init__(
        self,
        account: Account,
        situation: Situation,
        best: Setting,
        refusal: Callable[[Rung, Setting], str | None],
        seed: int = 0,
    ) -> None:
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
            account.losses.curve(setting)
        result = account.with_figures(result, setting, self.best)
        if rung.twin:
            result = replace(result, equality=equal, loss_difference=change)
        status, reason = judged(result, rung, self._verdict(result))
        return replace(result, status=status, reason=reason)

    def _verdict(self, result: RungResult) -> Verdict:
        assert result.to_previous is not None  # it was measured
        return verdict(result.to_previous, result.to_previous.rounds, self.arena.rounds)
