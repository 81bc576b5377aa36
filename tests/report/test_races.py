"""Ways that race in processes of their own: those that work are timed, and of the others the file says why not."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="ways are forked")


@pytest.fixture
def races(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("races", BENCHMARKS / "races.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "races", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "PAUSE", 0.0)
    return module


def _takes(seconds: float) -> Callable[[], Callable[[], None]]:
    return lambda: lambda: time.sleep(seconds)


def _not_installed() -> str:
    raise ModuleNotFoundError("No module named 'fast'", name="fast")


def _fails() -> str:
    raise ValueError("two\nlines")


def test_ways_take_turns_and_the_file_says_why_others_do_not(races: Any, tmp_path: Path) -> None:
    output = tmp_path / "cells.json"
    names = ["penstock", "slow", "words", "absent", "broken", "gone"]
    given = argparse.Namespace(rounds=3, threads=1, output=output, again=False, ways=names)
    makes = {
        "penstock": _takes(0.02), "slow": _takes(0.06), "words": lambda: "it has no int8", "absent": _not_installed,
        "broken": _fails, "gone": lambda: os._exit(9), "not asked for": _takes(0.01),
    }  # fmt: skip
    races.Cells(given).race({"model": "a", "batch": 1}, makes)
    (cell,) = json.loads(output.read_text())["cells"]
    assert cell["without"] == {
        "words": "it has no int8", "absent": "fast is not installed", "broken": "ValueError: two lines",
        "gone": "its process ended with 9",
    }  # fmt: skip
    assert set(cell["ways"]) == {"penstock", "slow"}
    assert 2.0 < cell["ways"]["slow"]["penstock is faster by"] < 4.0
    keys = [{"model": "a", "batch": 1}, {"model": "a", "batch": 2}]
    assert list(races.Cells(given).missing(iter(keys))) == keys[1:]


def test_ours_must_work(races: Any) -> None:
    given = argparse.Namespace(rounds=1, threads=1, output=None, again=False, ways=["penstock"])
    with pytest.raises(RuntimeError, match="two lines"):
        races.Cells(given).race({"model": "a"}, {"penstock": _fails})
