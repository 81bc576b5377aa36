"""Costs are spread over stages, and refused where they do not fit."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.schedules import Costs, generate, simulate
from penstock.schedules.costs import durations, memory_changes, ratio


def test_one_number_stands_for_all_stages_and_a_whole_backward_is_both_halves() -> None:
    assert durations(Costs(forward=2, backward_input=[1, 2, 3], backward_weight=4), 3) == {
        "F": [2, 2, 2],
        "B": [5, 6, 7],
        "I": [1, 2, 3],
        "W": [4, 4, 4],
    }


def test_memory_is_freed_in_one_or_two_parts() -> None:
    assert memory_changes(Costs(activation=5), 1) == {"F": [5], "B": [-5], "I": [0], "W": [-5]}
    assert memory_changes(Costs(activation=5, kept_for_weight=2), 1) == {
        "F": [5],
        "B": [-5],
        "I": [-3],
        "W": [-2],
    }


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        (Costs(forward=[1, 2, 3]), "forward has 3 values, but the schedule has 2 stages"),
        (Costs(transfer=[1, 2]), "transfer has 2 values, but the schedule has 1 boundaries between stages"),
        (Costs(backward_weight=-1), "backward_weight is -1, but a cost cannot be negative"),
        (Costs(backward_input=[1.0, float("nan")]), "cannot be negative"),
        (Costs(activation=1, kept_for_weight=[1, 2]), "kept_for_weight of stage 1 is 2, more than the 1"),
    ],
)
def test_costs_that_do_not_fit_are_refused(costs: Costs, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        simulate(generate("1f1b", 2, 2), costs)


@pytest.mark.parametrize(
    ("part", "whole", "expected"),
    [(1, 3, Fraction(1, 3)), (Fraction(1, 2), 2, Fraction(1, 4)), (1.0, 4, 0.25)],
)
def test_ratios_are_exact_where_they_can_be(part: Any, whole: Any, expected: Any) -> None:
    assert ratio(part, whole) == expected
    assert type(ratio(part, whole)) is type(expected)
