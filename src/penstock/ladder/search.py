"""Finds the fastest setting with the same results: tries promising candidates, then races fewer and fewer of them.

`scout` builds and times one candidate after the other, always the one with the largest expected gain per second of
building and timing, by the planner's forecast as corrected so far. `halve` races the best of them, and repeatedly drops
the slower half. `top` changes one choice of the best at a time, and moves on where that is faster. Free of torch.
"""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from penstock.ladder.arena import Arena, failure
from penstock.ladder.result import Status
from penstock.ladder.rung import Setting
from penstock.ladder.space import Candidate, Corrected, Key, Space, expected_gain
from penstock.ladder.statistics import FEWEST

log = logging.getLogger(__name__)

PROMISING = 0.005
"""Expected gain, as a ratio less one, below which a candidate is not tried."""
CHEAP = 0.25
"""Trials that take less than this share of the time left count as equally expensive. By gain per second alone the
search would spend all its time on cheap neighbours of known candidates, and never pay for a long compilation."""
LOOK_SECONDS = 3.0
"""Seconds of a trial of a candidate with short steps: up to `LOOKS` rounds."""
LOOKS = 3
SURPRISE = 0.1
"""Largest difference between a trial and its forecast, in logarithms, before the trial is repeated."""
FINALISTS, WITHIN = 8, 0.15
"""Most settings in a race, and how much slower than the fastest they may be, in logarithms."""
BEAM = 120
"""Number of keys that are kept after each choice of a beam search: more than candidates, as some are not legal."""
DEVIATIONS_FOR = 80
"""Number of candidates whose uncertainty is computed: those that are forecast to be the fastest."""
MOVES = 6
"""Most moves of `Search.top`."""
IDLE = 0.002
"""A rung is left out if it gains less than this both as measured and by the forecast: a Plan has no more than it needs.
The forecast counts because in a few rounds on a busy machine nearly every rung seems to gain nothing."""

AGREED = 0.01
"""A setting that no race could separate from the best replaces it if it is faster by more than this both as measured
and by the planner's forecast. The planner forecasts no difference between equivalent kernels."""


class Search:
    """Knowledge of the candidates, and the races between them."""

    def __init__(self, arena: Arena, space: Space, predicted: Callable[[Setting], float]) -> None:
        """`predicted` returns samples per second.

        The `end` of each phase is the time, by `time.perf_counter`, after which nothing new begins.
        """
        self.arena, self.space, self._predicted = arena, space, predicted
        self._forecasts = {space.first.key: 0.0}
        self._first_log = math.log(predicted(space.first.setting))
        self._factors: dict[tuple[int, str], float] = {}
        self.centre = space.first
        """The candidate that is expected to be the fastest; forecasts of others are composed of changes to it."""
        self.corrected = Corrected()
        self.before: dict[Setting, float] = {}
        """The corrected forecast of each setting when it was built."""
        self.measured: dict[tuple[str, ...], Candidate] = {}
        self.failures: dict[Candidate, tuple[Status, str]] = {}
        self.refused: list[frozenset[str]] = []
        """Rungs that must not be combined: a setting with them failed, or its results were not the same."""
        self.took(space.first)

    # Knowledge

    def took(self, candidate: Candidate) -> None:
        """Record that a candidate was measured, and correct the forecasts accordingly."""
        self.measured[candidate.key] = candidate
        errors = {}
        for key, measured in self.measured.items():
            speed = self.arena.speed(measured.setting)
            if speed is not None:
                variance = self.arena.wall.joint().variance(measured.setting, self.arena.baseline) or 0.0
                errors[key] = math.log(speed) - self.forecast(measured), variance
        self.corrected.learn(errors)
        self._centre_on_fastest()

    def forecast(self, candidate: Candidate) -> float:
        """The planner's forecast: the logarithm of the speed relative to the baseline's."""
        if candidate.key not in self._forecasts:
            self._forecasts[candidate.key] = math.log(self._predicted(candidate.setting)) - self._first_log
        return self._forecasts[candidate.key]

    def _composed(self, key: Key) -> float:
        """The forecast of a key; if there is none yet, the centre's forecast plus the gain of each choice that differs,
        so that the planner forecasts single choices and not all their combinations."""
        if key in self._forecasts:
            return self._forecasts[key]
        pairs = enumerate(zip(key, self.centre.key, strict=True))
        return self.forecast(self.centre) + sum(
            self._factor(i, name) for i, (name, here) in pairs if name != here
        )

    def _factor(self, place: int, name: str) -> float:
        """Gain of a choice combined with the centre's other choices; if that is illegal, with the baseline's."""
        if (place, name) not in self._factors:
            key = self.centre.key
            beside = self.space.at((*key[:place], name, *key[place + 1 :]))
            self._factors[place, name] = (
                self._alone(name) - self._alone(key[place])
                if beside is None
                else self.forecast(beside) - self.forecast(self.centre)
            )
        return self._factors[place, name]

    def _alone(self, name: str) -> float:
        """Gain of a rung in the candidate with the fewest rungs that has it."""
        if not name:
            return 0.0
        least = self.space.least[name]
        before = self.space.without(least, name)
        return self.forecast(least) - (self.forecast(before) if before else 0.0)

    def _centre_on_fastest(self) -> None:
        """Move the centre to the setting that is expected to be fastest: as long as it gains, change all choices that
        are each expected to gain, or only the best of them."""
        start = self.centre if self.allowed(self.centre) else self.best
        centre, fastest = None, max(start, self.best, key=self.speed)
        while centre is None or self.speed(fastest) > self.speed(centre):
            centre, near = fastest, sorted(self._near(fastest), key=self.speed)
            key = centre.key
            for step in near:
                if self.speed(step) > self.speed(centre):
                    key = tuple(b if b != c else a for a, b, c in zip(key, step.key, centre.key, strict=True))
            together = self.space.at(key)
            fastest = max([centre, *near[-1:], *self._usable([together])], key=self.speed)
        if centre != self.centre:
            self.centre = centre
            self._factors.clear()

    def _near(self, of: Candidate) -> list[Candidate]:
        """Candidates that differ in one choice and may work, each with a forecast of its own."""
        return self._usable(self.space.neighbours(of))

    def _usable(self, candidates: Iterable[Candidate | None]) -> list[Candidate]:
        """The candidates that may work, each with a forecast of its own."""
        usable = [c for c in candidates if c is not None and self.allowed(c) and c not in self.failures]
        for candidate in usable:
            self.forecast(candidate)
        return usable

    def speed(self, candidate: Candidate) -> float:
        """Speed relative to the baseline's: as measured, or as forecast and corrected."""
        speed = self.arena.speed(candidate.setting) if candidate.key in self.measured else None
        return math.exp(self._expected(candidate.key)) if speed is None else speed

    def _sure_speed(self, candidate: Candidate) -> float:
        """`speed`, from a forecast of the planner that is not composed."""
        self.forecast(candidate)
        return self.speed(candidate)

    def _expected(self, key: Key) -> float:
        return self._composed(key) + self.corrected.mean(key)

    def allowed(self, candidate: Candidate) -> bool:
        """Whether a candidate has no combination of rungs that was refused."""
        return not any(rungs <= candidate.rungs for rungs in self.refused)

    def ranked(self) -> list[Candidate]:
        """Allowed candidates that were measured, the fastest first."""
        return sorted(filter(self.allowed, self.measured.values()), key=self.speed, reverse=True)

    @property
    def best(self) -> Candidate:
        """The fastest allowed candidate."""
        return self.ranked()[0]

    # Races

    def try_out(self, candidate: Candidate, others: Sequence[Candidate], rounds: int) -> bool:
        """Run some rounds of a candidate beside others. Returns False if it fails, which is recorded."""
        self.forecast(candidate)
        self.before.setdefault(candidate.setting, self.speed(candidate))
        try:
            self.arena.play([*(other.setting for other in others), candidate.setting], rounds)
        except Exception as error:  # a setting is an experiment: any way of failing is its result
            status, reason = failure(error)
            log.info("%s: %s: %s", candidate.setting.words, status, reason, exc_info=status == "failed")
            self.failures[candidate] = (status, reason)
            self._blame(candidate)
            return False
        self.took(candidate)
        return True

    def _blame(self, candidate: Candidate) -> None:
        """Refuse candidates that may fail for the same reason: those with all of its rungs that never worked."""
        self.refused.append(candidate.rungs)
        worked = frozenset[str]().union(*(measured.rungs for measured in self.measured.values()))
        self.refused = [rungs - worked or rungs for rungs in self.refused]

    # The search

    def scout(self, end: float) -> None:
        """Try candidates while one is expected to be faster than the best, and there is time.

        Time is reserved to try the compiled form of the best, because eager trials of slow steps would use it up. For
        the baseline's compiled form none is reserved if no other trial would then fit.
        """
        while candidate := self._next(end - sum(map(self._cost, self._best_compiled()))) or self._first(end):
            self.arena.keep = {self.arena.baseline, self.best.setting}
            self._look(candidate)
        for candidate in self._best_compiled():
            if self._fits(candidate, end):
                self._look(candidate)
        # A cast may pay only in compiled code, which its eager form does not show.
        usable = (self.space.first, *self.space.least.values())
        for level in dict.fromkeys(candidate.setting.plan.precision for candidate in usable):
            plans = [candidate.setting.plan for candidate in self.measured.values()]
            if any(plan.compile != "none" and plan.precision == level for plan in plans):
                continue
            for likely in self._likely(1, compile="none".__ne__, precision=level.__eq__):
                gain = math.log(self._sure_speed(likely) / self.speed(self.best))
                if gain + self.corrected.deviation(likely.key) > 0 and self._fits(likely, end):
                    self._look(likely)

    def _look(self, candidate: Candidate) -> None:
        """Try a candidate for some rounds beside the best. Where steps are slow these are few; after a surprise it
        gets as many as with short steps, because other work on the machine slows single steps by a third."""
        best, expected, rounds = self.best, self.speed(candidate), self._looks(candidate)
        there = self.try_out(candidate, [best], rounds)
        if there and rounds < LOOKS and abs(math.log(self.speed(candidate) / expected)) > SURPRISE:
            self.try_out(candidate, [best], LOOKS - rounds)

    def _first(self, end: float) -> Candidate | None:
        """The first candidate to try, while only the baseline was measured."""
        return self._next(end) if len(self.measured) == 1 else None

    def _best_compiled(self) -> list[Candidate]:
        """The cheapest compiled form of the best, if none of its forms was tried."""
        best = self.best
        near = [c for c in self._near(best) if c.setting.plan.compile != "none"]
        if best.setting.plan.compile != "none" or any(c.key in self.measured for c in near):
            return []
        return sorted(near, key=self._cost)[:1]

    def _likely(self, count: int, **wanted: Callable[[Any], bool]) -> list[Candidate]:
        """Candidates not yet tried that are expected to be the fastest, if their Plan has wanted values in some fields.

        Keys are chosen by the sum of the gains of each choice, changed alone from the centre's; how choices affect each
        other is then computed for these keys only.
        """
        centre, width = self.centre.key, BEAM + len(self.measured)
        usual = self.corrected.mean(centre)
        sums = {centre: 0.0}
        for place, names in enumerate(self.space.fitting(**wanted)):
            every: dict[Key, float] = {}
            for name in names:
                start, end = centre[:place], centre[place + 1 :]
                gain = self.corrected.mean((*start, name, *end)) - usual
                gain += self._factor(place, name) if name != centre[place] else 0.0
                every |= {(*key[:place], name, *end): total + gain for key, total in sums.items()}
            sums = dict(heapq.nlargest(width, every.items(), key=lambda pair: (pair[1], pair[0])))
        candidates = (self.space.at(key) for key in sums if key not in self.measured)
        unseen = (c for c in candidates if c is not None and c not in self.failures and self.allowed(c))
        return heapq.nlargest(count, unseen, key=lambda c: (self._expected(c.key), c.key))

    def _next(self, end: float) -> Candidate | None:
        """The candidate with the largest expected gain per second; None if none is worth its time."""
        left = end - time.perf_counter()
        likely = self._likely(DEVIATIONS_FOR)
        eager = self._likely(DEVIATIONS_FOR // 2, compile="none".__eq__)
        rates = {c: self._rate(c, left) for c in {*likely, *eager}}
        # A composed forecast is replaced by the planner's own before it is trusted.
        while rates:
            best = max(rates, key=lambda c: (rates[c], c.key))
            if rates[best] <= 0:
                break
            if best.key in self._forecasts:
                return best
            self.forecast(best)
            rates[best] = self._rate(best, left)
        return None

    def _rate(self, candidate: Candidate, left: float) -> float:
        """Expected gain per second of a trial; 0 if the gain is too small or the trial too long."""
        gain, cost = self._gain(candidate), self._cost(candidate)
        return gain / max(cost, CHEAP * left) if gain > PROMISING and cost < left else 0.0

    def _gain(self, candidate: Candidate) -> float:
        """Expected gain of a candidate over the best, as a ratio less one."""
        ahead = math.log(self.speed(candidate)) - math.log(self.speed(self.best))
        return expected_gain(ahead, self.corrected.deviation(candidate.key))

    def _looks(self, candidate: Candidate) -> int:
        step = self.arena.turn_seconds(candidate.setting)
        return max(1, min(LOOKS, round(LOOK_SECONDS / (2 * step))))

    def _cost(self, candidate: Candidate) -> float:
        """Seconds that a trial of a candidate takes."""
        turns = self.arena.turn_seconds(self.arena.baseline) / self.speed(candidate)
        best = self.best.setting
        switches = candidate.setting.plan.host_memory != best.plan.host_memory
        return self.arena.building(candidate.setting) + (2 + 2 * switches) * self._looks(candidate) * turns

    def _fits(self, candidate: Candidate, end: float) -> bool:
        """Whether there is time for a trial of a candidate."""
        return self._cost(candidate) < end - time.perf_counter()

    def halve(self, end: float) -> Candidate:
        """Race the fastest; after some rounds the slower half is dropped, until two are left, and then one."""
        fastest = math.log(self.speed(self.best))
        pool = [c for c in self.ranked() if math.log(self.speed(c)) > fastest - WITHIN][:FINALISTS]
        while len(pool) > 2:
            settings = [c.setting for c in pool]
            left = end - time.perf_counter() - sum(map(self.arena.building, settings))
            rounds = min(LOOKS, int(left / self.arena.round_of(settings)))
            if rounds < 1:
                break
            self.arena.keep = {self.arena.baseline, *settings}
            self.arena.play(settings, rounds)
            self.took(pool[0])
            pool = sorted(pool, key=self.speed, reverse=True)[: max(2, len(pool) // 2)]
            self.arena.keep = {self.arena.baseline, *(c.setting for c in pool)}
            self.arena.clear()
        if len(pool) > 1:
            first, second = pool[0].setting, pool[1].setting
            self.arena.race([first, second], [(first, second)], end)
            self.took(pool[0])
        return self.best

    def top(self, best: Candidate, end: float) -> Candidate:
        """Remove each rung of the best, and add each that it lacks; move where that is faster.

        Each change is tried once, the most promising first, then all undecided ones race together. A rung is removed if
        nothing is slower without it.
        """
        for _ in range(MOVES):
            self.arena.keep = {self.arena.baseline, best.setting}
            near = self._near(best)
            away = sorted((c for c in near if c.rungs < best.rungs), key=self._cost)
            others = sorted((c for c in near if c not in away), key=self._gain, reverse=True)
            kept_for_away = sum(self._cost(c) for c in away)
            there = []
            for candidate in [*others, *away]:
                if self.arena.verdict_of(candidate.setting, best.setting) != "open":
                    continue
                until = end if candidate in away else end - kept_for_away
                if self._fits(candidate, until) and self.try_out(candidate, [best], self._looks(candidate)):
                    there.append(candidate)
            pairs = [(c.setting, best.setting) for c in there]
            self.arena.keep |= {c.setting for c in there}
            self.arena.race([best.setting, *(c.setting for c in there)], pairs, end)
            self.took(best)
            better = self._better(best, [*others, *away], away)
            if better is None:
                break
            best = better
        return best

    def _better(
        self, best: Candidate, near: Sequence[Candidate], away: Sequence[Candidate]
    ) -> Candidate | None:
        """The neighbour to move to: the fastest that is surely faster; else one that is faster both as measured and as
        forecast; else one without a rung that gains nothing."""

        def verdict(candidate: Candidate) -> str:
            return self.arena.verdict_of(candidate.setting, best.setting)

        def gain(candidate: Candidate) -> float:
            """The smaller of the gains as measured and as forecast, in logarithms."""
            measured = math.log(self.speed(candidate) / self.speed(best))
            return min(measured, self.forecast(candidate) - self.forecast(best))

        near = [c for c in near if c.key in self.measured and self.allowed(c)]
        faster = [c for c in near if verdict(c) == "faster"]
        agreed = [c for c in near if verdict(c) == "open" and gain(c) > AGREED]
        idle = [c for c in near if c in away and verdict(c) != "slower" and gain(c) > -IDLE]
        return max(faster or agreed or idle, key=self.speed, default=None)

    def path_seconds(self, *, built: bool = False) -> float:
        """Seconds to measure the memory of each setting on the path to the best and, unless they are built, to build
        them and run one round."""
        settings = self._settings_of(self.space.path(self.best, self._sure_speed))
        weighing = sum(map(self.arena.turn_seconds, settings))
        if built:
            return weighing
        return weighing + self.arena.round_of(settings) + sum(map(self.arena.building, settings))

    def path(self, best: Candidate, end: float) -> tuple[Candidate, dict[str, Candidate]]:
        """The rungs from the baseline to the best, all settings on the way measured in turn, and the candidate that
        they lead to: rungs without a measured gain are left out, unless the best is surely faster with them."""
        path = self._walked(best, end)
        while (simpler := self._simpler(best, path, end)) is not None:
            best, path = simpler, self._walked(simpler, end)
        self._race_steps(path, end)
        self.took(best)
        return best, path

    def proven(self, name: str, step: Candidate, before: Candidate, best: Candidate) -> bool:
        """Whether a rung surely gains: at its step of the path, or because the best without it is surely slower."""
        if self.arena.verdict_of(step.setting, before.setting) == "faster":
            return True
        without = self.space.without(best, name)
        return (
            without is not None
            and without.key in self.measured
            and self.arena.verdict_of(best.setting, without.setting) == "faster"
        )

    def _simpler(self, best: Candidate, path: Mapping[str, Candidate], end: float) -> Candidate | None:
        """The best without its rungs that are not proven; None if all are, if it could not be measured, or if it is
        surely slower."""
        steps = zip(path.items(), [self.space.first, *path.values()], strict=False)
        idle = {
            name
            for (name, step), before in steps
            if self._judged(step, before) and not self.proven(name, step, before, best)
        }
        simpler = self.space.at(tuple("" if name in idle else name for name in best.key)) if idle else None
        if simpler is None or simpler in self.failures or not self.allowed(simpler):
            return None
        if simpler.key not in self.measured:
            looks = self._looks(simpler)
            if not self._fits(simpler, end) or not self.try_out(simpler, [best], looks):
                return None
        pair = best.setting, simpler.setting
        self.arena.race(pair, [pair], _halfway(end))
        faster = self.arena.verdict_of(*pair) == "faster"
        return simpler if self._judged(best, simpler) and not faster else None

    def _judged(self, candidate: Candidate, over: Candidate) -> bool:
        """Whether there were enough rounds to see a large difference."""
        ratio = self.arena.ratio(candidate.setting, over.setting)
        return ratio is not None and ratio.rounds >= FEWEST

    def _walked(self, best: Candidate, end: float) -> dict[str, Candidate]:
        """The steps to a candidate, built and raced for half of the time until `end`. Steps that cannot be built are
        left out. If time is short, steps are not tried one by one before all take turns."""
        path = self.space.path(best, self._sure_speed)
        for _ in range(3 * len(path)):
            self.arena.keep = set(self._settings_of(path))
            unseen = [s for s in path.values() if s.key not in self.measured and s not in self.failures]
            if not unseen:
                break
            looks = sum(map(self._cost, unseen)) + self.path_seconds() < end - time.perf_counter()
            self.try_out(unseen[0], [best], int(looks))
            path = self.space.path(best, self._sure_speed)  # the measurement may change the order
        path = {name: step for name, step in path.items() if step.key in self.measured}
        settings = self._settings_of(path)
        self.arena.keep = set(settings)
        self.arena.clear()
        if path:
            self.arena.play(settings, 1)
        self._race_steps(path, _halfway(end))
        return path

    def _settings_of(self, path: Mapping[str, Candidate]) -> list[Setting]:
        return [self.arena.baseline, *(step.setting for step in path.values())]

    def _race_steps(self, path: Mapping[str, Candidate], end: float) -> None:
        """Let all settings of a path take turns until each step, and the whole, is decided."""
        settings = self._settings_of(path)
        pairs = list(zip(settings[1:], settings[:-1], strict=True))
        self.arena.race(settings, [*pairs, (settings[-1], settings[0])] if path else [], end)


def _halfway(end: float) -> float:
    """The time halfway between now and `end`."""
    return (time.perf_counter() + end) / 2
