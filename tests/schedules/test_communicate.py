"""Sends and receives are put where they cannot deadlock, whatever the schedule."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.schedules import (
    SCHEDULE_NAMES,
    Action,
    Kind,
    Schedule,
    generate,
    simulate,
    validate,
    with_communication,
)
from penstock.schedules.deadlock import partner


def any_order(rng: random.Random, stages: int, ranks: int, micro_batches: int) -> Schedule:
    """A valid schedule at random: any placement, backwards split or not, any order that respects the dependencies."""
    placement = [*range(ranks), *(rng.randrange(ranks) for _ in range(stages - ranks))]
    rng.shuffle(placement)
    chains: list[list[Action]] = []
    for i in range(micro_batches):
        halves: list[Kind] = ["I" if rng.random() < 0.5 else "B" for _ in range(stages)]
        chains.append(
            [Action(s, "F", i) for s in range(stages)]
            + [Action(s, halves[s], i) for s in reversed(range(stages))]
        )
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    waiting: list[Action] = []
    while any(chains) or waiting:
        pick = rng.randrange(sum(map(bool, chains)) + len(waiting))
        if pick < len(waiting):
            action = waiting.pop(pick)
        else:
            action = [chain for chain in chains if chain][pick - len(waiting)].pop(0)
            if action.kind == "I":
                waiting.append(Action(action.stage, "W", action.micro_batch))
        orders[placement[action.stage]].append(action)
    return Schedule(tuple(map(tuple, orders)))


def check(schedule: Schedule) -> None:
    lowered = with_communication(schedule)
    assert lowered.computations() == schedule
    validate(lowered)
    # Each transfer is there once at both ends, and two ranks' transfers come in one order at both.
    home = schedule.placement
    channels: dict[tuple[int, int], list[list[Action]]] = {}
    for rank, order in enumerate(lowered.ranks):
        for action in order:
            if action.communicates:
                other = home[partner(action).stage]
                assert other != rank
                ends = channels.setdefault((min(rank, other), max(rank, other)), [[], []])
                send = action if action.kind.startswith("SEND") else partner(action)
                ends[rank > other].append(send)
    for low, high in channels.values():
        assert low == high
    hops = sum(home[s] != home[s + 1] for s in range(schedule.stages - 1))
    assert len(lowered) - len(schedule) == 4 * hops * schedule.micro_batches


@settings(deadline=None)
@given(st.sampled_from(SCHEDULE_NAMES), st.integers(1, 6), st.integers(1, 12), st.integers(1, 3))
def test_known_schedules(name: Any, ranks: int, micro_batches: int, chunks: int) -> None:
    check(generate(name, ranks, micro_batches, chunks if name == "interleaved" else 1))


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(0, 5), st.integers(1, 6), st.randoms(use_true_random=False))
def test_any_schedule_at_all(ranks: int, more_stages: int, micro_batches: int, rng: random.Random) -> None:
    schedule = any_order(rng, ranks + more_stages, ranks, micro_batches)
    validate(schedule)
    check(schedule)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_torch_runs_the_result_through(name: Any) -> None:
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = generate(name, 4, 8, 2 if name == "interleaved" else 1)
    table = {
        rank: [torch_schedules._Action.from_str(str(action)) for action in order]
        for rank, order in enumerate(with_communication(schedule).ranks)
    }
    played = torch_schedules._simulate_comms_compute(table, lambda s: schedule.placement[s], schedule.stages)
    ran = {rank: [str(a) for a in actions if a is not None] for rank, actions in played.items()}
    assert ran == {r: list(map(str, order)) for r, order in enumerate(with_communication(schedule).ranks)}


def test_a_transfer_stands_between_what_makes_and_what_needs_it() -> None:
    assert str(with_communication(generate("1f1b", 2, 2))) == (
        "rank 0 | 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n"
        "rank 1 | 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
    )


def test_what_cannot_be_lowered() -> None:
    with pytest.raises(ConfigError, match="sends and receives cannot be simulated"):
        with_communication(with_communication(generate("1f1b", 2, 2)))
    with pytest.raises(ConfigError, match="Deadlock: rank 0 cannot run 0B0"):
        with_communication(Schedule.parse("rank 0 | 0B0 0F0"))
    assert simulate(generate("1f1b", 1, 1)).makespan == 3
