"""When experts move while a model serves, and where to: host logic, without tensors.

Loads are looked at in windows of some steps. Each look makes, one mixture after the other, a placement from the loads
since the look before it that changes few slots, and starts a move where that makes the busiest rank less busy by enough
to be worth it. A move that makes no progress is given up.
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
"""By how much a move must lower the largest load of a rank over the mean."""
_LOOK = 256
"""Steps between two looks where experts stay: loads are reported all the same."""
_SHARE = 20
"""A move changes at most one in this many slots of a mixture, but at least two: an exchange."""


def slots_by(record: LoadRecord, experts: Sequence[int], ranks: int, spare: int) -> list[Slots]:
    """The experts of each rank, for each mixture, by a record of loads, with `spare` replicas besides one of each
    expert. `experts` are how many each mixture has. Raises ConfigError for a record of another model, and for more
    replicas than ranks have room for."""
    recorded = [len(row) for row in record.totals]
    if recorded != list(experts):
        raise ConfigError(
            f"The record of loads has mixtures of {recorded} experts, but the model has {list(experts)}; give a record "
            "of this model."
        )
    least = min(experts, default=0)
    if spare > least * (ranks - 1):
        raise ConfigError(
            f"There are {spare} spare experts, but {ranks} devices have room for {least * (ranks - 1)} besides one of "
            f"each of {least}, for none holds an expert twice; use fewer."
        )
    made_from, _ = record.history()
    return [place(loads, Room(gpus=ranks, slots=len(loads) + spare)).devices for loads in made_from]


def unevenness_of(record: LoadRecord, slots: Sequence[Slots]) -> float:
    """The largest load of a rank over the mean one, the mean over mixtures, in the last window of a record: later than
    what `slots_by` places by, where the record has several."""
    made_from, later = record.history()
    loads = made_from if later is None else later
    return sum(Placement(mixture).figure(row) for mixture, row in zip(slots, loads)) / max(1, len(slots))


def spare_for(record: LoadRecord, ranks: int, target: float = 1.05) -> int:
    """The fewest replicas besides one of each expert with which the most uneven mixture has a largest load of at most
    `target` times the mean; 0 where no number of them does."""
    made_from, _ = record.history()
    loads = max(made_from, key=imbalance)
    return (slots_needed(loads, Room(gpus=ranks), target) or len(loads)) - len(loads)


@dataclass(slots=True)
class Balance:
    """The leader's part in moves: what it orders at the beginning of each step."""

    every: int
    """Steps from one look at the loads to the next; 0: experts stay."""
    slots: list[Slots]
    """The experts of each rank, for each mixture."""
    clock: Callable[[], float]
    patience: float = 30.0
    """Seconds without progress after which a move is given up. A step counts as a tenth of it at most, for a server
    may have nothing to do for long."""
    moves: int = 0
    """Moves that were made."""
    given_up: int = 0
    figures: list[float] = field(default_factory=list)
    """The largest load of a rank over the mean, of each mixture, between the last two looks."""
    looks: int = 0
    visits: Sequence[Sequence[int]] = ()
    """How often each expert of each mixture had been visited when loads were looked at last."""
    until: int = 0
    """Steps up to then."""
    _all_steps: int = 0
    _window: Sequence[Sequence[int]] = ()
    _waiting: Sequence[int] = ()
    """Mixtures that this look has still to see."""
    _number: int | None = None
    """The mixture whose experts move."""
    _after: Slots = ()
    _steps: int = 0
    _pieces: int = -1
    _stalled: float = 0.0
    _last: float = 0.0

    def orders(
        self, visits: Callable[[], Sequence[Sequence[int]]], pieces: int, complete: bool
    ) -> list[tuple[Any, ...]]:
        """Orders for all ranks before a step: `("begin", mixture, slots)`, `("switch",)` or `("give up",)`. `visits`
        gives how often each expert of each mixture has been visited so far; `pieces` have come of the move that is
        under way, which may be `complete`."""
        self._steps, self._all_steps = self._steps + 1, self._all_steps + 1
        if self._number is not None:
            return self._go_on(pieces, complete)
        if self._steps >= (self.every or _LOOK) and not self._waiting:
            self._look(visits())
        if not self._waiting:
            return []
        # One mixture in each step, for a placement takes time.
        number, *self._waiting = self._waiting
        return self._begin(number, self._window[number])

    def _look(self, visits: Sequence[Sequence[int]]) -> None:
        before = self.visits or [[0] * len(row) for row in visits]
        self._window = [[a - b for a, b in zip(row, then)] for row, then in zip(visits, before)]
        self.visits, self.until, self._steps = visits, self._all_steps, 0
        self.figures = self.figures or [1.0] * len(visits)
        self.looks, self._waiting = self.looks + 1, list(range(len(visits)))

    def state(self) -> dict[str, Any]:
        """The state as plain values: `visits` until the step `until`, the highest `load` of `figures`, `moves` and
        `given_up`."""
        return {
            "visits": self.visits, "until": self.until, "load": max(self.figures, default=1.0),
            "moves": self.moves, "given_up": self.given_up,
        }  # fmt: skip

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
                "Experts of mixture %d did not move for %.0f s, after %d pieces of their weights: the move is given "
                "up, and they stay where they are.", self._number, self._stalled, pieces,
            )  # fmt: skip
            self.given_up, self._number = self.given_up + 1, None
            return [("give up",)]
        return []
