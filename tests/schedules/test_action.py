"""Actions print and parse, in the notation of torch.distributed.pipelining."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.schedules import Action
from penstock.schedules.action import COMMUNICATION_KINDS, COMPUTE_KINDS

ACTIONS = st.builds(
    Action, st.integers(0, 999), st.sampled_from(COMPUTE_KINDS + COMMUNICATION_KINDS), st.integers(0, 9999)
)


@pytest.mark.parametrize(
    ("word", "action"),
    [
        ("1F0", Action(1, "F", 0)),
        ("2B3", Action(2, "B", 3)),
        ("2I3", Action(2, "I", 3)),
        ("0W1", Action(0, "W", 1)),
        ("3SEND_F12", Action(3, "SEND_F", 12)),
        ("10RECV_B0", Action(10, "RECV_B", 0)),
    ],
)
def test_words(word: str, action: Action) -> None:
    assert Action.parse(word) == action
    assert str(action) == word


@settings(deadline=None)
@given(ACTIONS)
def test_round_trip(action: Action) -> None:
    assert Action.parse(str(action)) == action
    assert action.communicates == (action.kind in COMMUNICATION_KINDS)


@settings(deadline=None)
@given(ACTIONS)
def test_torch_reads_and_writes_the_same(action: Action) -> None:
    torch_action = pytest.importorskip("torch.distributed.pipelining.schedules")._Action
    theirs = torch_action.from_str(str(action))
    assert (theirs.stage_index, theirs.computation_type.value, theirs.microbatch_index) == action
    assert Action.parse(str(theirs)) == action


@pytest.mark.parametrize(
    "word", ["", "F0", "1F", "1f0", "1X0", "-1F0", "1F0 ", "1F0x", "1UNSHARD", "(1F0;2B0)OVERLAP_F_B"]
)
def test_what_is_no_action_is_refused_by_name(word: str) -> None:
    with pytest.raises(
        ConfigError, match="is not an action of a schedule; write stage, kind and micro-batch"
    ) as error:
        Action.parse(word)
    assert repr(word) in str(error.value)
