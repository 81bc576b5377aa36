"""docs/reference/op-lists.md says what the lists are."""

from __future__ import annotations

from pathlib import Path

from helpers.modules import loaded
from penstock.precision.lists.table import GROUPS

ROOT = Path(__file__).parent.parent.parent.parent


def test_the_page_of_op_lists_is_up_to_date() -> None:
    tool = loaded(ROOT / "tools" / "op_lists.py")
    text = tool.PATH.read_text(encoding="utf-8")
    assert text == tool.page(), "run make reference"
    for group in GROUPS:
        assert group.reason in text, group.key
