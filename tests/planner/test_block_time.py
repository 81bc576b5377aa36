"""What one block's operators cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.config.machine import load_machine
from penstock.config.model import PRESETS
from penstock.config.plan import Plan
from penstock.planner.block_time import block_time
from penstock.planner.rates import rates_of
from penstock.planner.shapes import shape_of


@pytest.mark.parametrize(("attention", "passes"), [("plain", 2), ("flash", 0)])
def test_a_bias_of_distances_is_written_and_read_where_scores_are_kept(attention: str, passes: int) -> None:
    bloom = PRESETS["bloom-176b"]
    plan = Plan.parse(f"precision=O2 attention={attention} tp=4 micro_batch=2")
    rates = rates_of(load_machine("a100-80g"), plan)
    biased = block_time(shape_of(bloom).blocks[0], rates, plan)
    plain = block_time(shape_of(replace(bloom, positions="learned")).blocks[0], rates, plan)
    scores = 2 * bloom.heads / 4 * bloom.sequence**2
    more = biased.forward.attention - plain.forward.attention
    assert more == pytest.approx(passes * 2 * scores / rates.memory, abs=1e-9)
    assert biased.backward.attention == pytest.approx(plain.backward.attention)
