"""Schedules print and parse, and know their shape."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.schedules import Action, Costs, Schedule, generate, simulate, with_communication
from penstock.schedules.costs import durations, memory_changes, ratio
from penstock.schedules.schedule import COMMUNICATION_KINDS, COMPUTE_KINDS

ANY_ACTION = st.builds(
    Action, st.integers(0, 40), st.sampled_from(COMPUTE_KINDS + COMMUNICATION_KINDS), st.integers(0, 40)
)
ANY_SCHEDULE = st.lists(st.lists(ANY_ACTION, max_size=6).map(tuple), min_size=1, max_size=12).map(
    lambda ranks: Schedule(tuple(ranks))
)


@settings(deadline=None)
@given(ANY_SCHEDULE)
def test_what_is_printed_parses_back_however_senseless(schedule: Schedule) -> None:
    assert Schedule.parse(str(schedule)) == schedule
    assert len(str(schedule).splitlines()) == len(schedule.ranks)


def test_idle_slots_and_long_actions_may_be_drawn() -> None:
    drawn = (
        "rank 0 | 0F0 0F1 0F2 .   .   .   .   0B0 --- 0F3 0B1 --- .   0B2 --- .   0B3 ---\n"
        "rank 1 | .   1F0 1F1 .   .   1B0 --- 1F2 1B1 --- 1F3 1B2 --- .   1B3 --- .   .\n"
        "rank 2 | .   .   2F0 2B0 --- 2F1 2B1 --- 2F2 2B2 --- 2F3 2B3 --- .   .   .   ."
    )
    assert Schedule.parse(drawn) == generate("1f1b", 3, 4)


def test_every_bad_line_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        Schedule.parse("rank 0 | 0F0 nonsense\n\nrank 2 | 1F0\nrank 2 | 2F0\n0F1")
    assert len(error.value.problems) == 3
    assert "Line 1 of the schedule: 'nonsense' is not an action" in error.value.problems[0]
    assert "Line 3 of the schedule must begin with `rank 1 |`" in error.value.problems[1]
    assert "Line 5 of the schedule must begin with `rank 3 |`" in error.value.problems[2]


@pytest.mark.parametrize("text", ["", "\n  \n"])
def test_nothing_is_no_schedule(text: str) -> None:
    with pytest.raises(ConfigError, match="The schedule is empty"):
        Schedule.parse(text)


def test_shape() -> None:
    schedule = generate("interleaved", 2, 4, 3)
    assert (schedule.stages, schedule.micro_batches, len(schedule)) == (6, 4, 2 * 6 * 4)
    assert schedule.placement == (0, 1, 0, 1, 0, 1)
    assert not schedule.communicates
    assert schedule.computations() is schedule
    lowered = with_communication(schedule)
    assert lowered.communicates
    assert lowered.computations() == schedule


def test_a_stage_lives_on_one_rank() -> None:
    with pytest.raises(ConfigError) as error:
        _ = Schedule.parse("rank 0 | 0F0 3F0\nrank 1 | 0B0 1F0").placement
    assert error.value.problems == (
        "Stage 0 is run by ranks 0 and 1; each stage must be on one rank.",
        "No rank runs stage 2, but there are stages up to 3.",
    )


# Actions print and parse, in the notation of torch.distributed.pipelining.


ACTIONS = st.builds(
    Action, st.integers(0, 999), st.sampled_from(COMPUTE_KINDS + COMMUNICATION_KINDS), st.integers(0, 9999)
)


@pytest.mark.parametrize(
    ("word", "action"),
    [
        ("1F0", Action(1, "F", 0)),
        ("2B3", Action(2, "B", 3)),
        ("2I3", Action(2, "I", 3)),
        ("0W1", Action(0, "W", 1)),
        ("3SEND_F12", Action(3, "SEND_F", 12)),
        ("10RECV_B0", Action(10, "RECV_B", 0)),
    ],
)
def test_words(word: str, action: Action) -> None:
    assert Action.parse(word) == action
    assert str(action) == word


@settings(deadline=None)
@given(ACTIONS)
def test_round_trip(action: Action) -> None:
    assert Action.parse(str(action)) == action
    assert action.communicates == (action.kind in COMMUNICATION_KINDS)


@settings(deadline=None)
@given(ACTIONS)
def test_torch_reads_and_writes_the_same(action: Action) -> None:
    torch_action = pytest.importorskip("torch.distributed.pipelining.schedules")._Action
    theirs = torch_action.from_str(str(action))
    assert (theirs.stage_index, theirs.computation_type.value, theirs.microbatch_index) == action
    assert Action.parse(str(theirs)) == action


@pytest.mark.parametrize(
    "word", ["", "F0", "1F", "1f0", "1X0", "-1F0", "1F0 ", "1F0x", "1UNSHARD", "(1F0;2B0)OVERLAP_F_B"]
)
def test_what_is_no_action_is_refused_by_name(word: str) -> None:
    with pytest.raises(
        ConfigError, match="is not an action of a schedule; write stage, kind and micro-batch"
    ) as error:
        Action.parse(word)
    assert repr(word) in str(error.value)


# Costs are spread over stages, and refused where they do not fit.


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
