"""Fused attention on a GPU, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.config.machine import load_machine
from penstock.config.plan import Plan
from penstock.planner.constants import CITED_FEATURES, DEFAULT
from penstock.planner.operators import Op
from penstock.planner.price import fused_seconds, keys_computed
from penstock.planner.rates import Rates, exponentials_per_second, products_rate, rates_of

FLASH = Plan(precision="O3", attention="flash")


def test_tiles_are_whole() -> None:
    assert keys_computed(256, 256) == 256
    # 197 queries are two tiles of 128, 197 keys four of 64.
    assert keys_computed(197, 197) == pytest.approx(256 * 256 / 197)


def test_tiles_on_the_diagonal_are_computed_whole() -> None:
    """Of 4 × 4 tiles of 128, 10 are on the diagonal or below, not 8."""
    assert keys_computed(512, 512, causal=True) * 512 == 10 * 128 * 128
    assert keys_computed(64, 64, causal=True) == 128 / 64 * 64
    # The last tile of queries needs no more keys than there are.
    assert keys_computed(192, 192, causal=True) * 192 == 128 * (128 + 192)
    long = keys_computed(65536, 65536, causal=True)
    assert long == pytest.approx(65536 / 2, rel=0.002)


@pytest.mark.parametrize(
    ("name", "flops_per_clock"), [("v100", 1024), ("a100-80g", 2048), ("h100", 4096), ("b200", 8192)]
)
def test_the_clock_follows_from_the_peak(name: str, flops_per_clock: int) -> None:
    """NVIDIA's whitepapers: fp16 FLOPs of one multiprocessor per clock; 16 exponentials each."""
    machine = load_machine(name)
    peak, count = machine.peak_flops["fp16"], machine.multiprocessors or 0
    assert count
    assert peak / exponentials_per_second(peak, count) == flops_per_clock / 16


def kernel_seconds(rates: Rates, scores: float, features: int, queries: float, *, backward: bool) -> float:
    """Seconds of one pass over so many scores, whose queries are so many bytes."""
    tokens = 4096
    op = Op(
        "attention", "attention", forward=not backward, batch=scores / tokens**2, m=tokens, n=tokens, k=features,
        elements=queries / rates.compute,
    )  # fmt: skip
    return fused_seconds(op, rates)


def test_the_stated_rate_is_reached_with_the_heads_it_was_stated_for() -> None:
    machine = load_machine("a100-80g")
    rates = replace(rates_of(machine, FLASH), memory=float("inf"))
    cited = machine.peak_flops["bf16"] * DEFAULT.flash_share
    for backward, flops in ((False, 4), (True, 10)):
        seconds = kernel_seconds(rates, 1e9, CITED_FEATURES, 0.0, backward=backward)
        assert flops * 1e9 * CITED_FEATURES / seconds == pytest.approx(cited)
        narrow = kernel_seconds(rates, 1e9, 64, 0.0, backward=backward)
        assert seconds / 2 < narrow < seconds, "half the products, as many exponentials"


def test_what_is_moved_is_added() -> None:
    rates = rates_of(load_machine("a100-80g"), FLASH)
    for backward, times in ((False, 2), (True, 10)):
        without = kernel_seconds(rates, 1e9, 64, 0.0, backward=backward)
        more = kernel_seconds(rates, 1e9, 64, 1e8, backward=backward)
        assert more - without == pytest.approx(times * 1e8 / rates.memory)


def test_a_products_rate_is_above_the_kernels() -> None:
    assert products_rate(1e14, 1e12, 1.0) == pytest.approx(1 / (1e-14 - 1e-12 / 512))
    assert products_rate(1e14, float("inf"), 1.0) == pytest.approx(1e14)
