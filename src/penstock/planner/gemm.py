"""How long a matrix product takes: a roofline with what tiles and waves leave idle (Williams et al., CACM 2009)."""

from __future__ import annotations

import math
from functools import lru_cache

from penstock.planner.rates import Rates

RELATIVE_RATES = {(256, 128): 1.0, (128, 256): 1.0, (128, 128): 0.93, (64, 64): 0.6}
"""Tiles that libraries choose among, rows and columns, and their relative rate: smaller ones load more per product."""
TILES = tuple((rows, columns, rows * columns / rate) for (rows, columns), rate in RELATIVE_RATES.items())
LINE = 64
"""Numbers of two bytes in a cache line of 128 bytes."""
UNALIGNED_SHARE = 0.8
"""Rows that start inside a line: a tile row of one line then spans five sectors instead of four."""
ODD_SHARE = 0.25
"""Rows whose start is no multiple of 16 bytes cannot be loaded by vector instructions."""
SPLIT_DEPTH = 1024
"""Inner length from which a product with few tiles is split over more multiprocessors."""


@lru_cache(maxsize=1 << 15)
def gemm_seconds(
    rates: Rates, m: int, n: int, k: int, batch: int = 1, *, linear: bool = True, out: int = 0
) -> float:
    """Seconds of `batch` products (m, k) @ (k, n) in one launch; `out` is the size of a result's number in bytes.

    The best of a few tile sizes, each rounded up to whole tiles and whole waves over all multiprocessors; never less
    than reading both factors and writing the product takes.
    """
    size = rates.linear if linear else rates.compute
    moved = batch * ((m + n) * k * size + m * n * (out or rates.compute)) / rates.memory
    rate = rates.gemm if linear else rates.half
    if rates.cpu:
        return max(2.0 * m * n * k * batch / rate, moved) + rates.kernel_seconds
    sms = rates.multiprocessors
    split = -(-k // SPLIT_DEPTH)
    best = math.inf
    for rows, columns, area in TILES:
        tiles = -(-m // rows) * -(-n // columns) * batch
        if tiles >= sms or split == 1:
            work = -(-tiles // sms) * area
        else:
            work = area / (min(split, sms // tiles) or 1)
        if work < best:
            best = work
    seconds = 2.0 * best * sms * (k + rates.tile_depth) / rate
    if n % LINE or k % LINE:
        seconds /= ODD_SHARE if n % 8 or k % 8 else UNALIGNED_SHARE
    return max(seconds, moved) + rates.kernel_seconds
