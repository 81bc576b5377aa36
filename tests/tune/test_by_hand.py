"""The versions by hand of `benchmarks/tune_by_hand.py`: their edits fit the scripts, and their steps come by turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import tune_by_hand

    return tune_by_hand


def test_every_version_by_hand_is_the_script_with_its_edits(by_hand: Any) -> None:
    for subject in by_hand.SUBJECTS.values():
        texts = [subject.text(settings) for settings in subject.combinations()]
        edited = {
            tuple(s for s in settings if subject.by_hand[s].edits) for settings in subject.combinations()
        }
        assert len({*texts}) == len(edited), "versions with other edits are other texts"
        for text in texts:
            compile(text, subject.script, "exec")
    plain = by_hand.SUBJECTS["plain loop"]
    assert sum(1 for _ in plain.combinations()) == 12
    assert "fused=True" in plain.text(("fused optimizer",))
    wrong = by_hand.Subject(script="plain.py", arguments=(), by_hand={}, size=(("no such words", ""),))
    with pytest.raises(ValueError, match="'no such words' 0 times"):
        wrong.text()
