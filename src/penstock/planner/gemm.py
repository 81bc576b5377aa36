"""How long a matrix product takes: a roofline with what tiles and waves leave idle (Williams et al., CACM 2009)."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from penstock.planner.rates import Rates

RELATIVE_RATES = {(256, 128): 1.0, (128, 256): 1.0, (128, 128): 0.93, (64, 64): 0.6}
"""Tiles that libraries choose among, rows and columns, and their relative rate: smaller ones load more per product."""
TILES = tuple((rows, columns, rows * columns / rate) for (rows, columns), rate in RELATIVE_RATES.items())
MOST_PARTS = 4
"""Into which the inner length of a product is cut, where its tiles fill the last wave badly."""
LINE = 64
"""Numbers of two bytes in a cache line of 128 bytes."""
UNALIGNED_SHARE = 0.8
"""Rows that start inside a line: a tile row of one line then spans five sectors instead of four."""
ODD_SHARE = 0.25
"""Rows whose start is no multiple of 16 bytes cannot be loaded by vector instructions."""
SPLIT_DEPTH = 1024
"""Least inner length of one part, where a product is cut along it over more multiprocessors."""


@lru_cache(maxsize=1 << 15)
def gemm_seconds(
    rates: Rates,
    m: int,
    n: int,
    k: int,
    batch: int = 1,
    *,
    linear: bool = True,
    out: int = 0,
    over_rows: bool = False,
) -> float:
    """Seconds of `batch` products (m, k) @ (k, n) in one launch; `out` is the size of a result's number in bytes.

    `over_rows` says that both factors lie with their inner length from row to row, as those of a weight's gradient do,
    whose inner length is the tokens: then it is m and n that rows are aligned by, and not n and k.

    The best of a few tile sizes, each rounded up to whole tiles and whole waves over all multiprocessors; never less
    than reading both factors and writing the product takes.
    """
    size = rates.linear if linear else rates.compute
    moved = batch * ((m + n) * k * size + m * n * (out or rates.compute)) / rates.memory
    rate = rates.gemm if linear else rates.half
    if rates.cpu:
        # Packing and multiplying take turns on a core: see `host_time`.
        return 2.0 * m * n * k * batch / rate + moved + rates.kernel_seconds
    chip = Chip(rate, rates.multiprocessors, rates.tile_depth, rates.memory)
    return max(tiled_seconds(chip, m, n, k, batch, over_rows=over_rows), moved) + rates.kernel_seconds


class Chip(NamedTuple):
    """What decides how long a GPU computes a product: its rate for large ones and how it cuts them up."""

    rate: float
    multiprocessors: int
    tile_depth: float
    memory: float


def tiled_seconds(chip: Chip, m: int, n: int, k: int, batch: int = 1, *, over_rows: bool = False) -> float:
    """Seconds of computing the products, by the best of the tile shapes, without moving what they read and write.

    Tiles are whole, and so are waves over all multiprocessors. A product that fills its waves badly is cut along its
    inner length, each part adding its sums in fp32 to those of the others.
    """
    rate, sms, depth, memory = chip
    tiles = _tiled(sms, m, n, batch)
    seconds = 2.0 * tiles * (k + depth) / rate
    if k >= 2 * SPLIT_DEPTH and tiles > 1.05 * m * n * batch:
        for parts in range(2, min(MOST_PARTS, k // SPLIT_DEPTH) + 1):
            summed = 8.0 * parts * m * n * batch / memory
            split = 2.0 * _tiled(sms, m, n, batch * parts) * (k / parts + depth) / rate + summed
            if split < seconds:
                seconds = split
    row = m if over_rows else k
    if n % LINE or row % LINE:
        seconds /= ODD_SHARE if n % 8 or row % 8 else UNALIGNED_SHARE
    return seconds


@lru_cache(maxsize=1 << 15)
def _tiled(multiprocessors: int, m: int, n: int, count: int) -> float:
    """Numbers of the result, were `count` products (m, n) as large as the waves of tiles that they take: of the tile
    shape that takes least, its relative rate made up for by its size.
    """
    best = math.inf
    for rows, columns, area in TILES:
        work = -(-(-(-m // rows) * -(-n // columns) * count) // multiprocessors) * area
        if work < best:
            best = work
    return best * multiprocessors
