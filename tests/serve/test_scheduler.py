"""The queue and the slots: order, bounds, room in the cache, prompts in pieces."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import pytest

from penstock.serve import scheduler
from penstock.serve.scheduler import Job, Limits, QueueFull, Scheduler, TooLong


def take(one: Scheduler) -> list[int]:
    """One turn, done in full; gives the numbers of the jobs that have ended."""
    turn = one.turn()
    for read in turn.reads:
        one.has_read(read)
    ended = [read.job for read in turn.reads if read.job.generated >= read.job.max_tokens]
    ended += [job for job in turn.decode if one.has_made(job)]
    for job in ended:
        assert one.remove(job.number) is job
    return [job.number for job in ended]


def test_jobs_get_slots_in_the_order_in_which_they_came() -> None:
    one = Scheduler(Limits(slots=2, waiting=2))
    for number in range(4):
        one.submit(Job(number, 5, 2))
    with pytest.raises(QueueFull, match="4 requests are served or wait"):
        one.submit(Job(4, 5, 2))
    assert take(one) == []
    assert (one.running, one.waiting) == (2, 2)
    assert take(one) == [0, 1]
    one.submit(Job(4, 5, 2))
    assert [take(one) for _ in range(5)] == [[], [2, 3], [], [4], []]


def test_a_queue_of_no_length_takes_what_finds_a_slot() -> None:
    one = Scheduler(Limits(slots=1, waiting=0))
    one.submit(Job(0, 1, 1))
    with pytest.raises(QueueFull):
        one.submit(Job(1, 1, 1))


def test_the_cache_holds_what_was_promised_and_nobody_overtakes() -> None:
    one = Scheduler(Limits(slots=8, cache=64, block=16, context=64))
    one.submit(Job(0, 20, 13))  # three blocks
    one.submit(Job(1, 20, 13))  # does not fit beside it
    one.submit(Job(2, 1, 1))  # would, but must wait its turn
    assert [read.job.number for read in one.turn().reads] == [0]
    assert one._held == 48
    assert one.remove(0) is not None
    assert [read.job.number for read in one.turn().reads] == [1, 2]
    assert one._held == 64


@pytest.mark.parametrize(("prompt", "most"), [(40, 30), (0, 5), (5, 0), (10**9, 1)])
def test_what_can_never_run_is_refused(prompt: int, most: int) -> None:
    one = Scheduler(Limits(context=64))
    with pytest.raises(TooLong):
        one.submit(Job(0, prompt, most))
    assert one.waiting == 0


def test_prompts_are_read_in_pieces_beside_the_tokens_of_others() -> None:
    one = Scheduler(Limits(slots=4, chunk=10))
    one.submit(Job(0, 4, 9))
    one.submit(Job(1, 25, 9))
    first = one.turn()
    assert [(read.job.number, read.start, read.stop) for read in first.reads] == [(0, 0, 4), (1, 0, 6)]
    for read in first.reads:
        one.has_read(read)
    second = one.turn()
    assert [job.number for job in second.decode] == [0]
    assert [(read.start, read.stop) for read in second.reads] == [(6, 16)]


def test_jobs_can_be_taken_out_wherever_they_are() -> None:
    one = Scheduler(Limits(slots=1))
    for number in range(3):
        one.submit(Job(number, 4, 9))
    one.turn()
    assert one.remove(0) is not None
    assert one.remove(1) is not None
    assert (one.running, one.waiting, one._held) == (0, 1, 0)
    assert one.remove(1) is None


def test_whatever_happens_the_bounds_hold_and_all_ends() -> None:
    draw = random.Random(1)
    for _ in range(40):
        limits = Limits(
            slots=draw.randint(1, 5), waiting=draw.randint(0, 6), context=60, cache=draw.randint(64, 200),
            chunk=draw.randint(1, 40),
        )  # fmt: skip
        one, number, left = Scheduler(limits), 0, set[int]()
        for step in range(300):
            if step < 200 and draw.random() < 0.7:
                try:
                    one.submit(Job(number, draw.randint(1, 30), draw.randint(1, 30)))
                    left.add(number)
                except QueueFull:
                    assert one.running + one.waiting == limits.room
                number += 1
            if left and draw.random() < 0.1:
                gone = draw.choice(sorted(left))
                assert one.remove(gone) is not None
                left.discard(gone)
            left -= set(take(one))
            assert one._held <= limits.cache
            assert one.running <= limits.slots
            assert one._held == sum(limits.blocks(job.tokens) for job in one._running.values())
            assert {job.number for job in (*one._running.values(), *one._waiting)} == left
        while left:
            left -= set(take(one))
        assert one._held == 0


def test_it_has_no_tensors() -> None:
    folder = Path(scheduler.__file__).parent
    for name in ("__init__", "scheduler", "traffic", "settings", "deploy"):
        text = (folder / f"{name}.py").read_text(encoding="utf-8")
        names = [
            alias.name if isinstance(node, ast.Import) else f"{node.module}"
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        ]
        assert not [name for name in names if name.partition(".")[0] == "torch"]
