"""Ranks that do some work together, such as writing a checkpoint: all succeed, or all raise an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch.distributed as dist

from penstock.errors import EnvironmentProblem, PenstockError

T = TypeVar("T")


class RankProblem(Exception):
    """The error of one of several ranks, which all of them raise."""

    def __init__(self, rank: int, error: BaseException) -> None:
        super().__init__(f"rank {rank}: {error}")
        self.rank = rank
        self.error = error

    def plain(self) -> BaseException:
        """The original error on the rank that failed; on other ranks an error that names the rank."""
        if self.__cause__ is not None:
            return self.__cause__
        if isinstance(self.error, PenstockError):
            return type(self.error)(f"On rank {self.rank}: {self.error}")
        return EnvironmentProblem(f"Rank {self.rank} failed with {self.error}")


@dataclass(frozen=True, slots=True)
class Coordinator:
    """This process is rank `rank` of `world`. `group` is None for a single process."""

    rank: int = 0
    world: int = 1
    group: dist.ProcessGroup | None = None

    def all(self, work: Callable[[], T]) -> list[T]:
        """Call `work` on every rank, and return all ranks' results on each.

        `work` must not use collectives. Results and errors are pickled. Raises RankProblem, with the error of the
        lowest rank that failed, if one of several did; a single process raises its own error.
        """
        if self.group is None:
            return [work()]
        outcome: tuple[bool, Any]
        own: Exception | None = None
        try:
            outcome = True, work()
        except Exception as error:  # noqa: BLE001  # every rank must answer, whatever happened
            sent = isinstance(error, PenstockError | OSError)  # other errors may not survive pickling
            own = error
            outcome = False, error if sent else RuntimeError(f"{type(error).__name__}: {error}")
        outcomes: list[Any] = [None] * self.world
        dist.all_gather_object(outcomes, outcome, group=self.group)
        for rank, (done, value) in enumerate(outcomes):
            if not done:
                raise RankProblem(rank, value) from (own if rank == self.rank else None)
        return [value for _, value in outcomes]

    def first(self, work: Callable[[], T]) -> T:
        """Call `work` on rank 0. All ranks get its result, or its error. Raises as `all`."""
        if self.group is None:
            return work()
        result: T = self.all(lambda: work() if self.rank == 0 else None)[0]  # type: ignore[assignment]
        return result


def current_coordinator(group: dist.ProcessGroup | None = None) -> Coordinator:
    """The coordinator of `group`, else of all processes, else of this process alone.

    The group must carry Python objects between CPUs. The default group may be of another kind (NCCL), or in use, so the
    first call makes an additional gloo group. It is collective, as is every use of a coordinator.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Coordinator()
    if group is None:
        group = _group_beside(dist.group.WORLD)
    return Coordinator(dist.get_rank(group), dist.get_world_size(group), group)


@lru_cache(maxsize=1)
def _group_beside(default: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The gloo group of the processes of the default group."""
    return new_group()


def new_group() -> dist.ProcessGroup | None:
    """A gloo group of all processes, which must all call this; None for a single process."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group


def collect(work: Callable[[], T]) -> list[T]:
    """Call `work` on every rank, and return the results of all ranks, by rank.

    If a rank fails, all raise: that rank its own error, all other ranks an error of the same type that names the rank,
    or `EnvironmentProblem` if the error is not Penstock's. So no rank waits for a rank that has given up.
    """
    try:
        return current_coordinator().all(work)
    except RankProblem as problem:
        raise problem.plain() from None


def main_first(work: Callable[[], T]) -> T:
    """Call `work` on rank 0. The other ranks wait for it and get its result, or an error as from `collect`."""
    try:
        return current_coordinator().first(work)
    except RankProblem as problem:
        raise problem.plain() from None
