"""Ranks come to one decision, whoever of them knows it."""

from __future__ import annotations

import torch

from helpers.spawn import spawn
from penstock.config.plan import Plan
from penstock.parallel import ALONE, ParallelDims, dims_of
from penstock.parallel.agree import Ballot, average


def _dims() -> ParallelDims:
    return dims_of(Plan(dp=3, micro_batch=1), "cpu")


def _talk() -> None:
    dims = _dims()
    torch.testing.assert_close(average(torch.tensor([float(dims.rank), 3.0]), dims), torch.tensor([1.0, 3.0]))


def test_values_and_flags_reach_all_ranks() -> None:
    spawn(_talk, 3)


def _ballots() -> list[int]:
    dims = _dims()
    ballot = Ballot(dims)
    # Rank 1 hears of it at the second turn; all know at the third.
    return [ballot.turn(15 if dims.rank == 1 and turn >= 1 else 0) for turn in range(4)] + [ballot.result()]


def test_a_ballot_is_the_same_on_all_ranks_one_turn_later() -> None:
    assert spawn(_ballots, 3) == [[0, 0, 15, 15, 15]] * 3
    alone = Ballot(ALONE)
    assert [alone.turn(value) for value in (0, 10, 0)] == [0, 10, 0]
