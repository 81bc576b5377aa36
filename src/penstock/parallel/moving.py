"""Experts that move to other ranks while these serve.

A move changes the placement of one mixture. Weights of experts travel in pieces, one from each source per step, by
threads that run beside the steps and use their own group. Until all ranks switch, at the same step, tokens are sent to
the old places. Arrivals are reported with each round of exchanges, so no rank waits for them.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor, distributed

from penstock.parallel.hosts import Expert, Hosts, Rounds, Slots

log = logging.getLogger(__name__)
PIECE_BYTES = 1 << 18
"""Bytes of weights that a rank sends per step: few enough not to slow the step down noticeably."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One expert that is sent from a rank that hosts it to a new host."""

    expert: int
    source: int
    target: int


def transfers_of(before: Slots, after: Slots) -> list[Transfer]:
    """All transfers for a new placement, in the same order on all ranks; replicas take turns as sources."""
    transfers: list[Transfer] = []
    busy = [0] * len(before)
    for target, (now, then) in enumerate(zip(after, before, strict=True)):
        for expert in sorted(set(now) - set(then)):
            holders = [rank for rank, held in enumerate(before) if expert in held]
            source = min(holders, key=busy.__getitem__)
            busy[source] += 1
            transfers.append(Transfer(expert, source, target))
    return transfers


@dataclass(eq=False)
class _Under:
    """A move in progress, on one rank."""

    hosts: Hosts
    after: Slots
    transfers: list[Transfer]
    permit: threading.Event = field(default_factory=threading.Event)
    """Permission to send one piece. Unused permits are not saved up: else one later step would send all pieces."""
    arrived: dict[int, Tensor] = field(default_factory=dict)
    """Weights of experts that have fully arrived."""
    pieces: int = 0
    """Number of pieces that have arrived."""
    given_up: bool = False


class Mover:
    """This rank's part in moves, one at a time. All ranks call the same methods at the same steps."""

    def __init__(self, rounds: Rounds, piece_bytes: int = PIECE_BYTES) -> None:
        self.rounds, self.piece_bytes = rounds, piece_bytes
        ranks = distributed.get_process_group_ranks(rounds.group)
        self._group = distributed.new_group(ranks, backend="gloo")
        self._under: _Under | None = None
        self._count = 0

    @property
    def busy(self) -> bool:
        """Whether a move is in progress."""
        return self._under is not None

    @property
    def pieces(self) -> int:
        """Number of pieces that have arrived on all ranks, as reported in the last round."""
        return int(self.rounds.states.sum())

    def begin(self, number: int, after: Slots) -> None:
        """Begin to move experts of mixture `number` to another placement."""
        assert self._under is None
        hosts = self.rounds.hosts[number]
        self._under = under = _Under(hosts, after, transfers_of(hosts.slots, after))
        self._count += 1
        self.rounds.state, self.rounds.states = 0, self.rounds.states * 0
        here = self.rounds.index
        if any(here in (transfer.source, transfer.target) for transfer in under.transfers):
            threading.Thread(target=self._transfer, args=(under, self._count), daemon=True).start()

    def step(self) -> None:
        """Allow this rank to send one more piece."""
        if self._under is not None:
            self._under.permit.set()

    def complete(self) -> bool:
        """Whether all ranks have their new experts, as of the last round; the same on all ranks."""
        if self._under is None:
            return False
        size, step = self._sizes(self._under)
        return self.pieces == len(self._under.transfers) * -(-size // step)

    def switch(self) -> None:
        """Route tokens by the new placement from now on."""
        under, here = self._under, self.rounds.index
        assert under is not None
        for transfer in under.transfers:
            if transfer.target == here:
                under.hosts.experts[transfer.expert] = Expert(
                    under.arrived[transfer.expert], under.hosts.shapes
                )
        under.hosts.place(under.after)
        self._under = None

    def give_up(self) -> None:
        """Leave experts where they are, and discard arrived pieces."""
        if self._under is not None:
            self._under.given_up = True
            self._under.permit.set()
        self._under = None

    def _sizes(self, under: _Under) -> tuple[int, int]:
        """Number of elements of an expert, and of one piece."""
        each = under.hosts.no_rows.element_size()
        return under.hosts.expert_bytes // each, max(1, self.piece_bytes // each)

    def _transfer(self, under: _Under, move: int) -> None:
        """Send and receive this rank's part, in the order of all transfers, so no two ranks wait for each other."""
        like = under.hosts.no_rows
        size, step = self._sizes(under)
        try:
            for number, one in enumerate(under.transfers):
                # Pieces of an abandoned move may still arrive: each move has its own tags.
                tag = move * 4096 + number
                if one.source == self.rounds.index:
                    weights = under.hosts.experts[one.expert].flat
                    for begin in range(0, size, step):
                        self._send(weights[begin : begin + step], one, tag, under)
                elif one.target == self.rounds.index:
                    weights = like.new_empty(size)
                    for begin in range(0, size, step):
                        part = weights[begin : begin + step]
                        piece = torch.empty_like(part, device="cpu") if part.is_cuda else part
                        distributed.recv(piece, group=self._group, group_src=one.source, tag=tag)
                        if piece is not part:
                            part.copy_(piece)
                        under.pieces += 1
                        if not under.given_up:
                            self.rounds.state = under.pieces
                    under.arrived[one.expert] = weights
                if under.given_up:
                    return
        except RuntimeError as problem:
            log.warning("Experts cannot be sent to another rank: %s", problem)

    def _send(self, piece: Tensor, one: Transfer, tag: int, under: _Under) -> None:
        under.permit.wait()
        under.permit.clear()
        if under.given_up:
            under.permit.set()  # no need to wait with the remaining pieces
        else:
            distributed.send(piece.cpu(), group=self._group, group_dst=one.target, tag=tag)
