"""A pipeline schedule: the order of actions for each rank. It prints, parses and compares."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter

from penstock.errors import ConfigError
from penstock.schedules.action import COMPUTE_KINDS, Action

_RANK_LABEL = re.compile(r"\s*rank\s+(\d+)\s*\|(.*)", re.ASCII)
# An idle slot, the second half of a long action, and the mark before actions that never start.
_NO_ACTION = re.compile(r"\.|-+|!")


@dataclass(frozen=True)
class Schedule:
    """`ranks[r]` is what rank r does, in order. The times follow from the dependencies and the costs."""

    ranks: tuple[tuple[Action, ...], ...]

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """The schedule in lines such as `rank 0 | 0F0 0F1 . 0B0 ---`, one per rank in order.

        Idle slots (`.`), continued actions (`---`) and the mark `!` of `diagram` are ignored. Raises
        `ConfigError`, listing every line that cannot be read.
        """
        ranks: list[tuple[Action, ...]] = []
        problems: list[str] = []
        for number, line in enumerate(text.splitlines(), start=1):
            if not line.strip():
                continue
            label = _RANK_LABEL.fullmatch(line)
            if label is None or int(label[1]) != len(ranks):
                problems.append(
                    f"Line {number} of the schedule must begin with `rank {len(ranks)} |`, but reads {line[:60]!r}."
                )
                ranks.append(())
                continue
            words = [word for word in label[2].split() if not _NO_ACTION.fullmatch(word)]
            try:
                ranks.append(tuple(map(Action.parse, words)))
            except ConfigError as error:
                problems.append(f"Line {number} of the schedule: {error}")
                ranks.append(())
        if not ranks:
            problems.append(
                "The schedule is empty; write one line for each rank, such as `rank 0 | 0F0 0B0`."
            )
        if problems:
            raise ConfigError(problems)
        return cls(tuple(ranks))

    def __str__(self) -> str:
        """One line per rank, which `parse` reads back; `diagram` aligns the same lines by time."""
        return "\n".join(rank_lines([map(str, order) for order in self.ranks]))

    def __len__(self) -> int:
        """Total number of actions."""
        return sum(map(len, self.ranks))

    @cached_property
    def stages(self) -> int:
        """Number of stages: one more than the largest stage number."""
        return 1 + max((max(map(itemgetter(0), order)) for order in self.ranks if order), default=-1)

    @cached_property
    def micro_batches(self) -> int:
        """Number of micro-batches: one more than the largest number."""
        return 1 + max((max(map(itemgetter(2), order)) for order in self.ranks if order), default=-1)

    @cached_property
    def communicates(self) -> bool:
        """Whether sends and receives are explicit. If not, every rank receives what it needs when it needs
        it."""
        return any(not set(map(itemgetter(1), order)).issubset(COMPUTE_KINDS) for order in self.ranks)

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The rank of each stage. Raises `ConfigError` if a stage has no rank or several."""
        homes: list[list[int]] = [[] for _ in range(self.stages)]
        for rank, order in enumerate(self.ranks):
            for stage in sorted(set(map(itemgetter(0), order))):
                homes[stage].append(rank)
        problems = []
        for stage, home in enumerate(homes):
            if not home:
                problems.append(f"No rank runs stage {stage}, but there are stages up to {self.stages - 1}.")
            elif len(home) > 1:
                where = " and ".join(map(str, home))
                problems.append(f"Stage {stage} is run by ranks {where}; each stage must be on one rank.")
        if problems:
            raise ConfigError(problems)
        return tuple(home[0] for home in homes)

    def computations(self) -> Schedule:
        """The schedule without its sends and receives."""
        if not self.communicates:
            return self
        return Schedule(tuple(tuple(a for a in order if not a.communicates) for order in self.ranks))


def rank_lines(rows: Iterable[Iterable[str]]) -> list[str]:
    """Rows of words, labelled as `Schedule.parse` expects them."""
    rows = [list(row) for row in rows]
    width = len(str(max(len(rows) - 1, 0)))
    return [f"rank {rank:>{width}} | {' '.join(row)}".rstrip() for rank, row in enumerate(rows)]
