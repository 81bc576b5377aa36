"""The page of faults says what was measured."""

from __future__ import annotations

from pathlib import Path

from helpers.modules import loaded

ROOT = Path(__file__).parents[2]


def test_the_page_of_faults_is_up_to_date() -> None:
    faults = loaded(ROOT / "tools" / "faults.py")
    assert faults.PATH.read_text(encoding="utf-8") == faults.page(), "run make reference"
    assert "| fault | figures |" in faults.page()
