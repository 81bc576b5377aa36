"""Validation finds what is wrong, says who waits for what, and agrees with torch on what can be run."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.schedules import SCHEDULE_NAMES, Action, Schedule, generate, simulate, validate

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")


def problems(text: str | Schedule) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        validate(Schedule.parse(text) if isinstance(text, str) else text)
    return error.value.problems


def test_a_deadlock_names_rank_action_and_what_it_waits_for() -> None:
    assert problems("rank 0 | 0F0 0B0 0F1 0B1\nrank 1 | 1F0 1F1 1B0 1B1") == (
        "Deadlock: rank 0 cannot run 0B0, its action 2 of 4: it waits for 1B0, which rank 1 has as its action 3, "
        "after 1F1.",
        "Deadlock: rank 1 cannot run 1F1, its action 2 of 4: it waits for 0F1, which rank 0 has as its action 3, "
        "after 0B0.",
    )


def test_an_order_that_contradicts_itself_on_one_rank() -> None:
    assert problems("rank 0 | 0B0 0F0") == (
        "Deadlock: rank 0 cannot run 0B0, its action 1 of 2: it waits for 0F0, which the same rank has only as its "
        "action 2.",
    )
    assert problems("rank 0 | 0F0 0W0 0I0")[0].endswith(
        "cannot run 0W0, its action 2 of 3: it waits for 0I0, which the same rank has only as its action 3."
    )


def test_ranks_that_wait_for_one_that_is_stuck_are_told_too() -> None:
    found = problems("rank 0 | 0F0 0B0\nrank 1 | 1B0 1F0\nrank 2 | 2F0 2B0")
    assert [message.split(":")[1] for message in found] == [
        " rank 0 cannot run 0B0, its action 2 of 2",
        " rank 1 cannot run 1B0, its action 1 of 2",
        " rank 2 cannot run 2F0, its action 1 of 2",
    ]
    assert "waits for 1B0, which rank 1 cannot run either" in found[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rank 0 | 0F0 0B0 0F1", "Stage 0 and micro-batch 1 must have 0F1 and either 0B1 or both 0I1 and 0W1, but the "
         "schedule has 0F1."),
        ("rank 0 | 0F0 0B0 0B1", "but the schedule has 0B1."),
        ("rank 0 | 0F0 0I0", "but the schedule has 0F0, 0I0."),
        ("rank 0 | 0F0 0B0 0W0", "but the schedule has 0F0, 0B0, 0W0."),
        ("rank 0 | 0F1 0B1", "but the schedule has nothing."),
        ("rank 0 | 0F0 0B0 0F0", "0F0 is in the schedule 2 times; it must be there once."),
        ("rank 0 | 0F0 0B0\nrank 1 | 0F1 0B1", "Stage 0 is run by ranks 0 and 1"),
        ("rank 0 | 1F0 1B0", "No rank runs stage 0"),
        ("rank 0 |", "The schedule has no actions"),
        ("rank 0 | 0F0 0SEND_F0 0B0", "0SEND_F0 has no stage at its other end; remove it."),
        ("rank 0 | 0F0 0SEND_F0 1RECV_F0 1F0 1B0 0B0", "0SEND_F0 is between stages 0 and 1, which share rank 0"),
    ],
)  # fmt: skip
def test_every_action_is_there_once_and_has_its_place(text: str, words: str) -> None:
    assert any(words in problem for problem in problems(text))


def test_a_schedule_full_of_holes_gives_a_message_one_can_read() -> None:
    schedule = generate("gpipe", 4, 100)
    holes = Schedule(tuple(tuple(a for a in order if a.kind == "F") for order in schedule.ranks))
    found = problems(holes)
    assert len(found) == 21
    assert found[-1] == "And 380 more problems of this kind."


# With sends and receives written out, each blocks until its partner is reached.

UNFUSED = """
rank 0 | 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2
rank 1 | 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2
"""


def test_the_classic_deadlock_of_1f1b_with_blocking_sends() -> None:
    """Both neighbours send to each other first; with buffered sends the same order runs through."""
    found = problems(UNFUSED)
    assert found[0] == (
        "Deadlock: rank 0 cannot run 0SEND_F1, its action 4 of 12: it waits for 1RECV_F1, which rank 1 has as its "
        "action 5, after 1SEND_B0."
    )
    assert found[1] == (
        "Deadlock: rank 1 cannot run 1SEND_B0, its action 4 of 12: it waits for 0RECV_B0, which rank 0 has as its "
        "action 5, after 0SEND_F1."
    )
    validate(Schedule.parse(UNFUSED).computations())


def test_a_receive_that_nobody_wrote() -> None:
    found = problems("rank 0 | 0F0 0SEND_F0 0RECV_B0 0B0\nrank 1 | 1F0 1B0 1SEND_B0")
    assert (
        "rank 0 cannot run 0SEND_F0, its action 2 of 4: it waits for 1RECV_F0, which no rank runs."
        in found[0]
    )
    assert "rank 1 cannot run 1F0, its action 1 of 3: it waits for 1RECV_F0, which no rank runs." in found[1]


def test_a_send_before_what_it_sends() -> None:
    found = problems("rank 0 | 0SEND_F0 0F0 0RECV_B0 0B0\nrank 1 | 1RECV_F0 1F0 1B0 1SEND_B0")
    assert "rank 0 cannot run 0SEND_F0, its action 1 of 4: it waits for 0F0" in found[0]


# torch as the witness: it counts actions and their order on a rank, and finds deadlocks while it adds transfers.


def torch_accepts(schedule: Schedule) -> bool:
    table = {
        rank: [torch_schedules._Action.from_str(str(action)) for action in order]
        for rank, order in enumerate(schedule.ranks)
    }
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it could not place
        try:
            home = torch_schedules._validate_schedule(
                table, len(table), schedule.stages, schedule.micro_batches
            )
            torch_schedules._add_send_recv(table, lambda stage: home[stage], schedule.stages)
        except (AssertionError, RuntimeError, IndexError):  # the last from formatting its own message
            return False
    return True


def ours_accepts(schedule: Schedule) -> bool:
    try:
        validate(schedule)
    except ConfigError:
        return False
    return True


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(SCHEDULE_NAMES), st.integers(1, 4), st.integers(1, 6), st.integers(1, 3), st.data())
def test_torch_agrees_on_what_can_be_run(
    name: Any, ranks: int, micro_batches: int, chunks: int, data: st.DataObject
) -> None:
    schedule = generate(name, ranks, micro_batches, chunks if name == "interleaved" else 1)
    assert torch_accepts(schedule)
    orders = [list(order) for order in schedule.ranks]
    for _ in range(data.draw(st.integers(0, 3))):
        order = orders[data.draw(st.integers(0, ranks - 1))]
        i, j = (data.draw(st.integers(0, len(order) - 1)) for _ in range(2))
        order[i], order[j] = order[j], order[i]
    changed = Schedule(tuple(map(tuple, orders)))
    assert ours_accepts(changed) == torch_accepts(changed)
    if not ours_accepts(changed):
        with pytest.raises(ConfigError, match="Deadlock: rank"):
            simulate(changed)


def test_torch_also_refuses_the_deadlock() -> None:
    """The witness can say no, so its agreement above means something."""
    stuck = Schedule.parse("rank 0 | 0F0 0B0 0F1 0B1\nrank 1 | 1F0 1F1 1B0 1B1")
    assert not torch_accepts(stuck)
    assert Action.parse("0F0") in stuck.ranks[0]
