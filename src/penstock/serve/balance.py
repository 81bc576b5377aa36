"""When and where experts move while a model serves: host logic, without tensors.

Loads are checked every few steps. Each check computes, one mixture after the other, a placement from the loads since
the previous check that changes few slots, and starts a move if that relieves the busiest rank enough to be worth it. A
move that makes no progress is abandoned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import ConfigError
from penstock.planner.loads import LoadRecord, imbalance
from penstock.planner.placement import Placement, Room, place, slots_needed

log = logging.getLogger(__name__)
Slots = tuple[tuple[int, ...], ...]
GAIN = 0.05
"""A move must reduce the ratio of the largest load of a rank to the mean by at least this."""
_LOOK = 256
"""Steps between two checks if experts stay: loads are reported all the same."""
_SHARE = 20
"""A move changes at most one in this many slots of a mixture, but is allowed at least two, for a swap."""


def slots_by(record: LoadRecord, experts: Sequence[int], ranks: int, spare: int) -> list[Slots]:
    """The experts of each rank, for each mixture, placed by a record of loads, with `spare` replicas in addition to one
    copy of each expert. `experts` has the number of experts of each mixture. Raises ConfigError for a record of another
    model, and for more replicas than ranks have room for."""
    recorded = [len(row) for row in record.totals]
    if recorded != list(experts):
        raise ConfigError(
            f"The record of loads has mixtures of {recorded} experts, but the model has {list(experts)}; give a record "
            "of this model."
        )
    least = min(experts, default=0)
    if spare > least * (ranks - 1):
        raise ConfigError(
            f"There are {spare} spare experts, but {ranks} devices have room for {least * (ranks - 1)} in "
            f"addition to one copy of each of {least}, because no device holds an expert twice; use fewer."
        )
    made_from, _ = record.history()
    return [place(loads, Room(gpus=ranks, slots=len(loads) + spare)).devices for loads in made_from]


def unevenness_of(record: LoadRecord, slots: Sequence[Slots]) -> float:
    """The ratio of the largest load of a rank to the mean, averaged over mixtures, in the last window of a record. If
    the record has several windows, that window is later than the windows that `slots_by` uses."""
    made_from, later = record.history()
    loads = made_from if later is None else later
    return sum(Placement(mixture).figure(row) for mixture, row in zip(slots, loads)) / max(1, len(slots))


def spare_for(record: LoadRecord, ranks: int, target: float = 1.05) -> int:
    """The smallest number of replicas, in addition to one copy of each expert, with which the most uneven mixture has a
    largest load of at most `target` times the mean; 0 if no number achieves it."""
    made_from, _ = record.history()
    loads = max(made_from, key=imbalance)
    return (slots_needed(loads, Room(gpus=ranks), target) or len(loads)) - len(loads)


@dataclass(slots=True)
class Balance:
    """The leader's decisions on moves: its orders at the beginning of each step."""

    every: int
    """Steps between two checks of the loads; 0: experts stay."""
    slots: list[Slots]
    """The experts of each rank, for each mixture."""
    clock: Callable[[], float]
    patience: float = 30.0
    """Seconds without progress after which a move is abandoned. A step counts as at most a tenth of it, because a
    server may be idle for long."""
    moves: int = 0
    """Number of completed moves."""
    given_up: int = 0
    figures: list[float] = field(default_factory=list)
    """The ratio of a rank's largest load to the mean, for each mixture, between the last two checks."""
    looks: int = 0
    visits: Sequence[Sequence[int]] = ()
    """Visits to each expert of each mixture up to the last check."""
    until: int = 0
    """Steps up to the last check."""
    _steps: int = 0
    _reported: tuple[int, int, int] = (0, 0, 0)
    _window: Sequence[Sequence[int]] = ()
    _waiting: Sequence[int] = ()
    """Mixtures that the current check has not yet handled."""
    _number: int | None = None
    """The mixture whose experts move."""
    _after: Slots = ()
    _pieces: int = -1
    _stalled: float = 0.0
    _last: float = 0.0

    def orders(
        self, visits: Callable[[], Sequence[Sequence[int]]], pieces: int, complete: bool
    ) -> list[tuple[Any, ...]]:
        """Orders for all ranks before a step: `("begin", mixture, slots)`, `("switch",)` or `("give up",)`. `visits`
        returns the visits to each expert of each mixture so far; `pieces` is how many pieces of the current move have
        arrived, `complete` whether all have."""
        self._steps += 1
        if self._number is not None:
            return self._go_on(pieces, complete)
        if self._steps - self.until >= (self.every or _LOOK) and not self._waiting:
            self._look(visits())
        if not self._waiting:
            return []
        # One mixture per step, because computing a placement takes time.
        number, *self._waiting = self._waiting
        return self._begin(number, self._window[number])

    def _look(self, visits: Sequence[Sequence[int]]) -> None:
        before = self.visits or [[0] * len(row) for row in visits]
        self._window = [[a - b for a, b in zip(row, then)] for row, then in zip(visits, before)]
        self.visits, self.until = visits, self._steps
        self.figures = self.figures or [1.0] * len(visits)
        self.looks, self._waiting = self.looks + 1, list(range(len(visits)))

    def state(self) -> dict[str, Any]:
        """The state as plain values: `visits` until the step `until`, the highest `load` of `figures`, `moves` and
        `given_up`."""
        return {
            "visits": self.visits, "until": self.until, "load": max(self.figures, default=1.0),
            "moves": self.moves, "given_up": self.given_up,
        }  # fmt: skip

    def news(self) -> dict[str, Any] | None:
        """The state, if it has changed since the last call."""
        before, self._reported = self._reported, (self.looks, self.moves, self.given_up)
        return self.state() if self._reported != before else None

    def _begin(self, number: int, loads: Sequence[int]) -> list[tuple[Any, ...]]:
        now = self.slots[number]
        before, count = Placement(now), sum(map(len, now))
        self.figures[number] = before.figure(loads)
        if not self.every:
            return []
        room = Room(gpus=len(now), slots=count)
        placement = place(loads, room, before=before, moves=max(2, count // _SHARE))
        if self.figures[number] - placement.figure(loads) < GAIN:
            return []
        self._number, self._after, self._pieces, self._last = number, placement.devices, -1, self.clock()
        return [("begin", number, placement.devices)]

    def _go_on(self, pieces: int, complete: bool) -> list[tuple[Any, ...]]:
        assert self._number is not None
        if complete:
            self.slots[self._number] = self._after
            self.moves, self._number = self.moves + 1, None
            return [("switch",)]
        now = self.clock()
        self._stalled += min(now - self._last, self.patience / 10)
        self._last = now
        if pieces != self._pieces:
            self._pieces, self._stalled = pieces, 0.0
        elif self._stalled > self.patience:
            log.warning(
                "Experts of mixture %d did not move for %.0f s, after %d pieces of their weights: the move is "
                "abandoned, and they stay in place.", self._number, self._stalled, pieces,
            )  # fmt: skip
            self.given_up, self._number = self.given_up + 1, None
            return [("give up",)]
        return []
