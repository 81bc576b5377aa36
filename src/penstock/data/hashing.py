"""Randomness as a pure function of counters, so that it depends on no device, process, batch or library version.

Every random number of the data path is `hash(seed, purpose, counter...)`. There is no state: resuming at a position,
splitting a batch over ranks or reading it with more workers changes no number.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

# Purposes separate the streams of numbers that share a seed.
ORDER = 1
REPLACE = 2
SAMPLE = 3
BATCH = 4
MASK = 5
GROUP = 6
NOISE = 7
SWAP = 8
PREFIX = 9


def _mix(x: Words) -> Words:
    """The output function of splitmix64 (Steele, Lea and Flood, OOPSLA 2014): a bijection of 64-bit words."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def words(*keys: int, counters: Words) -> Words:
    """A 64-bit word for each counter, a pure function of the keys and that counter. Negative keys wrap."""
    state = np.zeros(1, np.uint64)
    for key in keys:
        state = _mix(state + np.uint64(key & 0xFFFFFFFFFFFFFFFF) + np.uint64(0x9E3779B97F4A7C15))
    return _mix(state ^ _mix(counters.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)))


def uniforms(*keys: int, counters: NDArray[np.int64], columns: int) -> NDArray[np.float32]:
    """(n, columns) numbers in [0, 1), row i a pure function of the keys and counters[i]."""
    rows = words(*keys, counters=counters.astype(np.uint64))[:, None]
    table = _mix(rows + np.arange(1, columns + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    # 24 bits fill a float32's significand exactly, so that rounding never gives 1.0.
    return ((table >> np.uint64(40)).astype(np.float32)) * np.float32(2.0**-24)


def generator(*keys: int) -> np.random.Generator:
    """A numpy generator for distributions that need more than uniforms (beta)."""
    key = words(*keys, counters=np.arange(2, dtype=np.uint64))
    return np.random.Generator(np.random.Philox(key=key))
