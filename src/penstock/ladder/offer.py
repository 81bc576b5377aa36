"""Rungs that change results: a larger batch, another classifier, several processes. Each is tried on top of the best
Plan."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from penstock.ladder.account import Account
from penstock.ladder.arena import failure
from penstock.ladder.judge import NO_GAIN, UNPROVEN, equality, offered
from penstock.ladder.result import RungResult
from penstock.ladder.rung import Rung, Setting, Situation
from penstock.ladder.search import Search
from penstock.ladder.statistics import Verdict, verdict

log = logging.getLogger(__name__)

EQUAL_STEPS = 6
"""Steps after which the losses of several processes are compared with one process's."""


class Offer:
    """The fastest Plan, with rungs that change results: each is tried on top of the best, and kept where it pays."""

    def __init__(
        self, account: Account, search: Search, situation: Situation, best: Setting, rungs: Sequence[str]
    ) -> None:
        self.account, self.search, self.situation = account, search, situation
        self.best = best
        self.rungs = rungs
        """Names of the rungs of the Plan that these are put on top of, in the order of the path."""
        self._results: list[tuple[RungResult, Setting, Setting]] = []
        self._taken: dict[str, str] = {}

    @property
    def taken(self) -> tuple[str, ...]:
        """Names of the rungs that pay, without those that a later one of the same choice replaced."""
        return tuple(self._taken.values())

    def climb(self, rungs: Sequence[Rung], end: float) -> None:
        """Try each, with a fair part of the time until `end`."""
        for index, rung in enumerate(rungs):
            seconds = (end - time.perf_counter()) / (len(rungs) - index)
            result = self._rung(rung, seconds, end)
            setting = rung.apply(self.best, self.situation) if result.measured else self.best
            self._results.append((result, setting, self.best))
            if result.status == "offered":
                self.best = setting
                self._taken.pop(rung.alternatives, None)
                self._taken[rung.alternatives] = rung.name

    def results(self, *, carried: bool) -> list[RungResult]:
        """The results, with figures of all rounds that were measured by now. Without `carried` there is no fastest
        Plan, and nothing is part of it."""
        results = []
        for result, setting, before in self._results:
            if result.measured:
                change = result.loss_difference
                result = replace(self.account.with_figures(result, setting, before), loss_difference=change)
                if result.status == "offered" and self._verdict(result) != "faster":
                    result = replace(result, status="unproven", reason=UNPROVEN)
                if not carried and result.status in ("offered", "unproven"):
                    result = replace(result, status="not kept", reason=NO_GAIN["open"])
            results.append(result)
        return results

    def _rung(self, rung: Rung, seconds: float, end: float) -> RungResult:
        """The result of one rung, also where it cannot be applied or fails."""
        refusal = rung.refusal(self.best, self.situation)
        if refusal is not None:
            return replace(self.account.result(rung), reason=refusal)
        setting = rung.apply(self.best, self.situation)
        result = self.account.result(rung, setting)
        try:
            forecast = self.account.forecast(setting, self.best, rung.compared_by)
            result = replace(result, forecast=forecast)
            if self._least_seconds(rung, setting, result) > end - time.perf_counter():
                return replace(result, status="not run", reason="too little of the budget was left")
            return self._measured(rung, result, setting, time.perf_counter() + seconds)
        except Exception as error:  # a rung is an experiment: any way of failing is its result
            status, reason = failure(error)
            log.info("%s: %s: %s", rung.name, status, reason, exc_info=error if status == "failed" else None)
            return replace(result, status=status, reason=reason)
        finally:
            self.search.arena.clear()

    def _least_seconds(self, rung: Rung, setting: Setting, result: RungResult) -> float:
        """Seconds that measuring a setting takes at least if its speed is as predicted; notes its predicted step."""
        arena, account = self.search.arena, self.account
        before = account.predict(self.best).iteration_seconds
        slower = account.predict(setting).iteration_seconds / before
        step = arena.step_seconds.setdefault(setting, arena.step_seconds[self.best] * slower)
        trained = 2 * EQUAL_STEPS * step if rung.twin else account.losses.seconds(setting)
        turns = arena.turn_seconds(setting) + arena.turn_seconds(self.best)
        return arena.building(setting) + arena.building(self.best) + 3 * turns + trained

    def _measured(self, rung: Rung, result: RungResult, setting: Setting, end: float) -> RungResult:
        """Measure, train and judge a rung. Raises whatever the rung raises."""
        arena, account = self.search.arena, self.account
        arena.keep = {arena.baseline, self.best}
        arena.play([self.best, setting], 1)
        self.search.race([self.best, setting], [(setting, self.best)], end - account.losses.seconds(setting))
        account.weigh(setting)
        equal = change = None
        if rung.twin:
            plan, seed = setting.plan, arena.seed
            single = replace(
                plan, dp=1, tp=1, sp=False, pp=1, schedule="1f1b", virtual=1, cp=1, cp_exchange="ring", sharding="ddp",
                shard=1, offload="none", accumulate=plan.accumulate * plan.dp,
            )  # fmt: skip
            ranks = arena.trained(setting, seed, EQUAL_STEPS)
            alone = arena.trained(replace(setting, plan=single), seed, EQUAL_STEPS)
            equal = equality(plan, ranks.losses, alone.losses, ranks.norms, alone.norms)
            change = ranks.losses[-1] - alone.losses[-1]
        else:
            account.losses.curve(setting)
        result = account.with_figures(result, setting, self.best)
        if rung.twin:
            result = replace(result, equality=equal, loss_difference=change)
        status, reason = offered(result, self._verdict(result), carried=rung.carried)
        return replace(result, status=status, reason=reason)

    def _verdict(self, result: RungResult) -> Verdict:
        assert result.to_previous is not None  # it was measured
        return verdict(result.to_previous, result.to_previous.rounds, self.search.rounds)
