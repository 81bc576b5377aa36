"""Ranks come to one decision, whoever of them knows it."""

from __future__ import annotations

import pytest
import torch

from helpers.spawn import spawn
from penstock.config.plan import Plan
from penstock.errors import ConfigError, DataError, EnvironmentProblem
from penstock.parallel import ALONE, ParallelDims, dims_of
from penstock.parallel.agree import Ballot, average, collect, main_first, tell, together

pytestmark = pytest.mark.alone


def _dims() -> ParallelDims:
    return dims_of(Plan(dp=3, micro_batch=1), "cpu")


def _talk() -> None:
    dims = _dims()
    assert tell({"step": 7, "name": "ä"} if dims.main else None, dims) == {"step": 7, "name": "ä"}
    assert tell(None, dims) is None
    assert collect("x" * dims.rank, dims) == ["", "x", "xx"]
    torch.testing.assert_close(average(torch.tensor([float(dims.rank), 3.0]), dims), torch.tensor([1.0, 3.0]))


def test_values_and_flags_reach_all_ranks() -> None:
    spawn(_talk, 3)


def _fails(work: object, kind: type[Exception]) -> str:
    try:
        work()  # type: ignore[operator]
    except kind as error:
        return str(error)
    raise AssertionError("it did not raise")


def _errors() -> list[str]:
    dims = _dims()

    def refuse() -> None:
        raise ConfigError("no such output")

    def break_down() -> None:
        raise ValueError("oh")

    def part() -> int:
        if dims.rank > 0:
            raise DataError(f"file {dims.rank} is torn")
        return 5

    told = [_fails(lambda: main_first(refuse, dims), ConfigError)]
    told.append(_fails(lambda: main_first(break_down, dims), ValueError if dims.main else EnvironmentProblem))
    told.append(_fails(lambda: together(part, dims), DataError))
    assert main_first(lambda: [1, 2], dims) == [1, 2]
    assert together(lambda: dims.rank, dims) == dims.rank
    return told


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    first, second, third = spawn(_errors, 3)
    assert first == ["no such output", "oh", "On rank 1: file 1 is torn"]
    assert second == ["On rank 0: no such output", "Rank 0 failed with ValueError: oh", "file 1 is torn"]
    assert third[2] == "file 2 is torn"


def _ballots() -> list[int]:
    dims = _dims()
    ballot = Ballot(dims)
    # Rank 1 hears of it at the second turn; all know at the third.
    return [ballot.turn(15 if dims.rank == 1 and turn >= 1 else 0) for turn in range(4)] + [ballot.result()]


def test_a_ballot_is_the_same_on_all_ranks_one_turn_later() -> None:
    assert spawn(_ballots, 3) == [[0, 0, 15, 15, 15]] * 3
    alone = Ballot(ALONE)
    assert [alone.turn(value) for value in (0, 10, 0)] == [0, 10, 0]
