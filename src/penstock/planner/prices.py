"""What the operations of a step cost on one device under one plan: a roofline of each.

On a GPU each operation takes max(FLOPs / rate, bytes / bandwidth) (Williams, Waterman and Patterson, CACM 2009,
"Roofline: an insightful visual performance model"), where the rate of a matrix product depends on its type and shape;
on a CPU it takes what `host_time` says.

Most operations take time in proportion to the batch, and are priced and added up once for all batches. What is left to
price for one batch are products, whose rate changes with their shape.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple, get_args

from penstock.config.machine import Machine
from penstock.config.plan import AttentionBackend, Compile, HalfDtype, Matmul, Plan, Precision
from penstock.planner.attention import keys_computed
from penstock.planner.gemm import tiled_seconds
from penstock.planner.host_time import TRACED_BACKWARD, host_seconds
from penstock.planner.operations import Op, Operations, OpKind, attention_form
from penstock.planner.products import Near, Products, bandwidth, products
from penstock.planner.rates import Rates, product_type, rates_of

CPU_HALF_FUSED_SHARE = 0.12
"""Share of the half-precision product rate that torch's fused attention reaches on a CPU: it converts as it goes.
Measured with bf16 units, 197 tokens, forward and backward: the plain form was 3.4 times as fast. fp32 has no such
loss."""
FP8_MULTIPLE = 16
"""Both sizes of a weight must be multiples of it, that its products run in fp8."""
_MATRIX = ("gemm", "bmm", "conv")
_HALVES: dict[OpKind, float] = dict.fromkeys(get_args(OpKind), 2.0)
_MIXED = _HALVES | {"norm": 4.0, "pointwise": 3.0, "copy": 3.0, "reduce": 3.0}
_ELEMENT_BYTES: dict[Precision, dict[OpKind, float]] = {
    "O0": dict.fromkeys(get_args(OpKind), 4.0), "O1": _MIXED, "O2": _MIXED, "O3": _HALVES,
}  # fmt: skip
"""Of an element that an operation moves: O1 and O2 keep norms and, in part, the residual stream in fp32."""


class Line(NamedTuple):
    """A figure that is affine in the batch: what one sample makes, and what each further one adds."""

    one: float
    more: float


class _Product(NamedTuple):
    """A matrix product whose rate depends on the batch: shape and traffic at one sample, and what further ones add."""

    forward: bool
    part: str
    times: int
    over_rows: bool
    n: int
    m: int
    more_m: int
    k: int
    more_k: int
    batch: int
    more_batch: int
    moved: float
    """Seconds."""
    more_moved: float
    by: Products
    near: Near | None
    """Measured products, as seen from this one."""


class Priced(NamedTuple):
    """The operations of a step under one plan on one machine, priced for any batch."""

    even: dict[str, Line]
    """Seconds by part of all operations that take so much more with every sample."""
    forward: Line
    """Those of them that run forward."""
    products: tuple[_Product, ...]
    prices: _Prices
    launches: int
    written: tuple[tuple[int, Line], ...]
    """Bytes of each result that is allocated, with how many times it is."""

    def seconds(self, samples: int) -> tuple[dict[str, float], float]:
        """Seconds by part of one micro-batch, and those of its forward operations."""
        more = samples - 1
        parts = {part: line.one + more * line.more for part, line in self.even.items()}
        ahead = self.forward.one + more * self.forward.more
        price = self.prices.product
        for one in self.products:
            forward, part, count, over_rows, n, m, m_, k, k_, batch, batch_, moved, moved_, by, near = one
            rows, inner = m + more * m_, k + more * k_
            rate = near.rate(inner if k_ else rows) if near else None
            taken = count * price(
                by,
                rows,
                n,
                inner,
                batch + more * batch_,
                moved + more * moved_,
                over_rows=over_rows,
                rate=rate,
            )
            parts[part] += taken
            if forward:
                ahead += taken
        return parts, ahead


class _Terms(NamedTuple):
    """What of a plan the price of an operation depends on: all that `_Prices` and `_under_plan` get to see of it."""

    precision: Precision
    dtype: HalfDtype
    matmul: Matmul
    fp8: bool
    attention: AttentionBackend
    compile: Compile


def priced(listed: Operations, parameters: int, tensors: int, machine: Machine, plan: Plan) -> Priced:
    """Price `listed` for any number of samples. Raises KeyError where the machine cannot compute in the plan's type.

    A kernel that compilation merged moves as much as its largest member does at one and at two samples, and so on.
    """
    terms = _Terms(plan.precision, plan.dtype, plan.matmul, plan.fp8, plan.attention, plan.compile)
    return _priced(listed, parameters, tensors, machine, terms)


@lru_cache(maxsize=256)
def _priced(listed: Operations, parameters: int, tensors: int, machine: Machine, terms: _Terms) -> Priced:
    plan = Plan(**terms._asdict())
    prices = _Prices(machine, plan)
    even: dict[str, list[float]] = {part: [0.0, 0.0] for part in ("gemm", "attention", "pointwise")}
    forward = [0.0, 0.0]
    lines, written = [], []
    launches = 0
    one, two = (_under_plan(ops, plan, parameters, tensors) for ops in (listed.one, listed.two))
    for a, b in zip(one, two, strict=True):
        part = "gemm" if a.kind in _MATRIX else "pointwise"
        if a.kind != "gemm" and a.name.startswith("attention"):
            part = "attention"
        launches += a.count
        # By its name, torch's sign of an operator that writes in place, and so allocates nothing.
        if not a.name.endswith("_"):
            size = prices.sizes[a.kind]
            written.append(
                (a.count, Line(size * a.written_elements, size * (b.written_elements - a.written_elements)))
            )
        if prices.is_uneven(a):
            moved, further, by = prices.moved(a), prices.moved(b), prices.by(a)
            lines.append(_Product(
                a.phase == "forward", part, a.count, _is_weight_gradient(a), a.n, a.m, b.m - a.m, a.k, b.k - a.k,
                a.batch, b.batch - a.batch, moved, further - moved, by, by.near(a.m, a.n, a.k, inner=b.k > a.k),
            ))  # fmt: skip
            continue
        first = a.count * prices.seconds(a)
        further = a.count * prices.seconds(b) - first
        for total in (even[part], *([forward] if a.phase == "forward" else [])):
            total[0] += first
            total[1] += further
    return Priced(
        {part: Line(*total) for part, total in even.items()},
        Line(*forward), tuple(lines), prices, launches, tuple(written),
    )  # fmt: skip


def _under_plan(operations: tuple[Op, ...], plan: Plan, parameters: int, tensors: int) -> list[Op]:
    """The operations as the plan runs them: casts under autocast, compiled runs of pointwise operations merged."""
    run = list(operations)
    if plan.precision == "O1":
        run = [*_casts(run, parameters, tensors), *run]
    if plan.compile != "none":
        run = _merged(run)
    return [*_quantized(run), *run] if plan.fp8 else run


def _quantized(operations: Iterable[Op]) -> list[Op]:
    """What `precision.fp8` does beside each product, compiled or not: it reads inputs and weights, and backward the
    outputs' gradients, for their largest number, reads them again and writes a byte for each; and backward it turns
    weights, inputs and gradients, whose long side must be that of the sum. Elements are counted as of two bytes.
    """
    added = []
    for op in operations:
        if not _is_fp8(op):
            continue
        rows, weights = op.m * op.k, op.n * op.k
        if _is_weight_gradient(op):
            cast, turned = 0, rows + weights
        elif op.phase == "backward":
            cast, turned = rows, weights
        else:
            cast, turned = rows + weights, 0
        added.append(Op(
            "quantize", "quantize", op.phase, op.count, read_elements=2 * cast + turned // 2,
            written_elements=(cast + turned) // 2,
        ))  # fmt: skip
    return added


def _is_fp8(op: Op) -> bool:
    """Whether a product runs in fp8 where the plan says so: those of linear layers in blocks, of which in a traced
    model the sizes have to tell."""
    if op.kind != "gemm":
        return False
    if "." in op.name:
        return op.name.startswith(("attention.", "mlp."))
    sizes = (op.m, op.n) if _is_weight_gradient(op) else (op.n, op.k)
    return not any(size % FP8_MULTIPLE for size in sizes)


def _casts(operations: Iterable[Op], parameters: int, tensors: int) -> list[Op]:
    """What autocast adds: each weight to half and its gradient back, and the output of each norm to half."""
    one = parameters // max(tensors, 1)
    cast = [
        Op("cast.weights", "copy", "forward", tensors, read_elements=one, written_elements=one),
        Op("cast.gradients", "copy", "backward", tensors, read_elements=one, written_elements=one),
    ]
    for op in operations:
        if op.kind == "norm":
            moved = max(op.written_elements, 1)
            cast.append(
                Op("cast.norm", "copy", op.phase, op.count, read_elements=moved, written_elements=moved)
            )
    return cast


def _merged(operations: Iterable[Op]) -> list[Op]:
    """Neighbouring operations other than matrix products become one kernel: it reads what the largest reads."""
    merged: list[Op] = []
    for op in operations:
        last = merged[-1] if merged else None
        mergeable = last is not None and last.kind not in _MATRIX and op.kind not in _MATRIX
        if last is not None and mergeable and last.count == op.count and last.phase == op.phase:
            merged[-1] = Op(
                name=f"{last.name}+{op.name}", kind="pointwise", phase=op.phase, count=op.count,
                read_elements=max(last.read_elements, op.read_elements),
                written_elements=max(last.written_elements, op.written_elements),
            )  # fmt: skip
        else:
            merged.append(op)
    return merged


class _Prices:
    """What one operation costs, done once, on one device under one plan."""

    __slots__ = ("_bandwidth", "_fp8", "_machine", "_measured", "_plan", "_products", "_rates", "sizes")

    def __init__(self, machine: Machine, plan: Plan) -> None:
        self._machine, self._plan = machine, plan
        self._bandwidth = bandwidth(machine)
        self._products = products(machine, product_type(plan, machine))
        self._fp8 = products(machine, "fp8") if plan.fp8 else None
        self.sizes = _ELEMENT_BYTES[plan.precision]
        self._rates = None if machine.device == "cpu" else rates_of(machine, plan)
        self._measured = plan.precision == "O0"

    def is_uneven(self, op: Op) -> bool:
        """Whether a larger batch changes the rate of `op`: that of a single product as well as, by the waves that they
        fill, of many in one launch on a GPU."""
        if op.kind == "bmm":
            return self._rates is not None and not self._is_fused_attention(op)
        return op.kind in _MATRIX

    def seconds(self, op: Op) -> float:
        """The roofline of `op`; on a CPU, what `host_time` says."""
        moved, rates = self.moved(op), self._rates
        if self.is_uneven(op):
            return self.product(
                self.by(op), op.m, op.n, op.k, op.batch, moved, over_rows=_is_weight_gradient(op)
            )
        if rates is None:
            fused = op.kind == "bmm" and self._is_fused_attention(op)
            return host_seconds(op, self._machine, self._rate, moved, fused=fused, measured=self._measured)
        return _fused_seconds(op, rates, moved) if op.kind == "bmm" else moved

    def product(
        self,
        by: Products,
        m: int,
        n: int,
        k: int,
        batch: int,
        moved: float,
        *,
        over_rows: bool,
        rate: float | None = None,
    ) -> float:
        """Seconds of `batch` products (m, k) @ (k, n) in one launch, whose traffic takes `moved`, at the rates of `by`;
        `rate` is theirs where it is known already."""
        chip = by.chip
        if chip is not None:
            computed = tiled_seconds(chip, m, n, k, batch, over_rows=over_rows)
        else:
            computed = 2.0 * m * n * k * batch / (rate or by.rate(m, n, k, batch, over_rows=over_rows))
        if self._rates is None:
            return computed + moved
        return computed if computed > moved else moved

    def by(self, op: Op) -> Products:
        """How fast products like `op` are."""
        return self._fp8 if self._fp8 is not None and _is_fp8(op) else self._products

    def moved(self, op: Op) -> float:
        """Seconds that the traffic of `op` takes."""
        if self._fp8 is not None and _is_fp8(op):
            return (op.read_elements + op.written_elements * self.sizes[op.kind]) / self._bandwidth
        return (op.read_elements + op.written_elements) * self.sizes[op.kind] / self._bandwidth

    def _rate(self, op: Op) -> float:
        rate = self._products.rate(op.m, op.n, op.k, op.batch, over_rows=False)
        if self._rates is None and not self._measured and op.kind == "bmm" and self._is_fused_attention(op):
            rate *= CPU_HALF_FUSED_SHARE
        return rate

    def _is_fused_attention(self, op: Op) -> bool:
        """Whether a batched product is part of a fused kernel: by the plan, or by its name in a traced model."""
        # A product's rows are tokens.
        return "scaled_dot" in op.name or attention_form(self._plan, op.m, self._machine.device) == "fused"


def _fused_seconds(op: Op, rates: Rates, moved_seconds: float) -> float:
    """One product of a fused attention kernel, or, traced, all of them, with as large a share of its exponentials."""
    traced, ahead = "scaled_dot" in op.name, op.phase == "forward"
    keys = op.k if op.n != op.m and not traced else op.n
    padded = keys_computed(op.m, keys) / keys
    again = TRACED_BACKWARD if traced and not ahead else 1.0
    products = 1.0 if traced else 0.5 if ahead else 0.25
    computed = (
        again * (op.flops + op.recomputed_flops) / (rates.attention if ahead else rates.attention_backward)
    )
    exponentials = products * op.batch * op.m * keys / rates.exponentials
    # Keys and values stream in while others are computed with.
    return padded * (computed + exponentials) + (moved_seconds / 2 if ahead else moved_seconds)


def _is_weight_gradient(op: Op) -> bool:
    """Whether a product sums over rows of tokens: by its name, or in a traced model by its long inner length."""
    if op.phase == "forward" or op.kind != "gemm":
        return False
    return op.name.endswith(".weight") or ("." not in op.name and op.k > max(op.m, op.n))
