"""The simulation against the papers' formulas, exactly, and against a second simulator written the plain way."""

from __future__ import annotations

import random
import time
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.pace import pace
from penstock.errors import ConfigError
from penstock.schedules import (
    SCHEDULE_NAMES,
    Action,
    Costs,
    Kind,
    Schedule,
    Simulation,
    generate,
    play_shared,
    simulate,
    validate,
    with_communication,
)
from penstock.schedules.costs import durations
from penstock.schedules.schedule import partner

SIZES = st.integers(1, 8)
COUNTS = st.integers(1, 24)
TIMES = st.one_of(st.integers(1, 30), st.fractions(Fraction(1, 9), 9, max_denominator=12))


def known(name: Any, ranks: int, micro_batches: int, chunks: int) -> Schedule:
    return generate(name, ranks, micro_batches, chunks if name == "interleaved" else 1)


# The published figures, exactly.


@settings(deadline=None)
@given(st.sampled_from(["gpipe", "1f1b"]), SIZES, COUNTS, TIMES, TIMES, TIMES)
def test_the_bubble_of_gpipe_and_1f1b_is_p_minus_1_over_m(
    name: Any, p: int, m: int, forward: Any, into: Any, weight: Any
) -> None:
    costs = Costs(forward=forward, backward_input=into, backward_weight=weight)
    result = simulate(generate(name, p, m), costs)
    assert result.bubble_over_ideal == Fraction(p - 1, m)
    assert result.bubble_fraction == Fraction(p - 1, m + p - 1)
    assert result.makespan == (m + p - 1) * (forward + into + weight)
    assert set(result.busy) == {m * (forward + into + weight)}
    assert set(result.idle) == {(p - 1) * (forward + into + weight)}


@settings(deadline=None)
@given(SIZES, st.integers(0, 20), st.integers(2, 4), TIMES, TIMES)
def test_interleaving_divides_the_bubble_by_the_chunks(
    p: int, more: int, v: int, forward: Any, backward: Any
) -> None:
    """For every m ≥ p, not only for the multiples of p."""
    m = p + more
    costs = Costs(forward=forward, backward_input=backward, backward_weight=0)
    assert simulate(generate("interleaved", p, m, v), costs).bubble_over_ideal == Fraction(p - 1, v * m)


@settings(deadline=None)
@given(SIZES, COUNTS, TIMES, TIMES, TIMES)
def test_zb_h1_has_the_papers_bubble(p: int, more: int, forward: Any, into: Any, weight: Any) -> None:
    """(p − 1)(T_F + T_B − T_W), independent of m, against (p − 1)(T_F + T_B + T_W) of 1F1B: Qi et al., Table 2.

    The formula needs a W no longer than F and B, as the paper's measured ones are.
    """
    m, weight = p + more, min(forward, into, weight)
    costs = Costs(forward=forward, backward_input=into, backward_weight=weight)
    split, whole = (simulate(generate(name, p, m), costs) for name in ("zb-h1", "1f1b"))
    assert split.makespan - m * (forward + into + weight) == (p - 1) * (forward + into - weight)
    assert whole.makespan - m * (forward + into + weight) == (p - 1) * (forward + into + weight)
    assert split.busy == whole.busy


def test_zb_h1_has_a_third_of_the_bubble_when_all_parts_take_the_same_time() -> None:
    split, whole = (simulate(generate(name, 4, 8)) for name in ("zb-h1", "1f1b"))
    assert (split.makespan, whole.makespan) == (24 + 3, 24 + 9)


# Memory.


@settings(deadline=None)
@given(SIZES, COUNTS)
def test_1f1b_holds_at_most_p_micro_batches(p: int, m: int) -> None:
    assert simulate(generate("1f1b", p, m)).peak_memory == tuple(min(p - r, m) for r in range(p))
    assert simulate(generate("gpipe", p, m)).peak_memory == (m,) * p


@settings(deadline=None)
@given(SIZES, COUNTS, st.fractions(0, 1, max_denominator=10))
def test_zb_h1_holds_no_more_than_1f1bs_first_rank(p: int, m: int, kept: Fraction) -> None:
    split = simulate(generate("zb-h1", p, m), Costs(kept_for_weight=kept))
    assert max(split.peak_memory) == min(p, m) == max(simulate(generate("1f1b", p, m)).peak_memory)


def test_interleaved_holds_what_narayanan_says() -> None:
    """v·p + (p − 1) chunks at the first rank, that is p (1 + (p − 1) / (p·v)) micro-batches of the whole rank."""
    p, v = 4, 3
    result = simulate(generate("interleaved", p, 12, v), Costs(activation=Fraction(1, v)))
    assert result.peak_memory[0] == Fraction(v * p + p - 1, v) == p * (1 + Fraction(p - 1, p * v))


@settings(deadline=None)
@given(st.sampled_from(SCHEDULE_NAMES), SIZES, COUNTS, st.integers(1, 3), st.randoms(use_true_random=False))
def test_memory_is_what_overlaps_in_time(name: Any, p: int, m: int, v: int, rng: random.Random) -> None:
    schedule = known(name, p, m, v)
    stages = schedule.stages
    whole = [rng.randint(1, 9) for _ in range(stages)]
    kept = [rng.randint(0, some) for some in whole]
    costs = Costs(
        forward=[rng.randint(1, 9) for _ in range(stages)],
        backward_input=rng.randint(1, 9),
        transfer=rng.randint(0, 3),
        activation=whole,
        kept_for_weight=kept,
    )
    result = simulate(schedule, costs)
    for rank in range(p):
        lives: dict[tuple[int, int], list[Any]] = {}
        for span in result.timeline():
            if span.rank == rank:
                life = lives.setdefault((span.action.stage, span.action.micro_batch), [0, 0, 0])
                if span.action.kind == "F":
                    life[0] = span.start
                if span.action.kind in ("B", "I"):
                    life[1] = life[2] = span.end
                if span.action.kind == "W":
                    life[2] = span.end
        held = [
            sum(
                whole[stage] if begin <= when < middle else kept[stage] if middle <= when < end else 0
                for (stage, _), (begin, middle, end) in lives.items()
            )
            for when, *_ in lives.values()
        ]
        assert max(held) == result.peak_memory[rank]


# A second simulator: the start of an action as the latest end of what it needs, by recursion.


def plain(schedule: Schedule, costs: Costs, transfer: list[int]) -> dict[Action, Any]:
    duration, home, last = durations(costs, schedule.stages), schedule.placement, schedule.stages - 1
    before: dict[Action, Action] = {}
    for order in schedule.ranks:
        before.update(zip(order[1:], order))
    exists = {action for order in schedule.ranks for action in order}

    @cache
    def end(action: Action) -> Any:
        return start(action) + duration[action.kind][action.stage]

    @cache
    def start(action: Action) -> Any:
        stage, kind, i = action
        times: list[Any] = [0]
        if action in before:
            times.append(end(before[action]))
        if kind == "F" and stage > 0:
            hop = transfer[stage - 1] if home[stage] != home[stage - 1] else 0
            times.append(end(Action(stage - 1, "F", i)) + hop)
        if kind in ("B", "I"):
            if stage == last:
                times.append(end(Action(stage, "F", i)))
            else:
                nearer = [a for a in (Action(stage + 1, "B", i), Action(stage + 1, "I", i)) if a in exists]
                hop = transfer[stage] if home[stage] != home[stage + 1] else 0
                times.append(end(nearer[0]) + hop)
        return max(times)

    return {action: start(action) for order in schedule.ranks for action in order}


@settings(deadline=None)
@given(
    st.sampled_from(SCHEDULE_NAMES), st.integers(1, 5), st.integers(1, 10), st.integers(1, 3),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_the_plain_simulator_agrees(name: Any, p: int, m: int, v: int, rng: random.Random) -> None:
    schedule = known(name, p, m, v)
    stages = schedule.stages
    transfer = [rng.randint(0, 6) for _ in range(stages - 1)]
    forward, into, weight = ([rng.randint(0, 9) for _ in range(stages)] for _ in range(3))
    costs = Costs(forward=forward, backward_input=into, backward_weight=weight, transfer=transfer)
    expected = plain(schedule, costs, transfer)
    result = simulate(schedule, costs)
    assert {span.action: span.start for span in result.timeline()} == expected
    check_consistent(result)


def check_consistent(result: Simulation) -> None:
    spans = result.timeline()
    assert result.makespan == max(span.end for span in spans)
    for rank, order in enumerate(result.schedule.ranks):
        mine = [span for span in spans if span.rank == rank]
        assert tuple(span.action for span in mine) == order
        assert all(a.end <= b.start for a, b in pairwise(mine))
        assert result.busy[rank] == sum(span.end - span.start for span in mine)
        assert result.idle[rank] == result.makespan - result.busy[rank]


def test_a_transfer_between_stages_of_one_rank_is_free() -> None:
    costs = Costs(transfer=1000)
    assert simulate(generate("interleaved", 1, 4, 3), costs).makespan == 4 * 3 * 3
    assert simulate(generate("gpipe", 2, 1), costs).makespan == 2 * 3 + 2 * 1000


def test_floats_stay_floats_and_whole_numbers_stay_whole() -> None:
    schedule = generate("1f1b", 3, 4)
    assert type(simulate(schedule).makespan) is int
    result = simulate(schedule, Costs(forward=0.5, backward_input=1.25, backward_weight=0.25, transfer=0.125))
    assert isinstance(result.makespan, float)
    assert isinstance(result.bubble_fraction, float)
    assert 0 < result.bubble_fraction < 1


def test_free_work_has_no_bubble() -> None:
    result = simulate(generate("1f1b", 2, 2), Costs(forward=0, backward_input=0, backward_weight=0))
    assert (result.makespan, result.bubble_over_ideal, result.bubble_fraction) == (0, 0, 0)


def test_what_cannot_be_simulated_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"simulate its computations\(\)"):
        simulate(with_communication(generate("1f1b", 2, 2)))
    with pytest.raises(
        ConfigError, match="rank 0 cannot run 0W0, its action 3 of 3: it waits for 0I0, which no rank"
    ):
        simulate(Schedule.parse("rank 0 | 0F0 0B0 0W0"))
    with pytest.raises(ConfigError, match="An action is in the schedule twice"):
        simulate(Schedule.parse("rank 0 | 0F0 0F0 0B0"))


@pytest.mark.alone
def test_a_large_schedule_is_simulated_in_well_under_half_a_second() -> None:
    """p = 64, m = 512, v = 4: 262,144 actions; measured 0.13 s of processor time on one EPYC core."""
    schedule = generate("interleaved", 64, 512, 4)
    taken = []
    for _ in range(2):
        begin = time.process_time()
        result = simulate(schedule)
        taken.append(time.process_time() - begin)
    assert result.bubble_over_ideal == Fraction(63, 4 * 512)
    assert min(taken) < 0.5 * pace()


# Schedules on processors that their ranks share.


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


# Sends and receives are put where they cannot deadlock, whatever the schedule.


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
