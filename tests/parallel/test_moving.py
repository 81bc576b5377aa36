"""Experts that move while ranks serve: every logit stays the same to the bit, and a move that stalls is given up."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from helpers.generation import served, tiny
from helpers.spawn import pool
from penstock.config.decoding import Decoding
from penstock.config.plan import Plan
from penstock.decode.engine import Engine, Request
from penstock.infer.load import loaded
from penstock.parallel import dims_of
from penstock.parallel.hosts import even_slots
from penstock.parallel.moving import Mover, Transfer, transfers_of
from penstock.planner.loads import LoadRecord
from penstock.serve.balance import Balance, slots_by
from penstock.serve.led import Led

TEXTS = 9


class Recording(Engine):
    """An engine that keeps the logits that it chooses by."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logits: list[torch.Tensor] = []

    def _choose(self, slots: Any, logits: torch.Tensor, behind: Any = None) -> torch.Tensor:
        self.logits.append(logits.clone())
        return super()._choose(slots, logits, behind)


def _requests() -> list[Request]:
    """Of several lengths, each second one drawn."""
    return [
        Request(
            ids=tuple((7 * text + k) % 60 for k in range(2 + 3 * text % 11)),
            decoding=Decoding(max_tokens=9 + text, temperature=float(text % 2), seed=2),
        )
        for text in range(TEXTS)
    ]


@contextlib.contextmanager
def _stalling() -> Iterator[None]:
    """Inside, the first piece that a rank is to send stays where it is."""
    ends, first, send = threading.Event(), [True], Mover._send

    def late(self: Mover, *args: Any) -> None:
        if first:
            first.clear()
            ends.wait()
        send(self, *args)

    with mock.patch.object(Mover, "_send", late):
        yield
        ends.set()


def _led(line: str, spare: int, every: int, piece: int, stalls: bool = False) -> tuple[Any, ...]:
    """Texts, this rank's logits, moves that were made, where experts were at the end, and moves that were given up.
    Products have three rows, so that replicas share an expert's tokens."""
    with mock.patch("penstock.parallel.hosts.ROWS", 3), _stalling() if stalls else contextlib.nullcontext():
        return _served(line, spare, every, piece)


def _served(line: str, spare: int, every: int, piece: int) -> tuple[Any, ...]:
    plan = Plan.parse(line)
    dims = dims_of(plan, "cpu")
    model = tiny("mixtral", dtype=torch.float32)
    record = LoadRecord(("a", "b"), (), (((9, 1, 1, 1),), ((1, 1, 1, 9),)))
    slots = slots_by(record, [4, 4], plan.ep, spare) if spare else [even_slots(4, plan.ep)] * 2
    found = loaded(model, plan, weights="plain", tokenizer=None, dims=dims, slots=slots)
    engine = Recording(found.model, slots=2, context=48, cache="paged", block=4, chunk=6, start=0)
    clock = itertools.count().__next__
    balance = Balance(every, list(slots), clock, patience=6.0) if dims.main else None
    led = Led(engine, dims, balance)
    assert led.mover is not None
    led.mover.piece_bytes = piece
    made: list[list[int]] = []
    if dims.rank:
        led.follow()
    else:
        made = [tokens for tokens, _ in served(led, _requests())]
        led.dismiss()
    assert led.rounds is not None
    for hosts in led.rounds.hosts:
        assert set(hosts.experts) == set(hosts.slots[led.rounds.index])
    ended = [hosts.slots for hosts in led.rounds.hosts]
    counts = (0, 0) if balance is None else (balance.moves, balance.given_up)
    return made, engine.logits, counts[0], ended, counts[1]


def test_weights_come_from_hosts_that_have_them() -> None:
    before, after = ((0, 1), (1, 2), (3,)), ((0, 2), (1, 3), (1, 0))
    assert transfers_of(before, after) == [
        Transfer(2, 1, 0), Transfer(3, 2, 1), Transfer(0, 0, 2), Transfer(1, 0, 2),
    ]  # fmt: skip
    assert transfers_of(before, before) == []


@pytest.mark.parametrize(
    ("line", "spare"), [("dp=2 ep=2", 0), pytest.param("dp=2 tp=2 ep=4", 2, marks=pytest.mark.sweep)]
)
def test_moves_and_replicas_change_no_bit(line: str, spare: int) -> None:
    ranks = pool(Plan.parse(line).gpus)
    stays = ranks.run(_led, line, 0, 0, 1 << 18)
    moves = ranks.run(_led, line, spare, 3, 2000)
    assert all(len(text) == 9 + number for number, text in enumerate(stays[0][0]))
    assert stays[0][2] == 0
    assert moves[0][2] >= 1
    assert all(one[3] == moves[0][3] for one in moves)
    for before, after in zip(stays, moves):
        assert after[0] == before[0]
        assert len(after[1]) == len(before[1]) > 10
        assert all(map(torch.equal, after[1], before[1]))


def test_a_move_that_stalls_is_given_up_and_nobody_waits_for_it() -> None:
    ranks = pool(2)
    expected = ranks.run(_led, "dp=2 ep=2", 0, 0, 1 << 18)
    stalled = ranks.run(_led, "dp=2 ep=2", 0, 3, 700, True)
    assert stalled[0][4] >= 1
    for before, after in zip(expected, stalled):
        assert after[0] == before[0]
        assert all(map(torch.equal, after[1], before[1]))


def test_a_rank_sends_one_piece_a_step_however_long_it_only_received() -> None:
    expert = SimpleNamespace(flat=torch.zeros(6))
    hosts: Any = SimpleNamespace(
        slots=((0,), (1,)), experts={0: expert}, no_rows=torch.zeros(0), expert_bytes=24
    )
    rounds: Any = SimpleNamespace(group=None, hosts=[hosts], index=0, state=0, states=torch.zeros(2))
    received, sent = threading.Event(), queue.Queue[int]()
    with mock.patch("penstock.parallel.moving.distributed") as distributed:
        distributed.recv.side_effect = lambda *_, **__: received.wait()
        distributed.send.side_effect = lambda piece, **_: sent.put(piece.numel())
        mover = Mover(rounds, piece_bytes=8)
        mover.begin(0, ((1,), (0,)))  # it receives expert 1 first, and sends expert 0 then
        for _ in range(5):
            mover.step()
        received.set()
        assert sent.get(timeout=60) == 2
        for _ in range(2):
            with pytest.raises(queue.Empty):
                sent.get(timeout=0.2)
            mover.step()
            assert sent.get(timeout=60) == 2


def test_a_balance_moves_what_is_worth_it_and_reports_what_stalls(caplog: pytest.LogCaptureFixture) -> None:
    time = [0.0]
    balance = Balance(2, [((0, 1), (2, 3))], lambda: time[0], patience=3.0)

    def visits() -> list[list[int]]:
        return [[9, 8, 1, 2]]

    assert balance.orders(visits, 0, complete=False) == []
    ((order, mixture, slots),) = balance.orders(visits, 0, complete=False)
    assert (order, mixture) == ("begin", 0)
    assert sorted(map(sorted, slots)) in ([[0, 2], [1, 3]], [[0, 3], [1, 2]])
    assert balance.figures == [1.7]
    assert balance.state() == {"visits": [[9, 8, 1, 2]], "until": 2, "load": 1.7, "moves": 0, "given_up": 0}
    assert balance.orders(visits, 1, complete=False) == []
    time[0] = 1000.0  # nothing was to do for long
    assert balance.orders(visits, 1, complete=False) == []
    assert balance.orders(visits, 2, complete=False) == []
    waited = 0
    while not (orders := balance.orders(visits, 2, complete=False)):
        time[0], waited = time[0] + 0.25, waited + 1
    assert orders == [("give up",)]
    assert waited == 13
    assert (balance.moves, balance.given_up, balance.slots) == (0, 1, [((0, 1), (2, 3))])
    assert "did not move for 3 s, after 2 pieces" in caplog.text
    later = [[18, 16, 2, 4]]
    found = [order for _ in range(3) for order in balance.orders(lambda: later, 0, complete=False)]
    assert [order[0] for order in found] == ["begin"]
    assert balance.orders(visits, 4, complete=True) == [("switch",)]
    assert (balance.moves, balance.slots) == (1, [found[0][2]])
    # Loads that differ by little stay where they are.
    even = Balance(1, [((0, 1), (2, 3))], lambda: 0.0)
    assert even.orders(lambda: [[10, 10, 10, 9]], 0, complete=False) == []
