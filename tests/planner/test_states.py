"""Bytes per weight of the two forms of master weights, and what an update moves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.config.formats import BYTES
from penstock.config.model import PRESETS
from penstock.config.numerics import numerics_of
from penstock.config.plan import Master, Plan
from penstock.planner.describe import describe
from penstock.planner.memory import memory
from penstock.planner.states import update_bytes

O2 = Plan(precision="O2", dtype="bf16", optimizer="fused")
REMAINDER = replace(O2, master="remainder")


@pytest.mark.parametrize(("form", "missing", "held"), [("copy", 4.0, 14.0), ("remainder", 2.0, 12.0)])
def test_a_remainder_takes_half_of_a_copy(form: Master, missing: float, held: float) -> None:
    """What RemainderAdamW.memory() counts of real tensors: weight 2, remainder 2, moments 8."""
    plan = replace(O2, master=form)
    numerics = numerics_of(plan)
    assert numerics.master_bytes == missing
    moments = numerics.moments_per_weight * BYTES[numerics.moments]
    assert BYTES[numerics.weights] + numerics.master_bytes + moments == held
    for precision in ("O0", "O1", "O3"):
        assert numerics_of(replace(plan, precision=precision)).master_bytes == 0.0


def test_the_memory_model_follows_the_form() -> None:
    model = PRESETS["gpt-22b"]
    held = describe(model, O2).parameters
    copy, remainder = (memory(describe(model, plan), plan) for plan in (O2, REMAINDER))
    assert copy["master_weights"] == 4 * held
    assert remainder["master_weights"] == 2 * held
    assert {name: size for name, size in copy.items() if name != "master_weights"} == {
        name: size for name, size in remainder.items() if name != "master_weights"
    }


def test_one_pass_over_remainders_moves_less_than_a_copy() -> None:
    # Weight and remainder in and out 8, moments in and out 16, the gradient 2, and 2 more for its norm.
    assert update_bytes(REMAINDER) == 28.0
    assert update_bytes(O2) > 28.0
    assert update_bytes(replace(REMAINDER, gradients="fp32")) == 32.0
    assert update_bytes(replace(REMAINDER, precision="O1")) == update_bytes(replace(O2, precision="O1"))
