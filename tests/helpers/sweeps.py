"""Sweeps over families: `make test` runs a few, `make test-all` some more, `make test-sweeps` the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sweep(names: Iterable[Any], usual: Collection[Any], slow: Collection[Any] = ()) -> list[Any]:
    """All names, or tuples of them, as parameters of a test. Those neither usual nor slow are left to
    `make test-sweeps`."""
    marks = {name: pytest.mark.slow if name in slow else pytest.mark.sweep for name in names}
    return [
        pytest.param(*(name if isinstance(name, tuple) else (name,)), marks=() if name in usual else mark)
        for name, mark in marks.items()
    ]


def in_turn(names: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """Every pair of two lists as parameters of a test: each name with one of the others in turn. Their other pairs are
    left to `make test-sweeps`."""
    others = list(others)
    return [
        pytest.param(name, other, marks=() if (turn - at) % len(others) == 0 else pytest.mark.sweep)
        for turn, name in enumerate(names)
        for at, other in enumerate(others)
    ]
