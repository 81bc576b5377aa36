"""Measured actions of ranks, in the form of a simulation, so that both are drawn and compared alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.schedules.costs import Costs, Number, ratio
from penstock.schedules.schedule import Schedule
from penstock.schedules.simulate import Simulation, Span


@dataclass(frozen=True, slots=True)
class Measured(Simulation):
    """A run whose actions took the times that were measured. Its costs are not known, so memory counts activations."""

    spans: tuple[Span, ...] = ()

    @classmethod
    def of(cls, ranks: Sequence[Sequence[Span]]) -> Measured:
        """The computations of each rank, in the order in which they ran. The first one starts the clock."""
        first = min((span.start for spans in ranks for span in spans), default=0)
        end = max((span.end for spans in ranks for span in spans), default=0)
        busy = tuple(sum((span.end - span.start for span in spans), start=0) for spans in ranks)
        schedule = Schedule(tuple(tuple(span.action for span in spans) for spans in ranks))
        moved = tuple(
            span._replace(start=span.start - first, end=span.end - first) for spans in ranks for span in spans
        )
        peaks = tuple(map(_most_held, schedule.ranks))
        return cls(
            schedule=schedule,
            costs=Costs(),
            makespan=end - first,
            ideal=ratio(sum(busy), len(busy)),
            busy=busy,
            peak_memory=peaks,
            starts=tuple(tuple(span.start - first for span in spans) for spans in ranks),
            spans=moved,
        )

    def timeline(self) -> list[Span]:
        """Every action with its rank, start and end, by rank and then by time."""
        return list(self.spans)


def _most_held(order: Sequence[object]) -> Number:
    """The most micro-batches that a rank held at a time."""
    held = most = 0
    for action in order:
        kind = getattr(action, "kind", "")
        held += {"F": 1, "B": -1, "I": 0, "W": -1}.get(kind, 0)
        most = max(most, held)
    return most
