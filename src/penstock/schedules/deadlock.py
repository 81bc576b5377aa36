"""Deadlocks: which rank waits for which when a schedule is stuck, and whether blocking sends and receives all
complete."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.schedules.action import Action, Kind
from penstock.schedules.schedule import Schedule


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
    return f"which rank {rank} has as its action {i + 1}, behind {schedule.ranks[rank][done[rank]]}."


def awaited(schedule: Schedule, action: Action) -> list[Action]:
    """The actions that must precede `action`, or, for a send or receive, accompany it.

    A stage's backward is either whole or split. It is then listed as two actions, one of which suffices.
    """
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


def partner(action: Action) -> Action:
    """The receive that matches a send, and vice versa."""
    stage, kind, i = action
    if kind == "SEND_F":
        return Action(stage + 1, "RECV_F", i)
    if kind == "RECV_F":
        return Action(stage - 1, "SEND_F", i)
    if kind == "SEND_B":
        return Action(stage - 1, "RECV_B", i)
    return Action(stage + 1, "SEND_B", i)


def rendezvous(schedule: Schedule) -> list[int]:
    """How many of its actions each rank completes if every send and receive blocks until its partner is
    reached.

    This is the strictest reading of point-to-point communication: nothing is buffered, one operation at a time.
    """
    done = [0] * len(schedule.ranks)
    finished: set[Action] = set()

    def head(rank: int) -> Action | None:
        return schedule.ranks[rank][done[rank]] if done[rank] < len(schedule.ranks[rank]) else None

    def ready(action: Action) -> bool:
        """Whether the action waits for nothing except its partner."""
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
            other = partner(action)
            home = schedule.placement[other.stage] if 0 <= other.stage < schedule.stages else rank
            if home == rank or head(home) != other or not ready(other):
                continue  # when the partner's rank reaches its end, it advances both
            together[home] = other
        for moved, action in together.items():
            finished.add(action)
            done[moved] += 1
            able.append(moved)
    return done


def _computed(send: Action) -> list[Action]:
    """The computations of which a send needs one."""
    kinds: list[Kind] = ["F"] if send.kind == "SEND_F" else ["B", "I"]
    return [Action(send.stage, kind, send.micro_batch) for kind in kinds]
