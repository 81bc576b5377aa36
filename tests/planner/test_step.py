"""What steps take of what their operators cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.config.machine import load_machine
from penstock.config.model import DecoderConfig, ModelConfig, preset
from penstock.config.plan import Plan
from penstock.planner.describe import describe
from penstock.planner.rates import rates_of
from penstock.planner.step import PartTime, layout_of, part_time


@pytest.mark.parametrize(("attention", "passes"), [("plain", 2), ("flash", 0)])
def test_a_bias_of_distances_is_written_and_read_where_scores_are_kept(attention: str, passes: int) -> None:
    bloom = preset("bloom-176b")
    assert isinstance(bloom, DecoderConfig)
    plan = Plan.parse(f"precision=O2 attention={attention} tp=4 micro_batch=2")
    rates = rates_of(load_machine("a100-80g"), plan)

    def block(model: ModelConfig) -> PartTime:
        (one,) = describe(model, plan).blocks
        return part_time(one, rates, layout_of(plan))

    biased, plain = block(bloom), block(replace(bloom, positions="learned"))
    scores = 2 * bloom.heads / 4 * bloom.sequence**2
    more = biased.forward.attention - plain.forward.attention
    assert more == pytest.approx(passes * 2 * scores / rates.memory, abs=1e-5)
    assert biased.backward.attention == pytest.approx(plain.backward.attention)
