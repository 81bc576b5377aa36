"""Running out of memory ends in advice, and no other error is taken for it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from penstock.config.model import PRESETS
from penstock.config.plan import Plan
from penstock.config.rules import require
from penstock.config.run import RunConfig
from penstock.errors import OutOfMemory
from penstock.tasks import ImageClassification
from penstock.train.advice import memory_advice
from penstock.train.resume import changes

TASK, MODEL = ImageClassification(), PRESETS["vit-digits"]


def test_the_cpu_allocators_failure_is_recognised() -> None:
    with (
        pytest.raises(OutOfMemory, match="micro_batch=4 accumulate=2") as caught,
        memory_advice(Plan(), TASK, MODEL),
    ):
        torch.empty(10**15)
    assert caught.value.exit_code == 7
    assert "precision=O1" in str(caught.value)


def test_the_gpu_allocators_failure_is_recognised() -> None:
    plan = Plan(precision="O3", micro_batch=1, attention="plain")
    with pytest.raises(OutOfMemory, match="CUDA out of memory") as caught, memory_advice(plan, TASK, MODEL):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore")
    text = str(caught.value)
    assert "attention=sdpa" in text
    assert "precision=" not in text
    assert "micro_batch" not in text


def test_pythons_own_is_too() -> None:
    with pytest.raises(OutOfMemory), memory_advice(Plan(), TASK, MODEL):
        raise MemoryError


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="shapes"), memory_advice(Plan(), TASK, MODEL):
        raise RuntimeError("shapes do not fit")


@pytest.mark.parametrize("model", ["vit-digits", "gpt-tiny", "modernbert-tiny"])
@pytest.mark.parametrize(
    ("line", "first"),
    [
        ("micro_batch=9", "recompute=early"),
        ("recompute=selective attention=plain precision=O1", "recompute=early"),
        ("recompute=full recompute_every=2.5 dp=2", "recompute=early recompute_every=1.0"),
        ("recompute=budget budget=1 attention=math", "attention=sdpa"),
        ("precision=O3 recompute=full", "micro_batch=4 accumulate=2"),
        ("offload=activations precision=O2", "micro_batch=4 accumulate=2"),
    ],
)
def test_a_run_can_resume_with_every_plan_that_is_advised(model: str, line: str, first: str) -> None:
    config = RunConfig(model=PRESETS[model], plan=Plan.parse(line))
    with pytest.raises(OutOfMemory) as caught, memory_advice(config.plan, TASK, config.model):
        raise MemoryError
    advised = re.findall(r"with the plan ((?:\w+=[\w.]+ ?)+)", str(caught.value))
    assert next(words for words in advised if words != "loss=chunked") == first
    for words in advised:
        fields = {name: getattr(Plan.parse(words), name) for name in Plan.named(words)}
        changed = replace(config, plan=replace(config.plan, **fields))
        require(changed.plan, changed.model, run=True)
        changes(config, changed)
