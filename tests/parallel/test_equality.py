"""Several ranks learn what one process learns from the same samples, whatever is shared out among them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from helpers.equality import TINY, Trained, alone, trained
from helpers.spawn import spawn
from helpers.sweeps import sweep
from penstock.build import build
from penstock.config.plan import Plan
from penstock.config.run import Recipe
from penstock.models import create

STEPS = 8
RECIPE = Recipe(lr=1e-3, clip_norm=0.5, eps=1e-6)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LAYOUTS = {
    1: ("dp=1", "dp=1 sharding=fsdp", "dp=1 sharding=hsdp"),
    2: ("dp=2", "dp=2 sharding=fsdp", "dp=2 sharding=hsdp shard=2"),
    4: ("dp=4", "dp=4 sharding=fsdp", "dp=4 sharding=hsdp shard=2"),
}


def _both(lines: list[str], double: bool) -> list[tuple[str, Trained, Trained]]:
    """For each plan, what the ranks learned and what one process did; the latter on rank 0 alone."""
    known: dict[Plan, Trained] = {}
    found = []
    for line in lines:
        plan = Plan.parse(line)
        model = create(TINY).double() if double else TINY
        got = trained(model, plan, steps=STEPS, recipe=RECIPE, double=double)
        if torch.distributed.get_rank() == 0:
            single = replace(alone(plan), recompute="none", compile="none")
            if single not in known:
                model = create(TINY).double() if double else TINY
                known[single] = trained(model, single, steps=STEPS, recipe=RECIPE, double=double)
            found.append((line, got, known[single]))
    return found


def _hold(line: str, got: Trained, expected: Trained, double: bool) -> None:
    assert got.weights.keys() == expected.weights.keys()
    plan = Plan.parse(line)
    if double:
        for name, value in expected.weights.items():
            error = (got.weights[name] - value).norm() / value.norm()
            assert error <= 1e-7, f"{line}: {name} differs by {error:.1e}"
        return
    half = None if plan.precision == "O0" else DTYPES[plan.dtype]
    rtol = {None: 1.3e-6, torch.bfloat16: 1.6e-2, torch.float16: 1e-3}[half]
    for name, value in expected.weights.items():
        if half is None:
            torch.testing.assert_close(
                got.weights[name], value, rtol=rtol, atol=1e-5,
                msg=lambda text, n=name: f"{line}: {n}: {text}",
            )  # fmt: skip
            continue
        # Ranks add up half gradients in another order. Adam divides what is left of a gradient near zero by its own
        # size, so single elements tell of rounding; of each tensor the difference is held as a whole, against its
        # norm or, for biases that began at zero, how far Adam can have moved it.
        scale = max(float(value.norm()), RECIPE.lr * STEPS * value.numel() ** 0.5)
        error = float((got.weights[name] - value).norm()) / scale
        assert error <= rtol, f"{line}: {name} differs by {error:.1e}"
    loose = 1e-5 if half is None else rtol
    torch.testing.assert_close(torch.tensor(got.losses), torch.tensor(expected.losses), rtol=loose, atol=1e-5)
    torch.testing.assert_close(
        torch.tensor(got.norms), torch.tensor(expected.norms), rtol=10 * loose, atol=1e-5
    )


def _check(world: int, lines: list[str], *, double: bool = False, timeout: float = 120.0) -> None:
    found = spawn(_both, world, lines, double, timeout=timeout)[0]
    assert [line for line, _, _ in found] == lines
    for line, got, expected in found:
        _hold(line, got, expected, double)


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


def _frozen() -> list[tuple[str, Trained, Trained, dict[str, torch.Tensor]]]:
    """For each plan, what the ranks learned, what one process did, and the weights that all of them began with."""
    recipe = replace(RECIPE, freeze=FROZEN, layer_decay=0.8)
    found = []
    for line in FREEZING:
        plan = Plan.parse(line)
        got = trained(TINY, plan, steps=6, recipe=recipe)
        if torch.distributed.get_rank() == 0:
            single = replace(alone(plan), recompute="none")
            expected = trained(TINY, single, steps=6, recipe=recipe)
            found.append((line, got, expected, build(TINY, single).model.state_dict()))
    return found


def test_what_is_frozen_stays_on_every_rank_and_the_rest_learns_as_in_one_process() -> None:
    for line, got, expected, first in spawn(_frozen, 2, timeout=120.0)[0]:
        _hold(line, got, expected, False)
        for name, value in got.weights.items():
            frozen = any(name == part or name.startswith(f"{part}.") for part in FROZEN)
            rounded = first[name].to(value.dtype)
            assert torch.equal(value, rounded) == frozen, f"{line}: {name}"


def _matrix(world: int) -> Iterator[str]:
    """Every layout with every precision, with and without recomputation, and of one and of two micro-batches."""
    for number, layout in enumerate(LAYOUTS[world]):
        for recompute, precision in itertools.product(("none", "full"), ("O0", "O1", "O2")):
            accumulate = 1 + (number + (recompute == "full")) % 2
            yield f"micro_batch=2 {layout} recompute={recompute} precision={precision} accumulate={accumulate}"


@pytest.mark.sweep
# Each level on some numbers of ranks; fp64 is held on all of them.
@pytest.mark.parametrize(("precision", "world"), [("O0", 1), ("O1", 1), ("O2", 2), ("O1", 4)])
def test_every_layout_equals_one_process(world: int, precision: str) -> None:
    _check(world, [line for line in _matrix(world) if precision in line], timeout=280)


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
