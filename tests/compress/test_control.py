"""Accuracy control on made-up scores: the fewest layers stay, and the bound holds or nothing is rounded."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch
from torch import nn

from penstock.compress.control import keep_within, seconds_of

NAMES = [f"layer{number}" for number in range(10)]


def controlled(
    harm: dict[str, float], drop: float, *, misleading: bool = False
) -> tuple[Collection[str], float, int]:
    """The layers that are rounded, the score and the number of evaluations, of layers whose harms add up, of which
    control sees the order, or one that misleads."""
    asked: list[int] = []

    def score(chosen: Collection[str]) -> float:
        asked.append(len(chosen))
        return 90.0 - sum(harm.get(name, 0.0) for name in chosen)

    def seen(name: str) -> float:
        return -NAMES.index(name) if misleading else harm.get(name, 0.0)

    return *keep_within(NAMES, score, drop, seen, before=90.0), len(asked)


def test_where_all_may_be_rounded_one_evaluation_says_so() -> None:
    rounded, after, evaluations = controlled({"layer3": 0.1}, 0.5)
    assert {*rounded} == {*NAMES}
    assert (after, evaluations) == (pytest.approx(89.9), 1)


def test_the_most_harmful_stay_and_no_others() -> None:
    rounded, after, evaluations = controlled({"layer3": 4.0, "layer7": 0.4, "layer1": 0.05}, 0.5)
    assert rounded == {*NAMES} - {"layer3"}
    assert after == pytest.approx(89.55)
    assert evaluations <= 6


def test_a_wrong_order_is_made_up_for() -> None:
    assert controlled({"layer8": 5.0}, 0.5, misleading=True)[0] == {*NAMES} - {"layer8"}


def test_where_every_layer_hurts_the_model_stays_as_it_was() -> None:
    assert controlled(dict.fromkeys(NAMES, 1.0), 0.5)[:2] == (set(), 90.0)


def test_the_slower_way_takes_more_seconds() -> None:
    one, many = seconds_of(
        (nn.Linear(64, 64), nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))), 64, 64
    )
    assert 0 < one < many
    assert not torch.is_inference_mode_enabled()


def test_other_work_in_most_rounds_does_not_change_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = nn.Linear(4, 4), nn.Linear(4, 4)
    times = {ways[0]: iter([1.0, 5.0, 5.0, 1.0, 5.0, 5.0, 5.0, 5.0]), ways[1]: iter([1.5] * 8)}
    monkeypatch.setattr("penstock.compress.control._time", lambda way, x, repeats: next(times[way]))
    assert seconds_of(ways, 2, 4) == [1.0, 1.5]
