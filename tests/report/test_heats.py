"""The heats and rounds of `benchmarks/language_train.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.machine import Machine

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def heats(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import heats

    return heats


def _run(heats: Any, *entries: Any) -> dict[str, Any]:
    heats.heats(list(entries), torch.device("cpu"), lambda: None, heats.Deadline(None))
    return {entry.name: entry.heat for entry in entries}


def _of(heats: Any, name: str, *seconds: float, **more: Any) -> Any:
    """A contestant whose runs take these times, and the last of them for ever."""

    def make() -> Any:
        times = list(seconds)
        return lambda steps: times.pop(0) if len(times) > 1 else times[0]

    return heats.Contestant(name, "hand", make, **more)


def test_what_is_far_slower_than_the_best_of_its_kind_is_dropped_after_one_step(heats: Any) -> None:
    found = _run(
        heats,
        _of(heats, "best", 9.0, 1.2, 1.1, 1.0),
        _of(heats, "near", 9.0, 1.4, 1.3, 1.3),
        _of(heats, "far", 9.0, 1.6, 0.1),
        _of(heats, "disturbed", 1.3, 9.0, 1.3),
        _of(heats, "warm", 1.2, 1.1, 1.3, warms_itself=True),
    )
    assert found["best"] == {"first_seconds": 9.0, "seconds": 1.0}
    assert found["near"]["seconds"] == 1.3
    assert found["disturbed"]["seconds"] == 1.3
    assert found["warm"]["seconds"] == 1.1
    assert found["far"]["seconds"] == 1.6
    assert "1.60 times" in found["far"]["dropped"]


def test_a_long_step_is_timed_twice(heats: Any) -> None:
    assert _run(heats, _of(heats, "long", 9.0, 5.0, 4.0, 1.0))["long"]["seconds"] == 4.0


def test_only_what_is_near_the_best_eager_form_or_in_half_precision_is_compiled(heats: Any) -> None:
    found = _run(
        heats,
        _of(heats, "best", 1.0),
        _of(heats, "near", 1.2),
        _of(heats, "far", 1.4),
        _of(heats, "best, compiled", 0.9, eager="best"),
        _of(heats, "near, compiled", 0.8, eager="near"),
        _of(heats, "far, compiled", 0.1, eager="far"),
        _of(heats, "half, compiled", 0.9, eager="far", half=True),
        _of(heats, "alone, compiled", 0.9, eager="nowhere"),
    )
    assert {name for name, heat in found.items() if "seconds" not in heat} == {"far, compiled"}
    assert "1.40 times" in found["far, compiled"]["dropped"]


def test_a_race_ends_once_the_aims_are_decided_and_goes_on_while_they_are_not(heats: Any) -> None:
    def rounds(over_plain: float) -> int:
        scatter = (1.0, 1.01, 0.99, 1.0, 1.01, 0.99, 1.0)
        plain = _of(heats, "plain", 1.0, *(over_plain * one for one in scatter), warms_itself=True)
        plain.kind = "plain"
        hand = _of(heats, "hand", 1.3, warms_itself=True)
        ours = _of(heats, "ours", 1.0, warms_itself=True)
        ours.kind = "penstock"
        entries = [plain, hand, ours]
        for entry in entries:
            entry.heat = {"seconds": 1.0}
        heats.race(entries, 7, 1, lambda: None, heats.Deadline(None))
        return len(ours.rounds)

    assert rounds(1.6) == 5
    assert rounds(1.0) == 5
    assert rounds(1.25) == 7


def test_a_cell_goes_on_where_its_time_was_over(
    heats: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    import language_train

    machine = Machine(name="desk", device="cpu", source="measured", peak_flops={"fp32": 1e11})
    monkeypatch.setattr(language_train, "machine_for", lambda device: machine)
    output = tmp_path / "cells.json"
    words = ["--model", "gpt-tiny", "--tokens", "16", "--sequence", "8", "--rounds", "2", "--skip", "compile"]
    words += ["--only", "plain fp32", "--only", "hand fp32", "--only", "optimizer=fused host_memory=keep"]

    def call(*more: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["language_train.py", *words, "--output", str(output), *more])
        language_train.main()
        found: dict[str, Any] = json.loads(output.read_text())["cells"]["gpt-tiny, 2 x 8 tokens, cpu"]
        return found

    assert not any(one["heat"] for one in call("--seconds", "0")["contestants"])
    found = call()
    assert {"over_plain", "over_hand"} <= set(found["verdict"])
    assert call() | {"environment": {}} == found | {"environment": {}}


def test_finalists_are_the_best_of_each_kind_and_what_is_near_them(heats: Any) -> None:
    def chosen(fair: float) -> set[str]:
        seconds = {
            "plain": 2.0,
            "fair": fair,
            "best": 1.0,
            "near": 1.05,
            "next": 1.06,
            "ours": 0.9,
            "far": 1.2,
        }
        kinds = {"plain": "plain", "fair": "fair", "ours": "penstock", "far": "penstock"}
        entries = [_of(heats, name, one) for name, one in seconds.items()]
        for entry in entries:
            entry.kind = kinds.get(entry.name, "hand")
            entry.heat = {"seconds": seconds[entry.name]}
        return {entry.name for entry in heats.finalists(entries)}

    assert chosen(fair=1.9) == {"plain", "best", "near", "ours"}
    assert chosen(fair=1.5) == {"plain", "fair", "best", "near", "ours"}
