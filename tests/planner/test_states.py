"""Bytes per weight of the two forms of master weights, and what an update moves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.config.plan import Plan
from penstock.config.transformer import TRANSFORMERS
from penstock.planner.memory_model import memory
from penstock.planner.shapes import shape_of
from penstock.planner.states import MasterForm, master_size, optimizer_size, stored_size, update_bytes

O2 = Plan(precision="O2", dtype="bf16", optimizer="fused")


@pytest.mark.parametrize(("form", "missing", "held"), [("copy", 4.0, 14.0), ("remainder", 2.0, 12.0)])
def test_a_remainder_takes_half_of_a_copy(form: MasterForm, missing: float, held: float) -> None:
    """What RemainderAdamW.memory() counts of real tensors: weight 2, remainder 2, moments 8."""
    assert master_size(O2, form) == missing
    assert stored_size(O2) + optimizer_size(O2, form) == held
    for precision in ("O0", "O1", "O3"):
        assert master_size(replace(O2, precision=precision), form) == 0.0  # type: ignore[arg-type]


def test_the_memory_model_follows_the_form() -> None:
    shape = shape_of(TRANSFORMERS["gpt-22b"])
    copy, remainder = (memory(shape, O2, held=1e9, master_form=form) for form in ("copy", "remainder"))
    assert copy["master_weights"] == 4e9
    assert remainder["master_weights"] == 2e9
    assert {name: size for name, size in copy.items() if name != "master_weights"} == {
        name: size for name, size in remainder.items() if name != "master_weights"
    }


def test_one_pass_over_remainders_moves_less_than_a_copy() -> None:
    # Weight and remainder in and out 8, moments in and out 16, the gradient 2, and 2 more for its norm.
    assert update_bytes(O2, "remainder") == 28.0
    assert update_bytes(O2, "copy") > 28.0
    assert update_bytes(replace(O2, gradients="fp32"), "remainder") == 32.0
    assert update_bytes(replace(O2, precision="O1"), "remainder") == update_bytes(replace(O2, precision="O1"))
