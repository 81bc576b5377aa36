"""How ranks come to one decision, where every rank must do the same but only some of them know what."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed

from penstock import errors
from penstock.errors import PenstockError
from penstock.parallel.dims import LOSS, ParallelDims


@torch.no_grad()
def average(values: Tensor, dims: ParallelDims) -> Tensor:
    """`values` averaged over the ranks that see other samples or tokens, in place; fp32 or wider, on the device."""
    return add_up(values, dims).div_(dims.degree(*LOSS))  # gloo has no mean


@torch.no_grad()
def add_up(values: Tensor, dims: ParallelDims) -> Tensor:
    """`values` summed over the ranks that see other samples or tokens, in place."""
    if dims.degree(*LOSS) > 1:
        distributed.all_reduce(values, group=dims.group(*LOSS))
    return values


def slowest(value: float, dims: ParallelDims) -> float:
    """The largest of all ranks' values, on all of them, which meet here. Alone: the value."""
    if dims.alone:
        return value
    largest = torch.tensor(value, dtype=torch.float64)
    distributed.all_reduce(largest, op=distributed.ReduceOp.MAX)
    return float(largest)


def tell(value: Any, dims: ParallelDims) -> Any:
    """Rank 0's `value`, on all ranks; see `collect`."""
    return collect(value if dims.main else None, dims)[0]


def collect(value: Any, dims: ParallelDims) -> list[Any]:
    """Every rank's `value`, by rank, on all ranks. Whatever JSON can hold: nothing is pickled."""
    if dims.alone:
        return [value]
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dims.size)]
    distributed.all_gather(lengths, torch.tensor([len(text)]))
    longest = max(int(length.item()) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(text)] = text
    texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(dims.size)]
    distributed.all_gather(texts, padded)
    return [json.loads(bytes(found[: int(length)].tolist())) for found, length in zip(texts, lengths)]


def main_first(work: Callable[[], Any], dims: ParallelDims) -> Any:
    """Rank 0 does some work. The others wait for it and get its result, which JSON must be able to hold.

    An error is raised on all ranks, so that none waits for a rank that has given up: a `PenstockError` as it is,
    anything else as it is on rank 0 and as an `EnvironmentProblem` on the others.
    """
    if dims.alone:
        return work()
    error: BaseException | None = None
    report: dict[str, Any] = {}
    if dims.main:
        try:
            report = {"result": work()}
        except Exception as problem:  # noqa: BLE001  # raised below, after the others know
            error = problem
            report = {"error": type(problem).__name__, "message": str(problem)}
    report = tell(report, dims)
    if error is not None:
        raise error
    if "error" in report:
        raise _as_error(report["error"], report["message"], 0)
    return report["result"]


def together(work: Callable[[], Any], dims: ParallelDims) -> Any:
    """Every rank does its part of some work, without collectives, and gets its own result.

    If any rank fails with a `PenstockError`, all raise: that rank its own error, the others the first rank's. Any other
    error is raised only where it happened.
    """
    if dims.alone:
        return work()
    result, error = None, None
    try:
        result = work()
    except PenstockError as problem:
        error = problem
    found = collect([type(error).__name__, str(error)] if error else None, dims)
    if error is not None:
        raise error
    for rank, told in enumerate(found):
        if told is not None:
            raise _as_error(told[0], told[1], rank)
    return result


def _as_error(name: str, message: str, rank: int) -> PenstockError:
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, PenstockError):
        return kind(f"On rank {rank}: {message}")
    return errors.EnvironmentProblem(f"Rank {rank} failed with {name}: {message}")


class Ballot:
    """Each rank gives one number per turn; one turn later all ranks get the largest of them.

    The all-reduce runs during the following step and is read at the next turn, so a rank waits only if a peer is a
    whole step behind. Everything is on the host; no device is waited for. All ranks must take the same turns.
    """

    def __init__(self, dims: ParallelDims) -> None:
        self._dims = dims
        self._pending: tuple[Any, Tensor] | None = None

    def turn(self, value: int) -> int:
        """Cast this rank's value for this turn; returns the largest of the turn before (alone: of this turn)."""
        if self._dims.alone:
            return value
        before = self.result()
        ballot = torch.tensor([value], dtype=torch.int64)
        self._pending = (distributed.all_reduce(ballot, op=distributed.ReduceOp.MAX, async_op=True), ballot)
        return before

    def result(self) -> int:
        """The largest value of the last turn, waited for; 0 where there was none."""
        if self._pending is None:
            return 0
        work, ballot = self._pending
        self._pending = None
        work.wait()
        return int(ballot.item())
