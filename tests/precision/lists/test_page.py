"""docs/reference/op-lists.md says what the lists are."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from penstock.precision.lists.table import GROUPS

ROOT = Path(__file__).parent.parent.parent.parent


def test_the_page_of_op_lists_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("op_lists", ROOT / "tools" / "op_lists.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    text = tool.PATH.read_text(encoding="utf-8")
    assert text == tool.page(), "run make reference"
    for group in GROUPS:
        assert group.reason in text, group.key
