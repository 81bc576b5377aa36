"""Who failed first, what the command returns, and whether another try can help."""

from __future__ import annotations

import signal

import pytest

from penstock.errors import ExitCode
from penstock.launch.report import FINAL, Failure, Outcome, judge, order, tell


def test_all_well_is_zero() -> None:
    assert judge([], stopping=False) == Outcome(0)


def test_the_cause_goes_before_its_consequences() -> None:
    lost = Failure(0, 1, "connection closed", consequence=True, seconds=1.0)
    cause = Failure(3, 4, "bad image", seconds=2.0)
    assert order([lost, cause]) == (cause, lost)
    outcome = judge([lost, cause], stopping=False)
    assert (outcome.code, outcome.final) == (4, True)
    assert tell(outcome.failures) == ["rank 3 ended with code 4:", "bad image", "rank 0 then lost it."]


def test_of_two_causes_the_earlier_is_the_first() -> None:
    late, early = Failure(0, 1, "b", seconds=2.0), Failure(1, 5, "a", seconds=1.0)
    assert judge([late, early], stopping=False).code == 5


@pytest.mark.parametrize("code", sorted(FINAL))
def test_what_would_come_again_is_final(code: int) -> None:
    assert judge([Failure(0, code)], stopping=False).final


@pytest.mark.parametrize("code", [1, 8, 17, -signal.SIGKILL, -signal.SIGSEGV])
def test_anything_else_is_worth_another_try(code: int) -> None:
    outcome = judge([Failure(0, code)], stopping=False)
    assert not outcome.final
    assert outcome.code == (128 - code if code < 0 else code)


def test_a_program_that_cannot_be_run_is_not_tried_again() -> None:
    outcome = judge([Failure(0, 1, "ModuleNotFoundError", hopeless=True)], stopping=False)
    assert (outcome.code, outcome.final) == (1, True)


def test_who_was_asked_to_stop_and_did_asks_for_a_requeue() -> None:
    saved = [Failure(rank, int(ExitCode.SAVED_REQUEUE)) for rank in range(2)]
    assert judge(saved, stopping=True).code == 75
    assert judge([Failure(0, -signal.SIGTERM)], stopping=True).code == 75, "nothing had begun"
    assert judge([Failure(0, -signal.SIGTERM)], stopping=False).code == 128 + signal.SIGTERM
    failed = judge([Failure(0, 1, "boom")], stopping=True)
    assert (failed.code, failed.final) == (1, True), "who is to stop is not started again"


def test_ranks_that_say_the_same_say_it_once() -> None:
    failures = order(Failure(rank, 2, "plan.dp is 3.", seconds=float(rank)) for rank in range(4))
    assert tell(failures) == [
        "rank 0 ended with code 2:",
        "plan.dp is 3.",
        "ranks 1, 2, 3 ended the same way.",
    ]


def test_different_causes_are_all_told() -> None:
    told = tell(order([Failure(0, 1, "one", seconds=1.0), Failure(1, 1, "two", seconds=2.0)]))
    assert told == ["rank 0 ended with code 1:", "one", "rank 1 ended with code 1:", "two"]
