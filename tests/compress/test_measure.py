"""Memory of a pass: forecast beside counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.toy import TOY
from penstock.config.model import PRESETS, with_stacks
from penstock.config.plan import Plan
from penstock.export.export import inputs_of
from penstock.ladder.trace import TensorMemory
from penstock.models import create
from penstock.models.anatomy import set_switch
from penstock.planner.prediction import predict_pass_bytes

PLAN = Plan(attention="auto")


@pytest.mark.parametrize(
    "name", ["vit-digits", "gpt-tiny", "llama-tiny", "bert-tiny", "marian-tiny", "t5-tiny", "mixtral-tiny"]
)
@pytest.mark.parametrize("batch", [1, 8])
def test_the_memory_of_a_pass_is_forecast(name: str, batch: int) -> None:
    def without_chance(stack: Any) -> Any:
        return replace(stack, dropout=0.0, attention_dropout=None, mlp_dropout=None)

    config = with_stacks(PRESETS[name], without_chance)
    model = create(config).eval()
    set_switch(model, "attention", "auto")
    lengths = model.graph.lengths
    inputs = inputs_of(model, batch, lengths[0], lengths[-1])
    held = [*model.state_dict().values()]
    with torch.inference_mode(), TensorMemory(held, list(inputs.values())) as counted:
        model(**inputs)
    parameters, beside = predict_pass_bytes(config, TOY, replace(PLAN, micro_batch=batch))
    # Visits to experts are copied more often than operators of the forecast say.
    bound = 0.07 if name == "mixtral-tiny" else 0.04
    assert 4 * parameters + beside == pytest.approx(counted.peak, rel=bound)
