"""Running out of memory ends in advice, and no other error is taken for it."""

from __future__ import annotations

import pytest
import torch

from penstock.config.plan import Plan
from penstock.errors import OutOfMemory
from penstock.tasks import ImageClassification
from penstock.train.memory import memory_advice

TASK = ImageClassification()


def test_the_cpu_allocators_failure_is_recognised() -> None:
    with (
        pytest.raises(OutOfMemory, match="micro_batch=4 accumulate=2") as caught,
        memory_advice(Plan(), TASK),
    ):
        torch.empty(10**15)
    assert caught.value.exit_code == 7
    assert "precision=O1" in str(caught.value)


def test_the_gpu_allocators_failure_is_recognised() -> None:
    plan = Plan(precision="O3", micro_batch=1, attention="plain")
    with (
        pytest.raises(OutOfMemory, match="CUDA out of memory") as caught,
        memory_advice(plan, TASK),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore")
    text = str(caught.value)
    assert "attention=sdpa" in text
    assert "precision=" not in text
    assert "micro_batch" not in text


def test_pythons_own_is_too() -> None:
    with pytest.raises(OutOfMemory), memory_advice(Plan(), TASK):
        raise MemoryError


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="shapes"), memory_advice(Plan(), TASK):
        raise RuntimeError("shapes do not fit")
