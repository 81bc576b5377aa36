"""Rates of one device under a Plan: a Machine's figures, converted for `penstock.planner.price`.

Matrix products take their time from measured products of similar shapes, or else from the idle share of a GPU's tiles
and waves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from penstock.config import formats
from penstock.config.formats import BYTES, PRODUCTS
from penstock.config.machine import GemmSample, Machine, ProductForm
from penstock.config.numerics import Numerics, numerics_of
from penstock.config.plan import Plan
from penstock.planner import constants as figures
from penstock.planner.constants import DEFAULT, Constants
from penstock.planner.terms import basis_of, stored_samples

NEAR_SAMPLES = 4
"""Measured products between which the rate of an unmeasured shape is interpolated."""
NEAR = 1e-6
"""Squared distance in logarithms below which a shape counts as measured."""
TILES = {(256, 128): 1.0, (128, 256): 1.0, (128, 128): 0.93, (64, 64): 0.6}
"""Tiles that libraries choose among, rows and columns, and their relative rate: smaller ones load more per product."""
MOST_PARTS = 4
"""The most parts into which the inner length of a product is cut, where its tiles fill the last wave badly."""
SPLIT_DEPTH = 1024
"""Least inner length of one part, where a product is cut along it over more multiprocessors."""
LINE = 64
"""Two-byte elements in a cache line of 128 bytes."""
UNALIGNED_SHARE = 0.8
"""Rows that start inside a line: a tile row of one line then spans five sectors instead of four."""
ODD_SHARE = 0.25
"""Rows whose start is no multiple of 16 bytes cannot be loaded by vector instructions."""
FEW_ROWS = 8
"""Rows or columns up to which a product is a matrix–vector product, which is not padded to tiles."""
VECTOR = 8
"""Elements in a CPU's vector, of 32 bytes in fp32."""
VOCABULARY = 1 << 14
"""Number of outputs of a linear layer from which on a CPU multiplies it at another rate."""
SPECIAL: dict[ProductForm, ProductForm] = {
    "ragged": "forward", "vocabulary": "forward", "vocabulary_input": "input", "vocabulary_weight": "weight",
}  # fmt: skip
"""Forms priced as a share of another form's rate, with that other form."""
NEAREST = 2
"""Measured shapes of attention between which a rate is interpolated."""
ONEDNN = "fp32_onednn"
"""The name under which a probe stores a CPU's fp32 products by oneDNN; those by torch's default, MKL, are `fp32`."""
WORTH = 1.05
"""A product takes oneDNN if that is measured to be faster than MKL by more than this factor."""
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
    other: Products | None = None
    """Rates of oneDNN, where each product may take it."""

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
        samples = self.measured.get(SPECIAL.get(form, form)) or self.measured.get("forward")
        rate = min(nearby_rate(samples, (m, n, k), NEAR_SAMPLES), self.ceiling) if samples else self.ceiling
        rate *= self.shares.get(form, 1.0)
        onednn = 0.0 if self.other is None else self.other.rate(m, n, k, form)
        return onednn if onednn > WORTH * rate else rate


@lru_cache(maxsize=1 << 15)
def _wave_area(multiprocessors: int, m: float, n: float, count: float, uneven: bool) -> float:
    """Elements of the result of `count` products (m, n), rounded up to whole waves of tiles, and divided by the tile's
    relative rate; for the best tile shape. The last tile of rows of `uneven` products is half full on average."""
    best = math.inf
    for (rows, columns), rate in TILES.items():
        high = max(1.0, m / rows + 0.5) if uneven else -(-m // rows)
        waves = -(-high * -(-n // columns) * count // multiprocessors)
        best = min(best, waves * (rows * columns / rate))
    return best * multiprocessors


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rates:
    """Rates of one device, in SI units. Compared and hashed by identity, so that caches find them at once."""

    machine: Machine
    constants: Constants
    peak: float
    """FLOP/s of the type that linear layers compute in, from the datasheet: the base of MFU."""
    peak_name: str
    products: Products
    """Matrix products in the plan's computing type, outside 8-bit layers."""
    narrow: Products | None
    """Matrix products in the 8 bits of the plan's `products`, or of weights that are stored for inference; None where
    these are plain."""
    exact: Products
    """Matrix products in fp32 regardless of the plan's types, such as a router's."""
    product_rate: float
    """FLOP/s of large products outside 8 bits."""
    attention: tuple[float, float]
    """FLOP/s of the products of fused attention, forward and backward; the backward pass forms the scores again."""
    biased_attention: tuple[float, float]
    """The same with a bias added to the scores, which only the memory-efficient kernel supports."""
    attention_share: float
    """Share of the rate of products that fused attention reaches on a CPU where its own rate was not measured."""
    exponentials: float
    """Exponentials of softmax per second."""
    memory: float
    """Bytes per second of streaming kernels."""
    reading: float
    """Bytes of weights that layers of inference read from memory per second."""
    kernel_seconds: float
    """Gap between two dependent kernels of a GPU."""
    cpu: bool
    kernels: dict[str, Samples]
    """Measured rates of a CPU's operators by name, over tokens and features."""
    compute: float
    """Bytes of an element that goes into a matrix product."""
    link: float
    """Bus bandwidth inside a node, of one device."""
    gathering: float
    """All-gather's share of the link's bandwidth, where it was measured."""
    scattering: float
    """Reduce-scatter's share of it."""
    sending: float
    """Rate from one device to another in its node."""
    node: float
    """Bus bandwidth out of a node, of all its devices together."""
    call_seconds: float
    """Additional cost of each collective between processes on a CPU."""
    pairs: Rates | None
    """Rates within groups of two devices, if measured separately."""
    collective_share: float
    """Share of the multiprocessors that a collective takes from concurrent kernels."""
    host: float
    """Rate between a device and host memory, one direction."""

    def kernel(self, name: str, tokens: float = 1, features: float = 1) -> float | None:
        """Measured rate per second of a CPU's operator at that shape; None if it was not measured."""
        samples = self.kernels.get(name)
        return nearby_rate(samples, (tokens, features, 1.0), NEAREST) if samples else None


def product_type(numerics: Numerics, machine: Machine) -> str:
    """The key of `machine.peak_flops` for products outside 8-bit layers."""
    if numerics.factors != "tf32":
        return numerics.compute
    wish = "fp32_medium" if machine.device == "cpu" else "tf32"
    return wish if wish in machine.peak_flops else "fp32"


def rates_of(
    machine: Machine, plan: Plan, constants: Constants = DEFAULT, *, launch_blocking: bool = False,
    weights: formats.Products = "plain",
) -> Rates:  # fmt: skip
    """The rates of `machine` under `plan`, which must be legal there, with `weights` stored for inference."""
    numerics = numerics_of(plan)
    probed = plan.matmul == "probed" and machine.device == "cpu" and numerics.compute == "fp32"
    return _rates(machine, numerics, plan.attention, constants, launch_blocking, weights, probed)


@lru_cache(maxsize=512)
def _rates(
    machine: Machine, numerics: Numerics, attention: str, constants: Constants, launch_blocking: bool,
    weights: formats.Products, probed: bool,
) -> Rates:  # fmt: skip
    cpu, basis, type_ = machine.device == "cpu", basis_of(machine, weights), product_type(numerics, machine)
    narrow = PRODUCTS[weights if basis == "training" else numerics.products].weights
    peak_name, stored = narrow or type_, PRODUCTS[weights].weights
    # Layers that are not stored in few bits are packed, too.
    packed = [s for s in machine.gemm if weights != "plain" and s.form == "packed" and s.dtype == type_]
    link = (machine.link_bytes_per_second or machine.memory_bytes_per_second or 1e9) * constants.link_share
    link = machine.collective_bytes_per_second or link
    multiprocessors = machine.multiprocessors or figures.DEFAULT_MULTIPROCESSORS
    kernels = _kernels(machine, type_, numerics)
    share = 1.0 if numerics.compute == "fp32" else figures.CPU_HALF_FUSED_SHARE
    if attention == "native":  # what was measured is torch's kernel
        kernels = {name: rates for name, rates in kernels.items() if not name.startswith("attention")}
        share = figures.NATIVE_SHARE
    exponentials = exponentials_per_second(machine.peak_flops[type_], multiprocessors)
    memory = (machine.memory_bytes_per_second or math.inf) * (1.0 if cpu else constants.memory_share)
    pairs = None
    if machine.pairs:
        of_two = machine.linked(machine.pairs, machine.devices_per_node)
        pairs = _rates(of_two, numerics, attention, constants, launch_blocking, weights, probed)
    in_fp32 = products_in(
        machine, "fp32" if "fp32" in machine.peak_flops else type_, constants, multiprocessors, memory
    )
    if probed and ONEDNN in machine.peak_flops:
        in_fp32 = in_fp32._replace(other=products_in(machine, ONEDNN, constants, multiprocessors, memory))
    return Rates(
        machine=machine, constants=constants, peak=machine.peak_flops[peak_name], peak_name=peak_name,
        products=_stored_products(packed, BYTES[numerics.compute]) if packed
        else in_fp32 if probed else products_in(machine, type_, constants, multiprocessors, memory),
        narrow=_stored_products(stored_samples(machine, weights), BYTES[stored] if stored else 0.0)
        if basis == "stored"
        else products_in(machine, narrow, constants, multiprocessors, memory) if narrow else None,
        exact=in_fp32, product_rate=_sustained(machine, type_, constants),
        attention=_attention(machine, type_, attention, constants, exponentials),
        biased_attention=_attention(machine, type_, "efficient", constants, exponentials),
        attention_share=share, exponentials=exponentials, memory=memory,
        reading=next((s.per_second for s in machine.kernels if s.name == "reading"), memory),
        kernel_seconds=constants.kernel_seconds + launch_blocking * constants.blocking_seconds, cpu=cpu,
        kernels=kernels, compute=BYTES[numerics.compute], link=link,
        gathering=(machine.gather_bytes_per_second or link) / link,
        scattering=(machine.scatter_bytes_per_second or link) / link, sending=machine.send_bytes_per_second or link,
        node=(machine.node_bytes_per_second or link * machine.devices_per_node) * constants.node_share,
        call_seconds=machine.collective_seconds if cpu else 0.0, pairs=pairs,
        collective_share=0.0 if cpu else min(0.5, constants.collective_multiprocessors / multiprocessors),
        host=(machine.host_bytes_per_second or figures.ASSUMED_HOST_LINK) * figures.HOST_LINK_SHARE,
    )  # fmt: skip


def _stored_products(samples: Sequence[GemmSample], streamed: float) -> Products:
    """Products of layers that store their weights for inference, `streamed` bytes per weight, by measured shapes."""
    best = max(sample.flops_per_second for sample in samples)
    return Products({"forward": _logarithms(samples, 1.0)}, best, None, streamed=streamed)


def _logarithms(samples: Iterable[GemmSample], share: float) -> Samples:
    """Logarithms of sizes, and shares of rates."""
    return [(math.log(s.m), math.log(s.n), math.log(s.k), share * s.flops_per_second) for s in samples]


def products_in(
    machine: Machine, type_: str, constants: Constants, multiprocessors: int, memory: float
) -> Products:
    """Matrix products in one type: by measured shapes, if there are any, scaled to the share that long runs sustain."""
    share = sustained_share(machine, constants)
    measured: dict[ProductForm, Samples] = {}
    for s in machine.gemm:
        if s.dtype == type_ and s.plain:
            measured.setdefault(s.form, []).extend(_logarithms([s], share))
    best = _sustained(machine, type_, constants)
    if machine.device == "cpu" or measured:
        products = Products(measured, machine.peak_flops[type_] if measured else best, None)
        shares = {
            form: rate / products.rate(math.exp(m), math.exp(n), math.exp(k), SPECIAL[form])
            for form in SPECIAL
            for m, n, k, rate in measured.get(form, ())
        }
        return products._replace(shares={form: min(1.0, share) for form, share in shares.items()})
    return Products(measured, best, Chip(best, multiprocessors, constants.tile_depth, memory))


def _kernels(machine: Machine, type_: str, numerics: Numerics) -> dict[str, Samples]:
    """Measured rates of a CPU's operators in the types of a plan."""
    types = dict.fromkeys(("attention", "attention_token", "attention_block", "bmm"), type_)
    types["norm"] = numerics.residual
    rates: dict[str, Samples] = {}
    for s in machine.kernels:
        if types.get(s.name.removesuffix("_backward"), numerics.compute) == s.dtype:
            sizes = math.log(s.tokens or 1), math.log(s.features or 1), 0.0
            rates.setdefault(s.name, []).append((*sizes, s.per_second))
    return rates


def _sustained(machine: Machine, type_: str, constants: Constants) -> float:
    """The rate of long runs of large products: the sustained share of the best measured rate, of a sweep's best rate,
    or of the peak."""
    measured = [s.flops_per_second for s in machine.gemm if s.dtype == type_ and s.plain]
    best = max(measured, default=None) or machine.achievable_flops.get(type_)
    if not best and type_ == "fp16":
        best = machine.achievable_flops.get("bf16")
    if not best:
        best = machine.peak_flops[type_] * (1.0 if machine.device == "cpu" else constants.unmeasured_share)
    return best * sustained_share(machine, constants)


def sustained_share(machine: Machine, constants: Constants) -> float:
    """Share of the burst rate that the chip sustains: as measured over a minute of load, else as calibrated."""
    if machine.device == "cpu":
        return 1.0
    calibrated = constants.gemm_share_hopper if "fp8" in machine.peak_flops else constants.gemm_share
    return machine.sustained_share or calibrated


def exponentials_per_second(peak: float, multiprocessors: int) -> float:
    """Exponentials per second of a whole chip, from its `peak` FLOP/s in half precision.

    A multiprocessor does a power of two of FLOPs per clock, which determines the clock.
    """
    each = 1
    while peak / multiprocessors / (2 * each) >= figures.SLOWEST_CLOCK:
        each *= 2
    return figures.EXPONENTIALS_PER_CLOCK * peak / each


def products_rate(cited: float, exponentials: float, passes: float) -> float:
    """FLOP/s of a kernel's products alone, from the whole kernel's rate with heads of `CITED_FEATURES`.

    `passes` is the kernel's FLOPs over a forward pass's: 1, or 2.5 for a backward pass.
    """
    return 1.0 / (1.0 / cited - 1.0 / (4 * figures.CITED_FEATURES * passes * exponentials))


def _attention(
    machine: Machine, type_: str, backend: str, constants: Constants, exponentials: float
) -> tuple[float, float]:
    """Rates of the products of fused attention, forward and backward: the published rates of each generation's kernels
    with heads of `CITED_FEATURES`, without their exponentials.

    Backward has 2.5 times the FLOPs, because the scores are formed again (Dao 2023, section 4.1). In fp32 torch only
    has the memory-efficient kernel, regardless of `matmul`.
    """
    peak = machine.peak_flops[type_]
    hopper = "fp8" in machine.peak_flops
    slower = figures.OLD_UNITS if hopper else 1.0
    ratio = constants.fused_backward
    if type_ in ("fp32", "tf32") and "tf32" in machine.peak_flops:
        forward = (
            machine.peak_flops["tf32"] / figures.PRODUCTS_IN_FP32 * constants.fp32_attention_share * slower
        )
        backward = 2.5 * forward / ratio
    elif backend == "efficient" or "bf16" not in machine.peak_flops:
        share_of_peak = peak * constants.fused_attention_share * slower
        forward, backward = share_of_peak * (1 + ratio) / 3.5, share_of_peak * (1 + 1 / ratio) * 2.5 / 3.5
    elif hopper:
        forward = backward = peak * (
            constants.cudnn_share_hopper if backend == "cudnn" else constants.flash_share_hopper
        )
    else:
        forward = backward = peak * constants.flash_share
    return products_rate(forward, exponentials, 1.0), products_rate(backward, exponentials, 2.5)
