"""Rules of Plans: their type, and how functions become rules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from penstock.config.plan import Plan

Kind = Literal["types", "degrees", "run", "infer"]
Check = Callable[..., Iterator[str]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One condition that a Plan must meet."""

    name: str
    kind: Kind
    text: str
    """The requirement, in one sentence."""
    check: Check
    parameters: tuple[str, ...]
    """The names of its parameters: out of plan, model and machine, and for inference also weights and shortlist."""


class Rules(list[Rule]):
    """Rules in the order in which their problems are reported."""

    def of(self, kind: Kind) -> Callable[[Check], Check]:
        """Decorator that adds a function to the rules, as a rule of this kind."""

        def enrol(check: Check) -> Check:
            text = " ".join((inspect.getdoc(check) or "").split())
            parameters = tuple(inspect.signature(check).parameters)
            self.append(Rule(check.__name__.strip("_"), kind, text, check, parameters))
            return check

        return enrol


def divisors(number: int) -> str:
    """The divisors of a number, in words: `1, 2 or 4`."""
    words = [str(i) for i in range(1, number + 1) if number % i == 0]
    return ", ".join(words[:-1]) + f" or {words[-1]}" if len(words) > 1 else words[0]


def degrees_above_one(plan: Plan, *names: str) -> Iterator[tuple[str, int]]:
    """The degrees of parallelism in `names` that are above 1."""
    return ((name, degree) for name in names if (degree := getattr(plan, name)) > 1)
