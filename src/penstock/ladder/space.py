"""Combinations of rungs that keep results, the path from the baseline to one of them, and corrected forecasts of their
speeds. Free of torch."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.config import rules
from penstock.ladder.rung import Rung, Setting, Situation

Key = tuple[str, ...]
"""One rung (or "") per choice: what a setting consists of."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One combination: for each choice a rung or none."""

    key: Key
    setting: Setting

    @property
    def rungs(self) -> frozenset[str]:
        """Names of its rungs."""
        return frozenset(name for name in self.key if name)


class Space:
    """All combinations of `rungs` that the rules allow. Each is made when needed, because their number is a product."""

    def __init__(self, rungs: Iterable[Rung], first: Setting, situation: Situation) -> None:
        self.situation = situation
        self.rungs = {rung.name: rung for rung in rungs if rung.searched}
        choices: dict[str, list[str]] = {}
        for rung in self.rungs.values():
            choices.setdefault(rung.alternatives, [""]).append(rung.name)
        self._places = {name: place for place, names in enumerate(choices.values()) for name in names if name}
        self.first = Candidate(("",) * len(choices), first)
        self._known: dict[Key, Candidate | None] = {self.first.key: self.first}
        least = {name: self._least(name) for name in self.rungs}
        self.least = {name: candidate for name, candidate in least.items() if candidate is not None}
        """For each rung that can be used at all, the legal combination with the fewest rungs."""
        self.answers = [[n for n in names if not n or n in self.least] for names in choices.values()]
        """Answers to each choice: first none, then each rung that can be used."""

    @property
    def size(self) -> int:
        """Number of all combinations, illegal ones included."""
        return math.prod(map(len, self.answers))

    def at(self, key: Key) -> Candidate | None:
        """The candidate of a key, if it is legal and each of its rungs has an effect."""
        if key not in self._known:
            self._known[key] = self._combined(key)
        return self._known[key]

    def _combined(self, key: Key) -> Candidate | None:
        setting = self.first.setting
        for rung in (self.rungs[name] for name in key if name):
            if rung.hindrance(setting, self.situation) is not None:
                return None
            before, setting = setting, rung.apply(setting, self.situation)
            if setting == before:
                return None
        legal = not rules.problems(setting.plan, setting.model, self.situation.machine, run=True)
        return Candidate(key, setting) if legal else None

    def _least(self, name: str) -> Candidate | None:
        """A legal candidate with this rung and at most two others."""
        alone = self.replaced(self.first.key, name)
        for count in range(3):
            for others in itertools.combinations([o for o in self.rungs if o != name], count):
                if len({self._places[rung] for rung in (name, *others)}) > count:
                    candidate = self.at(functools.reduce(self.replaced, others, alone))
                    if candidate is not None:
                        return candidate
        return None

    def replaced(self, key: Key, name: str) -> Key:
        """The key with this rung as the answer to its choice."""
        place = self._places[name]
        return (*key[:place], name, *key[place + 1 :])

    def fitting(self, **wanted: Callable[[Any], bool]) -> list[list[str]]:
        """For each choice the answers that give these fields of the Plan a wanted value; all answers of a choice that
        does not set them."""

        def value(name: str, field: str) -> Any:
            first = self.first.setting
            return getattr((self.rungs[name].apply(first, self.situation) if name else first).plan, field)

        answers = self.answers
        for field, fits in wanted.items():
            sets = [len({value(name, field) for name in names}) > 1 for names in answers]
            answers = [
                [name for name in names if not choice or fits(value(name, field))]
                for names, choice in zip(answers, sets, strict=True)
            ]
        return answers

    def computes_otherwise(self, of: Candidate) -> frozenset[str]:
        """Rungs of a candidate that compute in other types than the baseline, so that losses must be compared."""
        return frozenset(name for name in of.rungs if self.rungs[name].results == "rounding")

    def neighbours(self, of: Candidate) -> list[Candidate]:
        """Candidates that differ in the answer to one choice."""
        keys = [
            (*of.key[:place], name, *of.key[place + 1 :])
            for place, names in enumerate(self.answers)
            for name in names
            if name != of.key[place]
        ]
        return [candidate for key in keys if (candidate := self.at(key)) is not None]

    def without(self, of: Candidate, rung: str) -> Candidate | None:
        """The candidate without one of its rungs, if that is legal."""
        return self.at(tuple("" if name == rung else name for name in of.key))

    def with_one(self, of: Candidate, rung: str) -> Candidate | None:
        """The candidate with a rung added, replacing the rung of the same choice, if that is legal."""
        return self.at(self.replaced(of.key, rung))

    def path(self, to: Candidate, speed: Callable[[Candidate], float]) -> dict[str, Candidate]:
        """Order in which to climb from the baseline to a candidate: rungs, each with the candidate that it leads to.

        The next rung is the lowest on the ladder that gains at this point; if none does, because rungs only pay
        together, it is the one that loses least. Rungs that are not legal yet wait.
        """
        here, path = self.first, dict[str, Candidate]()
        left = sorted(to.rungs, key=lambda name: self.rungs[name].place)
        while left:
            steps = [(name, step) for name in left if (step := self.with_one(here, name)) is not None]
            if not steps:  # some are only legal together
                path[left[-1]] = to
                break
            gains = [(name, step) for name, step in steps if speed(step) > 1.005 * speed(here)]
            name, here = gains[0] if gains else max(steps, key=lambda step: speed(step[1]))
            path[name] = here
            left.remove(name)
        return path


class Corrected:
    """Forecasts of settings' speeds, corrected by the measurements of other settings.

    The logarithm of the correction is a sum of terms, one for the answer to each choice (a rung or none) and one for
    each pair of answers, each of an unknown size around zero: ridge regression on the measurements. It is solved in its
    kernel form, in which two settings that agree in m answers share m single terms and m (m - 1) / 2 pairs.
    """

    SINGLE, PAIR = 0.15, 0.08
    """Standard deviations of a single term and of a pair's: the planner's own errors between settings."""
    LEAST = 1e-5
    """Least variance of a measurement: the variance between two builds of one setting."""

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self._errors, self._inverse = np.zeros(0), np.zeros((0, 0))
        self._means: dict[Key, float] = {}

    def learn(self, errors: Mapping[Key, tuple[float, float]]) -> None:
        """Fit to all measurements so far: for each key, the logarithm of measured over predicted speed (both relative
        to the baseline) and its variance."""
        self._keys = list(errors)
        values, variances = np.array(list(errors.values())).reshape(-1, 2).T
        shared = np.array([self._shared(key) for key in self._keys])
        self._inverse = np.linalg.inv(shared + np.diag(self.LEAST + variances))
        self._errors = self._inverse @ values
        self._means.clear()

    def mean(self, key: Key) -> float:
        """The correction to add to the logarithm of a setting's predicted speed."""
        if key not in self._means:
            self._means[key] = float(self._shared(key) @ self._errors)
        return self._means[key]

    def deviation(self, key: Key) -> float:
        """Standard deviation of the corrected forecast's error, in the logarithm of the speed."""
        shared = self._shared(key)
        return math.sqrt(max(0.0, self._covariance(key, key) - float(shared @ self._inverse @ shared)))

    def _shared(self, key: Key) -> npt.NDArray[np.float64]:
        """Covariance of a setting's correction with those of the settings that were measured."""
        return np.array([self._covariance(key, measured) for measured in self._keys])

    @classmethod
    def _covariance(cls, first: Key, second: Key) -> float:
        same = float(sum(map(operator.eq, first, second)))
        return cls.SINGLE**2 * same + cls.PAIR**2 * same * (same - 1) / 2


def expected_gain(mean: float, deviation: float) -> float:
    """Expected value of max(0, x) for a normal x with this mean and deviation."""
    if deviation <= 0:
        return max(0.0, mean)
    z = mean / deviation
    density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return mean * 0.5 * (1 + math.erf(z / math.sqrt(2))) + deviation * density
