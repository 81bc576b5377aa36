"""The processes that write and read one checkpoint together, and come to one outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from penstock.errors import PenstockError

T = TypeVar("T")


class RankProblem(Exception):
    """What one rank of several raised, as all of them see it."""

    def __init__(self, rank: int, error: BaseException) -> None:
        super().__init__(rank, error)
        self.rank = rank
        self.error = error

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.error}"


@dataclass(frozen=True, slots=True)
class Team:
    """`world` processes, of which this is number `rank`; `group` is None for a process on its own."""

    rank: int = 0
    world: int = 1
    group: dist.ProcessGroup | None = None

    def all(self, what: Callable[[], T]) -> list[T]:
        """Every rank does `what`; all get all results, or the same error: that of the lowest rank that failed.

        Raises:
            RankProblem: a rank of several failed. A process on its own raises what it raised.
        """
        if self.group is None:
            return [what()]
        outcome: tuple[bool, Any]
        try:
            outcome = (True, what())
        except Exception as error:  # noqa: BLE001  # each rank must answer, whatever happened
            outcome = (False, _portable(error))
        outcomes: list[Any] = [None] * self.world
        dist.all_gather_object(outcomes, outcome, group=self.group)
        for rank, (done, value) in enumerate(outcomes):
            if not done:
                raise RankProblem(rank, value)
        return [value for _, value in outcomes]

    def first(self, what: Callable[[], T]) -> T:
        """Rank 0 does `what`; all get its result or its error.

        Raises:
            RankProblem: as `all`.
        """
        if self.group is None:
            return what()
        result: T = self.all(lambda: what() if self.rank == 0 else None)[0]  # type: ignore[assignment]
        return result


def _portable(error: Exception) -> Exception:
    """The error as another process can read it: ours and the system's as they are, others by their text."""
    if isinstance(error, PenstockError | OSError):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


# The group that checkpoints are coordinated in, and the default group it was made beside.
_present: list[Any] = [None, None]


def present_team(group: dist.ProcessGroup | None = None) -> Team:
    """All processes of `group`, else of the default group, else this one alone.

    The group must carry Python objects between CPUs. Where the default group is of another kind (NCCL), or others
    may be using it, a gloo group is made beside it the first time; that is collective, as all uses of a team are.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Team()
    if group is None:
        default = dist.group.WORLD
        if _present[0] is not default:
            _present[:] = [default, new_group()]
        group = _present[1]
    return Team(dist.get_rank(group), dist.get_world_size(group), group)


def new_group() -> dist.ProcessGroup:
    """A gloo group of all processes, which must all ask for it."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group
