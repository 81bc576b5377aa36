"""Fixtures of the planner's tests."""

import pytest
import torch


@pytest.fixture
def no_scratch_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN multiplies half numbers with scratch memory of its own, which differs by CPU and number of threads."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
