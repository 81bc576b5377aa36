"""Schedules on processors that their ranks share."""

from __future__ import annotations

import random
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.schedules import SCHEDULE_NAMES, Costs, Schedule, generate, play_shared, simulate


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_ranks_with_processors_of_their_own_are_simulated_ranks(name: Any) -> None:
    draw = random.Random(3)
    schedule = generate(name, 4, 8, 2 if name == "interleaved" else 1)

    def times(count: int = schedule.stages) -> list[float]:
        return [draw.uniform(0.5, 2.0) for _ in range(count)]

    costs = Costs(
        forward=times(), backward_input=times(), backward_weight=times(), transfer=times(schedule.stages - 1)
    )
    shared, known = play_shared(schedule, costs, 1.0), simulate(schedule, costs)
    assert shared.makespan == pytest.approx(known.makespan)
    assert shared.busy == pytest.approx(known.busy)
    assert shared.bubble_fraction == pytest.approx(known.bubble_fraction)


def test_a_rank_alone_has_the_whole_processor() -> None:
    # Forward 1, backward 2. Alone are rank 0 at first (1), rank 1 with the first backward pass of one micro-batch (3),
    # rank 0 at the end (2): all of it twice as fast.
    one = play_shared(generate("1f1b", 2, 1), Costs(), 2.0)
    assert one.makespan == pytest.approx(3.0)
    assert one.busy == pytest.approx((1.5, 1.5))
    # Two ranks on one processor take as long as their work, whatever waits for what.
    for name in ("gpipe", "1f1b", "zb-h1"):
        assert play_shared(generate(name, 2, 4), Costs(), 2.0).makespan == pytest.approx(2 * 4 * 3 / 2)
    # Of four ranks on two processors, one alone uses but one of them.
    whole = play_shared(generate("1f1b", 4, 1), Costs(), 2.0).makespan
    assert whole == pytest.approx(4 * 3 / 2)


def test_ranks_that_wait_for_each_other_are_named() -> None:
    with pytest.raises(ConfigError, match="waits for"):
        play_shared(Schedule.parse("rank 0 | 0B0 0F0"), Costs(), 2.0)
