"""Bytes per weight of master weights, and what an update moves."""

from __future__ import annotations

from dataclasses import replace

from penstock.config.formats import BYTES
from penstock.config.model import PRESETS
from penstock.config.numerics import numerics_of
from penstock.config.plan import Plan
from penstock.planner.describe import describe
from penstock.planner.memory import memory
from penstock.planner.states import update_bytes

O2 = Plan(precision="O2", dtype="bf16", optimizer="fused")


def test_a_copy_of_half_weights_takes_four_bytes_more() -> None:
    """Weight 2, master 4, moments 8."""
    numerics = numerics_of(O2)
    assert numerics.master_bytes == 4.0
    moments = numerics.moments_per_weight * BYTES[numerics.moments]
    assert BYTES[numerics.weights] + numerics.master_bytes + moments == 14.0
    for precision in ("O0", "O1", "O3"):
        assert numerics_of(replace(O2, precision=precision)).master_bytes == 0.0
    model = PRESETS["gpt-22b"]
    work = describe(model, O2)
    assert memory(work, O2)["master_weights"] == 4 * work.parameters


def test_an_update_of_masters_moves_the_gradient_and_the_copy_too() -> None:
    # Weight in and out 8, moments in and out 16, the gradient twice 8; it is cast, 2 + 4, and the copy made, 4 + 2.
    assert update_bytes(O2) == 44.0
    assert update_bytes(replace(O2, precision="O1")) == 32.0
