"""Sweeps of which `make test` runs a part, and `make test-all` the whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(names: Iterable[str], *usual: str) -> list[Any]:
    """All names as parameters of a test, of which only the usual ones are no part of the slow suite."""
    return [pytest.param(name, marks=() if name in usual else pytest.mark.slow) for name in names]
