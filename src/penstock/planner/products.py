"""Time of matrix products, from measured nearby shapes, or from the idle share of tiles and waves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from penstock.config.machine import ProductForm

NEAR_SAMPLES = 4
"""Measured products between which the rate of an unmeasured shape is interpolated."""
NEAR = 1e-6
"""Squared distance in logarithms below which a shape counts as measured."""
RELATIVE_RATES = {(256, 128): 1.0, (128, 256): 1.0, (128, 128): 0.93, (64, 64): 0.6}
"""Tiles that libraries choose among, rows and columns, and their relative rate: smaller ones load more per product."""
TILES = tuple((rows, columns, rows * columns / rate) for (rows, columns), rate in RELATIVE_RATES.items())
MOST_PARTS = 4
"""The most parts into which the inner length of a product is cut, where its tiles fill the last wave badly."""
SPLIT_DEPTH = 1024
"""Least inner length of one part, where a product is cut along it over more multiprocessors."""
LINE = 64
"""Numbers of two bytes in a cache line of 128 bytes."""
UNALIGNED_SHARE = 0.8
"""Rows that start inside a line: a tile row of one line then spans five sectors instead of four."""
ODD_SHARE = 0.25
"""Rows whose start is no multiple of 16 bytes cannot be loaded by vector instructions."""
FEW_ROWS = 8
"""Rows or columns up to which a product is a matrix–vector product, which is not padded to tiles."""
VECTOR = 8
"""Numbers in a CPU's vector, of 32 bytes in fp32."""
VOCABULARY = 1 << 14
"""Number of outputs of a linear layer from which on a CPU multiplies it at another rate."""
SPECIAL: dict[ProductForm, ProductForm] = {
    "ragged": "forward", "vocabulary": "forward", "vocabulary_input": "input", "vocabulary_weight": "weight",
}  # fmt: skip
"""Forms priced as a share of another form's rate, with that other form."""


Samples = list[tuple[float, float, float, float]]
"""Logarithms of the three sizes of each measured shape, and its rate."""


def nearby_rate(samples: Samples, sizes: tuple[float, float, float], nearest: int) -> float:
    """The rate of a shape, between its `nearest` samples, by inverse square distance of logarithms."""
    x, y, z = math.log(sizes[0]), math.log(sizes[1]), math.log(sizes[2])
    near = sorted([((a - x) ** 2 + (b - y) ** 2 + (c - z) ** 2, rate) for a, b, c, rate in samples])
    total = rates = 0.0
    for distance, rate in near[:nearest]:
        weight = 1.0 / (NEAR + distance)
        total += weight
        rates += weight * rate
    return rates / total


class Chip(NamedTuple):
    """Figures that decide a product's time on a GPU: the rate for large products and how they are tiled."""

    rate: float
    multiprocessors: int
    tile_depth: float
    memory: float

    def seconds(
        self, m: float, n: float, k: float, batch: float, *, over_rows: bool, uneven: bool = False
    ) -> float:
        """Seconds of computing the products with the best of the tile shapes, without moving their operands and
        results. With `uneven` m is the mean of products with different numbers of rows.

        Tiles are whole, and so are waves over all multiprocessors. A product that fills its waves badly is cut along
        its inner length; the parts' sums are added in fp32.
        """
        rate, sms, depth, memory = self
        if min(m, n) <= FEW_ROWS:
            return 2.0 * m * n * k * batch / rate
        tiles = _wave_area(sms, m, n, batch, uneven)
        seconds = 2.0 * tiles * (k + depth) / rate
        if k >= 2 * SPLIT_DEPTH and tiles > 1.05 * m * n * batch:
            for parts in range(2, min(MOST_PARTS, int(k // SPLIT_DEPTH)) + 1):
                summed = 8.0 * parts * m * n * batch / memory
                area = _wave_area(sms, m, n, batch * parts, uneven)
                seconds = min(seconds, 2.0 * area * (k / parts + depth) / rate + summed)
        row = m if over_rows else k
        if n % LINE or row % LINE:
            seconds /= ODD_SHARE if n % 8 or row % 8 else UNALIGNED_SHARE
        return seconds


class Products(NamedTuple):
    """How fast a machine multiplies matrices in one type."""

    measured: dict[ProductForm, Samples]
    """FLOP/s of each form by m, n and k."""
    ceiling: float
    """No product is faster."""
    chip: Chip | None
    """How a GPU without measured products tiles them."""
    shares: Mapping[ProductForm, float] = MappingProxyType({})
    """Shares of its form's rate that a CPU's product of each `SPECIAL` form keeps, where they were measured."""
    streamed: float = 0.0
    """Bytes of a weight where a CPU's weights are stored in the order in which their kernel reads them, so that reading
    them from memory overlaps a part of the product; else 0."""

    def seconds(
        self, m: float, n: float, k: float, batch: float = 1, *, form: ProductForm = "forward", over_rows: bool = False,
        uneven: bool = False,
    ) -> float:  # fmt: skip
        """Seconds of computing `batch` products (m, k) @ (k, n) in one launch, without data movement.

        `over_rows`: both factors store their inner dimension across rows, as for a weight's gradient, whose inner
        dimension is the tokens: then m and n decide the alignment of rows, not n and k. `uneven` is as in `Chip`.
        """
        if self.chip is not None:
            return self.chip.seconds(m, n, k, batch, over_rows=over_rows, uneven=uneven)
        return 2.0 * m * n * k * batch / self.rate(m, n, k, form)

    def rate(self, m: float, n: float, k: float, form: ProductForm = "forward") -> float:
        """FLOP/s, from measured nearby shapes."""
        if form in SPECIAL:
            return self.shares.get(form, 1.0) * self.rate(m, n, k, SPECIAL[form])
        samples = self.measured.get(form) or self.measured.get("forward")
        return min(nearby_rate(samples, (m, n, k), NEAR_SAMPLES), self.ceiling) if samples else self.ceiling


@lru_cache(maxsize=1 << 15)
def _wave_area(multiprocessors: int, m: float, n: float, count: float, uneven: bool) -> float:
    """Elements of the result of `count` products (m, n), rounded up to whole waves of tiles, and divided by the tile's
    relative rate; for the best tile shape. The last tile of rows of `uneven` products is half full on average."""
    best = math.inf
    for rows, columns, area in TILES:
        high = max(1.0, m / rows + 0.5) if uneven else -(-m // rows)
        best = min(best, -(-high * -(-n // columns) * count // multiprocessors) * area)
    return best * multiprocessors
