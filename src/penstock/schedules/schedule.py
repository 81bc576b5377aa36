"""A pipeline schedule: the order of actions for each rank. It prints, parses and compares."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Literal, NamedTuple, cast

from penstock.errors import ConfigError

Kind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]
"""F: forward. B: the whole backward. I and W: its two halves, the gradient of the stage's input and of its
weights (Qi et al., ICLR 2024, write B for I). SEND_F and RECV_F pass an activation to the next stage, SEND_B
and RECV_B the gradient of a stage's input to the previous stage. The number in each is the stage that sends
or receives."""

COMPUTE_KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")
COMMUNICATION_KINDS: tuple[Kind, ...] = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")

_WRITTEN = re.compile(r"(\d+)(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)", re.ASCII)


class Action(NamedTuple):
    """Stage, kind and micro-batch, written `2B3`: the notation that torch.distributed.pipelining prints and parses."""

    stage: int
    kind: Kind
    micro_batch: int

    @classmethod
    def parse(cls, word: str) -> Action:
        """The action for a word such as `2B3` or `0SEND_F1`. Raises `ConfigError` for any other word."""
        match = _WRITTEN.fullmatch(word)
        if match is None:
            raise ConfigError(
                f"{word!r} is not an action of a schedule; write stage, kind and micro-batch, such as 2B3, with one of "
                f"the kinds {', '.join(COMPUTE_KINDS + COMMUNICATION_KINDS)}."
            )
        stage, kind, micro_batch = match.groups()
        return cls(int(stage), cast(Kind, kind), int(micro_batch))

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @property
    def communicates(self) -> bool:
        """Whether this is a send or a receive rather than a computation."""
        return self.kind in COMMUNICATION_KINDS


_RANK_LABEL = re.compile(r"\s*rank\s+(\d+)\s*\|(.*)", re.ASCII)
# First an idle slot, then the second half of a long action.
_NO_ACTION = re.compile(r"\.|-+")


@dataclass(frozen=True)
class Schedule:
    """`ranks[r]` lists the actions of rank r in order. Their times follow from dependencies and costs."""

    ranks: tuple[tuple[Action, ...], ...]

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """The schedule in lines such as `rank 0 | 0F0 0F1 . 0B0 ---`, one per rank in order.

        Idle slots (`.`) and continued actions (`---`) are ignored. Raises `ConfigError`, listing every line that cannot
        be read.
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
        """One line per rank, which `parse` reads back."""
        width = len(str(max(len(self.ranks) - 1, 0)))
        lines = (
            f"rank {rank:>{width}} | {' '.join(map(str, order))}" for rank, order in enumerate(self.ranks)
        )
        return "\n".join(line.rstrip() for line in lines)

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
        """Whether sends and receives are explicit. If not, inputs arrive without actions of the ranks."""
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


# -- deadlocks


def waits(schedule: Schedule, done: Sequence[int]) -> list[str]:
    """One sentence for each rank that is stuck, given how many of its actions each rank has done."""
    where = {action: (rank, i) for rank, order in enumerate(schedule.ranks) for i, action in enumerate(order)}
    problems = []
    for rank, (order, i) in enumerate(zip(schedule.ranks, done)):
        if i == len(order):
            continue
        missing = _computed(order[i]) if order[i].kind.startswith("SEND") else []
        if not missing or any(_is_done(a, where, done) for a in missing):
            missing = awaited(schedule, order[i])
        on_ranks = [a for a in missing if a in where]
        needed = " or ".join(map(str, on_ranks[:1] or missing))
        problems.append(
            f"Deadlock: rank {rank} cannot run {order[i]}, its action {i + 1} of {len(order)}: it waits for {needed}, "
            + (_whereabouts(rank, *where[on_ranks[0]], schedule, done) if on_ranks else "which no rank runs.")
        )
    return problems


def _is_done(action: Action, where: dict[Action, tuple[int, int]], done: Sequence[int]) -> bool:
    rank, i = where.get(action, (0, len(where) + 1))
    return i < done[rank]


def _whereabouts(waiter: int, rank: int, i: int, schedule: Schedule, done: Sequence[int]) -> str:
    """Why the i-th action of a rank has not been done yet."""
    if rank == waiter:
        return f"which the same rank has only as its action {i + 1}."
    if i == done[rank]:
        return f"which rank {rank} cannot run either."
    return f"which rank {rank} has as its action {i + 1}, after {schedule.ranks[rank][done[rank]]}."


def awaited(schedule: Schedule, action: Action) -> list[Action]:
    """The actions that must precede `action`, or, for a send or receive, accompany it. A stage's backward, which is
    either whole or split, is listed as the two possible actions; either suffices."""
    stage, kind, i = action
    last = schedule.stages - 1
    if kind == "F":
        if stage == 0:
            return []
        return [Action(stage, "RECV_F", i) if _received(schedule, stage - 1) else Action(stage - 1, "F", i)]
    if kind in ("B", "I"):
        if stage == last:
            return [Action(stage, "F", i)]
        if _received(schedule, stage):
            return [Action(stage, "RECV_B", i)]
        return [Action(stage + 1, "B", i), Action(stage + 1, "I", i)]
    if kind == "W":
        return [Action(stage, "I", i)]
    return [partner(action)]


def _received(schedule: Schedule, stage: int) -> bool:
    """Whether transfers between a stage and the next are explicit actions."""
    return schedule.communicates and schedule.placement[stage] != schedule.placement[stage + 1]


_PARTNERS: dict[Kind, tuple[int, Kind]] = {
    "SEND_F": (1, "RECV_F"), "RECV_F": (-1, "SEND_F"), "SEND_B": (-1, "RECV_B"), "RECV_B": (1, "SEND_B"),
}  # fmt: skip


def partner(action: Action) -> Action:
    """The receive that matches a send, and vice versa."""
    hop, kind = _PARTNERS[action.kind]
    return Action(action.stage + hop, kind, action.micro_batch)


def rendezvous(schedule: Schedule) -> list[int]:
    """Number of actions that each rank completes if every send and receive blocks until its partner is reached.

    This is the strictest reading of point-to-point communication: nothing is buffered, one operation at a time.
    """
    done = [0] * len(schedule.ranks)
    finished: set[Action] = set()

    def head(rank: int) -> Action | None:
        return schedule.ranks[rank][done[rank]] if done[rank] < len(schedule.ranks[rank]) else None

    def ready(action: Action) -> bool:
        """Whether the action waits only for its partner."""
        if action.communicates:
            return not action.kind.startswith("SEND") or not finished.isdisjoint(_computed(action))
        needs = awaited(schedule, action)
        return not needs or not finished.isdisjoint(needs)

    able = list(range(len(done)))
    while able:
        rank = able.pop()
        action = head(rank)
        if action is None or not ready(action):
            continue
        together = {rank: action}
        if action.communicates:
            counterpart = partner(action)
            home = schedule.placement[counterpart.stage] if 0 <= counterpart.stage < schedule.stages else rank
            if home == rank or head(home) != counterpart or not ready(counterpart):
                continue  # advanced together with its partner, when the partner's rank reaches that
            together[home] = counterpart
        for moved, action in together.items():
            finished.add(action)
            done[moved] += 1
            able.append(moved)
    return done


def _computed(send: Action) -> list[Action]:
    """The computations that can produce the tensor of a send; either suffices."""
    kinds: list[Kind] = ["F"] if send.kind == "SEND_F" else ["B", "I"]
    return [Action(send.stage, kind, send.micro_batch) for kind in kinds]
