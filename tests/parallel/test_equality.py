"""Several ranks learn what one process learns from the same samples, whatever is shared out among them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from helpers.equality import TINY, Close, Trained, alone, beside_each, hold
from helpers.spawn import spawn
from helpers.sweeps import sweep
from penstock.build import build
from penstock.config.plan import Plan
from penstock.config.run import Recipe
from penstock.models import create

STEPS = 8
RECIPE = Recipe(lr=1e-3, clip_norm=0.5, eps=1e-6)
LAYOUTS = {
    1: ("dp=1", "dp=1 sharding=fsdp", "dp=1 sharding=hsdp"),
    2: ("dp=2", "dp=2 sharding=fsdp", "dp=2 sharding=hsdp shard=2"),
    4: ("dp=4", "dp=4 sharding=fsdp", "dp=4 sharding=hsdp shard=2"),
}


def _both(
    lines: list[str], double: bool, steps: int = STEPS, **recipe: Any
) -> list[tuple[str, Trained, Trained]]:
    """For each plan, what the ranks learned and what one process did; the latter on rank 0 alone."""
    options: dict[str, Any] = {"steps": steps, "recipe": replace(RECIPE, **recipe), "double": double}
    return beside_each("tiny", partial(_model, double), lines, **options)


def _model(double: bool) -> Any:
    return create(TINY).double() if double else TINY


def _hold(said: str, got: Trained, expected: Trained, double: bool) -> None:
    plan = Plan.parse(said.partition(": ")[2])
    if double:
        hold(said, got, expected, weights=Close(1e-7, 0.0, 0.0), figures=Close(1e-5, 1e-5))
    elif plan.precision == "O0":
        loose = Close(1e-5, 1e-5)
        hold(said, got, expected, weights=Close(1.3e-6, 1e-5), figures=loose, norms=Close(1e-4, 1e-5))
    else:
        # Ranks add up half gradients in another order. Adam divides what is left of a gradient near zero by its own
        # size; biases began at zero.
        rtol = {"bf16": 1.6e-2, "fp16": 1e-3}[plan.dtype]
        loose = Close(rtol, 1e-5)
        weights = Close(rtol, 0.0, RECIPE.lr * STEPS)
        hold(said, got, expected, weights=weights, figures=loose, norms=Close(10 * rtol, 1e-5))


def _check(world: int, lines: list[str], *, double: bool = False, timeout: float = 120.0) -> None:
    found = spawn(_both, world, lines, double, timeout=timeout)[0]
    assert len(found) == len(lines)
    for said, got, expected in found:
        _hold(said, got, expected, double)


def test_two_ranks_equal_one_process() -> None:
    _check(
        2,
        [
            "dp=2 micro_batch=2",
            "dp=2 micro_batch=2 sharding=fsdp",
            "dp=2 micro_batch=2 sharding=fsdp precision=O2 accumulate=2 recompute=full optimizer=contiguous",
            "dp=2 micro_batch=2 sharding=zero1 precision=O1 accumulate=2 optimizer=foreach",
            "dp=2 micro_batch=2 precision=O2 dtype=fp16 accumulate=2 optimizer=fused",
            "dp=2 micro_batch=2 sharding=fsdp offload=optimizer optimizer=foreach",
        ],
    )


def test_two_ranks_equal_one_process_in_fp64() -> None:
    _check(2, ["dp=2 micro_batch=2", "dp=2 micro_batch=2 sharding=zero2 accumulate=2"], double=True)


def test_groups_of_shards_equal_one_process() -> None:
    _check(4, ["dp=4 micro_batch=1 sharding=hsdp shard=2 accumulate=2 recompute=early"])


FROZEN = ("stem", "encoder.places", "encoder.blocks.0", "encoder.blocks.1.mlp", "norm.bias")
FREEZING = (
    "dp=2 micro_batch=2 sharding=fsdp",
    "dp=2 micro_batch=2 sharding=fsdp precision=O2 accumulate=2 optimizer=fused recompute=full",
    "dp=2 micro_batch=2 sharding=zero1 optimizer=contiguous",
    "dp=2 micro_batch=2 precision=O1 accumulate=2",
)


def _frozen() -> tuple[list[tuple[str, Trained, Trained]], list[dict[str, torch.Tensor]]]:
    """For each plan, what the ranks learned and what one process did; and the weights that all of them began with."""
    found = _both([*FREEZING], False, steps=6, freeze=FROZEN, layer_decay=0.8, lr_width=8)
    return found, [build(TINY, alone(Plan.parse(line))).model.state_dict() for line in FREEZING]


def test_what_is_frozen_stays_on_every_rank_and_the_rest_learns_as_in_one_process() -> None:
    for (said, got, expected), first in zip(*spawn(_frozen, 2, timeout=120.0)[0], strict=True):
        _hold(said, got, expected, False)
        for name, value in got.weights.items():
            frozen = any(name == part or name.startswith(f"{part}.") for part in FROZEN)
            rounded = first[name].to(value.dtype)
            assert torch.equal(value, rounded) == frozen, f"{said}: {name}"


def _matrix(world: int) -> Iterator[str]:
    """Every layout with every precision, with and without recomputation, and of one and of two micro-batches."""
    for number, layout in enumerate(LAYOUTS[world]):
        for recompute, precision in itertools.product(("none", "full"), ("O0", "O1", "O2")):
            accumulate = 1 + (number + (recompute == "full")) % 2
            yield f"micro_batch=2 {layout} recompute={recompute} precision={precision} accumulate={accumulate}"


@pytest.mark.slow
@pytest.mark.parametrize("world", sweep([1, 2, 4], [4]))
def test_every_layout_equals_one_process_in_fp64(world: int) -> None:
    lines = [line for line in _matrix(world) if "O0" in line]
    _check(world, [line.replace(" precision=O0", "") for line in lines], double=True, timeout=280)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["O2"])
def test_compiled_blocks_equal_one_eager_process(precision: str) -> None:
    lines = [f"dp=2 micro_batch=2 sharding=fsdp compile=blocks precision={precision}",
             f"dp=2 micro_batch=2 compile=blocks precision={precision} accumulate=2"]  # fmt: skip
    _check(2, lines, timeout=280)


@pytest.mark.parametrize(
    "sharding", sweep(["ddp", "zero1", "zero2", "fsdp", "hsdp shard=1"], (), slow=["fsdp"])
)
def test_every_optimizer_form_steps_over_shards(sharding: str) -> None:
    lines = [f"dp=2 micro_batch=2 sharding={sharding} optimizer={form} accumulate=2" for form in
             ("loop", "foreach", "fused", "contiguous")]  # fmt: skip
    half = [f"dp=2 micro_batch=2 sharding={sharding} optimizer={form} precision={level} dtype=fp16" for form, level in
            itertools.product(("fused", "contiguous"), ("O1", "O2"))]  # fmt: skip
    whole = sharding == "ddp"
    offloaded = (
        [] if whole else [f"dp=2 micro_batch=2 sharding={sharding} offload=optimizer optimizer=contiguous"]
    )
    again = [f"dp=2 micro_batch=2 sharding={sharding} recompute=operators recompute_every=2"]
    _check(2, lines + half + offloaded + again, timeout=280)
