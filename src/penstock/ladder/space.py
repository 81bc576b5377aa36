"""All combinations of rungs that keep results, and the path from the baseline to one of them. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from penstock.config import rules
from penstock.ladder.rung import Rung, Setting, Situation

Key = tuple[str, ...]
"""The rung taken of each choice, or nothing: what a correction of forecasts knows a setting by."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One combination: a rung or none of each choice."""

    key: Key
    setting: Setting

    @property
    def rungs(self) -> frozenset[str]:
        """Names of its rungs."""
        return frozenset(name for name in self.key if name)


class Space:
    """The candidates among `rungs` that the rules allow, the baseline among them."""

    def __init__(self, rungs: Iterable[Rung], first: Setting, situation: Situation) -> None:
        self.situation = situation
        self.rungs = {rung.name: rung for rung in rungs if rung.searched}
        self.choices: dict[str, list[Rung]] = {}
        for rung in self.rungs.values():
            self.choices.setdefault(rung.alternatives, []).append(rung)
        found = {
            candidate.setting: candidate
            for candidate in reversed(list(self._all(first, (), list(self.choices))))
        }
        self.candidates = list(reversed(found.values()))
        self.first = self.candidates[0]
        self._by_key = {candidate.key: candidate for candidate in self.candidates}

    def _all(self, setting: Setting, key: Key, choices: Sequence[str]) -> Iterator[Candidate]:
        """Every legal answer to the other choices, on top of a setting."""
        if not choices:
            if not rules.problems(setting.plan, setting.model, self.situation.machine, run=True):
                yield Candidate(key, setting)
            return
        yield from self._all(setting, (*key, ""), choices[1:])
        for rung in self.choices[choices[0]]:
            if rung.hindrance(setting, self.situation) is None:
                yield from self._all(rung.apply(setting, self.situation), (*key, rung.name), choices[1:])

    def neighbours(self, of: Candidate) -> list[Candidate]:
        """Candidates that answer one choice otherwise."""
        return [c for c in self.candidates if sum(a != b for a, b in zip(c.key, of.key, strict=True)) == 1]

    def without(self, of: Candidate, rung: str) -> Candidate | None:
        """The candidate that lacks one rung of another, if that is legal."""
        return self._by_key.get(tuple("" if name == rung else name for name in of.key))

    def with_one(self, of: Candidate, rung: str) -> Candidate | None:
        """The candidate with a rung added, in place of the one of its choice, if that is legal."""
        place = list(self.choices).index(self.rungs[rung].alternatives)
        return self._by_key.get((*of.key[:place], rung, *of.key[place + 1 :]))

    def path(self, to: Candidate, speed: Callable[[Candidate], float]) -> list[tuple[str, Candidate]]:
        """Rungs from the baseline to a candidate, each with the candidate that it leads to.

        Of rungs that gain where they stand, the lowest on the ladder comes first; where none gains yet, because it
        needs another before it pays, the one that loses least. Rungs that are not legal yet wait.
        """
        here, path = self.first, []
        left = sorted(to.rungs, key=lambda name: self.rungs[name].place)
        while left:
            steps = [(name, step) for name in left if (step := self.with_one(here, name)) is not None]
            if not steps:  # some are legal together only
                path.append((left[-1], to))
                break
            gains = [(name, step) for name, step in steps if speed(step) > 1.005 * speed(here)]
            name, here = gains[0] if gains else max(steps, key=lambda one: speed(one[1]))
            path.append((name, here))
            left.remove(name)
        return path
