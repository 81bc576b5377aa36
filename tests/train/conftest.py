"""A folder in which commands run."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.toy import desk


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with `machine.json`, a machine that need not be probed."""
    desk(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
