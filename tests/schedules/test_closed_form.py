"""The formulas give exactly what the simulation gives, wherever they give anything."""

from __future__ import annotations

import time
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.schedules import SCHEDULE_NAMES, Costs, closed_form, generate, held, simulate

P = st.integers(1, 8)
M = st.integers(1, 26)
V = st.integers(1, 4)
T = st.integers(0, 20)


def chunks_for(name: str, v: int) -> int:
    return v if name == "interleaved" else 1


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(SCHEDULE_NAMES), P, M, V, T, T, T, st.integers(0, 14))
def test_the_formula_is_exact_or_silent(
    name: Any, p: int, m: int, v: int, forward: int, into: int, weight: int, transfer: int
) -> None:
    v = chunks_for(name, v)
    costs = {"forward": forward, "backward_input": into, "backward_weight": weight, "transfer": transfer}
    formula = closed_form(name, p, m, v, **costs)
    if formula is None:
        assert name in ("interleaved", "zb-h1")
        return
    result = simulate(generate(name, p, m, v), Costs(**costs))
    assert formula.makespan == result.makespan
    assert formula.ideal == result.ideal
    assert formula.bubble_fraction == result.bubble_fraction
    assert formula.bubble_over_ideal == result.bubble_over_ideal


@settings(deadline=None)
@given(st.sampled_from(SCHEDULE_NAMES), P, M, V, st.fractions(1, 9), st.fractions(1, 9), st.fractions(0, 1))
def test_there_is_a_formula_for_all_shapes_without_transfers(
    name: Any, p: int, m: int, v: int, forward: Fraction, into: Fraction, share: Fraction
) -> None:
    v, weight = chunks_for(name, v), share * min(forward, into)
    formula = closed_form(name, p, m, v, forward=forward, backward_input=into, backward_weight=weight)
    assert formula is not None
    result = simulate(
        generate(name, p, m, v), Costs(forward=forward, backward_input=into, backward_weight=weight)
    )
    assert formula.makespan == result.makespan


@settings(deadline=None)
@given(P, st.integers(1, 6), st.integers(2, 4), T, T, st.fractions(0, 1, max_denominator=5))
def test_interleaved_hides_transfers_that_are_shorter_than_its_actions(
    p: int, rounds: int, v: int, forward: int, backward: int, share: Fraction
) -> None:
    """With m a multiple of p, all that shows is one way through all stages and back."""
    m, transfer = p * rounds, share * min(forward, backward)
    costs = {"forward": forward, "backward_input": backward, "backward_weight": 0, "transfer": transfer}
    formula = closed_form("interleaved", p, m, v, **costs)
    assert formula is not None
    hops = 2 * (v * p - 1) if p > 1 else 0
    assert formula.makespan == (m * v + p - 1) * (forward + backward) + hops * transfer
    assert formula.makespan == simulate(generate("interleaved", p, m, v), Costs(**costs)).makespan


@settings(deadline=None)
@given(st.sampled_from(SCHEDULE_NAMES), P, M, V, st.integers(0, 5))
def test_what_a_rank_holds(name: Any, p: int, m: int, v: int, kept: int) -> None:
    v = chunks_for(name, v)
    peaks = simulate(generate(name, p, m, v), Costs(activation=5, kept_for_weight=kept)).peak_memory
    counts = [held(name, rank, p, m, v) for rank in range(p)]
    assert peaks == tuple(5 * count.whole + kept * count.for_weight for count in counts)


def test_where_no_formula_is_exact_there_is_none() -> None:
    times = {"forward": 2, "backward_input": 2, "backward_weight": 2}
    assert closed_form("interleaved", 4, 8, 2, **times, transfer=3) is None
    assert closed_form("zb-h1", 4, 8, **times, transfer=2) is None
    assert closed_form("zb-h1", 4, 2, forward=1, backward_input=1, backward_weight=2) is None
    assert closed_form("1f1b", 4, 8, **times, transfer=300) is not None


def test_what_cannot_be_is_refused() -> None:
    times = {"forward": 1, "backward_input": 1, "backward_weight": 1}
    with pytest.raises(ConfigError, match="A cost of a schedule cannot be negative"):
        closed_form("1f1b", 2, 2, **{**times, "forward": -1})
    with pytest.raises(ConfigError, match="There is no schedule 'dapple'"):
        closed_form("dapple", 2, 2, **times)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="There is no rank 4 among 4"):
        held("gpipe", 4, 4, 8)


@pytest.mark.alone
def test_a_planner_can_ask_a_hundred_thousand_times() -> None:
    """Measured 4 µs of processor time for each; the bound leaves room for a busy machine."""
    taken = []
    for _ in range(3):
        begin = time.process_time()
        for _ in range(1000):
            closed_form(
                "interleaved", 64, 512, 4, forward=1.0, backward_input=1.0, backward_weight=1.0, transfer=0.1
            )
        taken.append(time.process_time() - begin)
    assert min(taken) < 0.03
