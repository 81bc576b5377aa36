"""The page of faults says what was measured."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_of_faults_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("faults_page", ROOT / "tools" / "faults.py")
    assert spec is not None
    assert spec.loader is not None
    faults = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(faults)
    assert faults.PATH.read_text(encoding="utf-8") == faults.page(), "run make reference"
    assert "| fault | figures |" in faults.page()
