"""How long a fused attention kernel takes on a GPU: what its tiles compute, its exponentials, and what it moves.

A thread block loads a tile of queries, goes over the keys that the tile may see, and stores its result (Dao 2023,
sections 3.1 and 3.3). Tiles are whole, those on the diagonal of a causal mask too. Matrix products and exponentials run
on different units, but each tile needs the one before the other, and exponentials are few per second: an H100 computes
256 FLOPs of products in the time of one (Shah et al. 2024, section 3.1). What a tile loads before it begins and stores
at its end hides behind nothing of its own: forward, queries and results; backward, keys, values and their gradients,
while sums over rows before it and the gradients of queries after it are kernels that only move. So all are added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.planner.rates import Rates

ROWS, COLUMNS = 128, 64
"""Queries and keys of a tile."""
CITED_FEATURES = 128
"""Of a head, where the rates that are stated of kernels were reached."""
EXPONENTIALS_PER_CLOCK = 16
"""Of one multiprocessor, on every chip since Volta (CUDA C++ Programming Guide, arithmetic instructions)."""
MOVED = {False: 2.0, True: 10.0}
"""What is moved and not hidden, in sizes of all queries. Backward: keys and values, and their gradients (4); results
and their gradients, read for the sums over rows (2); and in fp32 the gradients of queries, cleared and read (4)."""
SLOWEST_CLOCK = 1.2e9
"""Below what chips for training run at, and above half of it."""


def keys_computed(queries: int, keys: int, *, causal: bool = False) -> float:
    """Keys that a query is compared with on average, in whole tiles; `causal` is for as many keys as queries."""
    rows = -(-queries // ROWS)
    wide = -(-keys // COLUMNS) * COLUMNS
    if not causal:
        return wide * rows * ROWS / queries
    return (ROWS * (rows * (rows - 1) // 2) + wide) * ROWS / queries


def exponentials_per_second(peak: float, multiprocessors: int) -> float:
    """Of a whole chip, from its `peak` FLOP/s in half precision.

    A multiprocessor does a power of two of FLOPs per clock, which tells the clock.
    """
    each = 1
    while peak / multiprocessors / (2 * each) >= SLOWEST_CLOCK:
        each *= 2
    return EXPONENTIALS_PER_CLOCK * peak / each


def products_rate(cited: float, exponentials: float, passes: float) -> float:
    """FLOP/s of a kernel's products alone, from the rate of all of it with heads of `CITED_FEATURES`.

    `passes` is the kernel's products over those of a forward pass: 1, or 2.5 of a backward pass.
    """
    return 1.0 / (1.0 / cited - 1.0 / (4 * CITED_FEATURES * passes * exponentials))


def fused_seconds(rates: Rates, scores: float, features: int, size: float, *, backward: bool) -> float:
    """Seconds of one pass over `scores` pairs of query and key with heads of `features`.

    `size` is the bytes of all queries, which are those of keys, of values and of results.
    """
    flops = (10.0 if backward else 4.0) * scores * features
    rate = rates.attention_backward if backward else rates.attention
    return flops / rate + scores / rates.exponentials + MOVED[backward] * size / rates.memory
