"""The types of a step, level by level, and what sharding makes of them."""

from __future__ import annotations

import itertools

import pytest

from penstock.config.formats import BYTES
from penstock.config.numerics import numerics_of
from penstock.config.plan import Plan


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "baseline",
            "weights=fp32 gathered=fp32 compute=fp32 residual=fp32 reduction=fp32 masters=none moments=fp32",
        ),
        ("matmul=high", "factors=tf32 compute=fp32 products=plain"),
        ("precision=O1", "weights=fp32 gathered=fp32 compute=bf16 residual=fp32 norms=fp32 gradients=fp32"),
        ("precision=O1 products=fp8_tensorwise", "products=fp8_tensorwise factors=bf16 compute=bf16"),
        ("precision=O2", "weights=bf16 residual=bf16 norms=fp32 gradients=bf16 reduction=bf16 masters=copy"),
        ("precision=O3 dtype=fp16", "weights=fp16 norms=fp16 reduction=fp16 masters=none moments=fp16"),
        ("precision=O1 sharding=fsdp dp=2", "weights=fp32 gathered=bf16 reduction=fp32 masters=shards"),
        (
            "precision=O2 sharding=hsdp shard=2 dp=4",
            "weights=fp32 gathered=bf16 reduction=fp32 masters=shards",
        ),
        ("precision=O2 sharding=zero1 dp=2", "weights=bf16 reduction=fp32 masters=copy"),
        ("precision=O1 sharding=zero2 dp=2", "weights=bf16 gathered=bf16 masters=copy"),
        ("precision=O3 sharding=fsdp dp=2", "weights=bf16 gathered=bf16 reduction=bf16 masters=none"),
        (
            "precision=O1 sharding=fsdp dp=2 products=fp8_tensorwise gather=products",
            "gathered=bf16 gathered_linears=fp8 gradients=fp32 reduction=fp32",
        ),
        (
            "precision=O2 sharding=hsdp shard=2 dp=4 products=fp8_tensorwise gather=products",
            "gathered_linears=fp8 gradients=bf16",
        ),
        ("precision=O2 sharding=fsdp dp=2 products=fp8_tensorwise", "gathered_linears=bf16"),
        ("precision=O2 gradients=fp32", "gradients=bf16 reduction=fp32"),
        ("precision=O1 gradients=half", "reduction=bf16"),
    ],
)
def test_types_of_a_plan(line: str, expected: str) -> None:
    found = numerics_of(Plan.parse(line))
    for word in expected.split():
        name, _, value = word.partition("=")
        assert getattr(found, name) == value, name


@pytest.mark.parametrize(
    ("line", "weight", "state"),
    [
        ("baseline", 4, 8), ("precision=O1", 4, 8), ("precision=O2", 2, 12), ("precision=O3", 2, 4),
        ("precision=O2 algorithm=sgd", 2, 8),
        ("algorithm=sgd", 4, 4), ("precision=O2 sharding=fsdp dp=2", 4, 8),
    ],
)  # fmt: skip
def test_bytes_per_weight(line: str, weight: float, state: float) -> None:
    found = numerics_of(Plan.parse(line))
    assert BYTES[found.weights] == weight
    assert found.master_bytes + found.moments_per_weight * BYTES[found.moments] == pytest.approx(state)


def test_sharding_over_one_device_changes_nothing() -> None:
    for precision, sharding in itertools.product(
        ("O0", "O1", "O2", "O3"), ("zero1", "zero2", "fsdp", "hsdp")
    ):
        alone = numerics_of(Plan(precision=precision, sharding=sharding))
        assert alone == numerics_of(Plan(precision=precision))


def test_only_fp16_scales_its_loss() -> None:
    for precision, dtype in itertools.product(("O1", "O2", "O3"), ("bf16", "fp16")):
        assert numerics_of(Plan(precision=precision, dtype=dtype)).scales == (dtype == "fp16")
    assert not numerics_of(Plan()).scales
