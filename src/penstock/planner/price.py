"""Cost of one operator on one device: operator × Machine × Numerics → seconds.

On a GPU, an operator takes max(FLOPs / rate, bytes / bandwidth) (Williams, Waterman and Patterson, CACM 2009,
"Roofline: an insightful visual performance model") plus the gap to the next kernel. In plain attention the scores are
sums over one head, so short that storing a tile takes as long as computing it and cannot overlap that computation: the
time of writing them is added. On a CPU, a core packs the factors of a product into panels and then multiplies them, and
reads the inputs of an activation and then computes exponentials: data movement barely overlaps computation, so the two
are added. Weights stored for inference are already packed: each panel is read from memory while the first few rows are
multiplied by it (the longer of the two counts), and from a cache for the other rows. Measured rates are for operands in
a cache; movement from memory is added. Products over a vocabulary fit no cache, so their measured rate includes the
movement.

A fused attention kernel's thread block loads a tile of queries, goes over the keys that the tile may see, and stores
its result (Dao 2023, sections 3.1 and 3.3). Matrix products and exponentials run on different units, but each tile
needs the one before the other (Shah et al. 2024, section 3.1). Neither the tile's first loads nor its final stores
overlap its own computation. So all are added.
"""

from __future__ import annotations

import math

from penstock.config.fused import FUSED_FORM
from penstock.config.machine import ProductForm
from penstock.kernels.choices import padded_entries
from penstock.planner.collectives import exchange_seconds, gather_seconds, group_of, reduce_seconds
from penstock.planner.operators import BIASED, MATRIX, Op
from penstock.planner.products import VECTOR, VOCABULARY, Products
from penstock.planner.rates import Rates

ROWS, COLUMNS = 128, 64
"""Queries and keys of a tile of fused attention."""
MOVED = {True: 2.0, False: 10.0}
"""Traffic of fused attention that it cannot overlap, in multiples of the size of all queries, forward and backward.
Backward: keys and values, and their gradients (4); results and their gradients, read for the sums over rows (2); and in
fp32 the gradients of queries, cleared and read (4)."""
STREAMED_ROWS = 6
"""Rows that are multiplied at once by a panel of weights stored for inference: the height of a tile of
`native/integers.cpp`."""
USUAL_ROW = 197
"""Elements in a row of a softmax, if an operator does not state them."""


def seconds(op: Op, rates: Rates) -> float:
    """Seconds of one operator other than a collective; on a CPU without its launch."""
    if rates.cpu:
        return _host_seconds(op, rates)
    if op.kind in MATRIX:
        by = products_of(op, rates)
        if op.module == "experts" and op.launches > 1 and not op.beside:
            one_expert = by.seconds(op.m, op.n, op.k, form=op.form, over_rows=op.over_rows)
            moved = (op.read + op.written) / rates.memory
            return max(op.launches * one_expert, moved) + op.launches * rates.kernel_seconds
        # Experts have different numbers of rows; for their weights' gradients the rows are the inner length.
        uneven = op.module == "experts" and op.batch > 1 and not op.over_rows
        m, n, k = (padded_entries("cuda", round(size)) if op.padded else size for size in (op.m, op.n, op.k))
        computed = by.seconds(m, n, k, op.batch, form=op.form, over_rows=op.over_rows, uneven=uneven)
        if op.scaled_every:  # each term of a weight's gradient has two scales, those of others share one
            computed += (1 + op.over_rows) * op.flops / op.scaled_every / rates.exact.ceiling
        if op.kind == "bmm":
            return max(computed, op.read / rates.memory) + op.written / rates.memory + rates.kernel_seconds
        return max(computed, (op.read + op.written) / rates.memory) + rates.kernel_seconds
    if op.kind == "attention":
        return fused_seconds(op, rates) + rates.kernel_seconds
    return (op.read + op.written) / rates.memory + op.launches * rates.kernel_seconds


def products_of(op: Op, rates: Rates) -> Products:
    """The rates of the type that a product multiplies in."""
    if op.exact:
        return rates.exact
    return rates.narrow if op.narrow and rates.narrow else rates.products


def collective_seconds(op: Op, rates: Rates, size: int, stride: int) -> float:
    """Seconds of a collective over `size` devices that are `stride` apart, overlapped or not."""
    group = group_of(rates, size, stride)
    if op.kind == "allreduce":
        return reduce_seconds(group, op.read)
    if op.kind == "exchange":
        routing = rates.constants.routing_seconds * op.elements
        return routing + exchange_seconds(group, op.read, int(op.k), reach=op.m)
    return gather_seconds(group, op.read, scatters=op.kind == "scatter")


def keys_computed(queries: float, keys: float, *, causal: bool = False, window: int = 0) -> float:
    """Average number of keys that a query is compared with, in whole tiles; `causal` assumes equally many keys and
    queries, and `window` is the number of preceding keys that a query sees."""
    rows = -(-queries // ROWS)
    wide = -(-keys // COLUMNS) * COLUMNS
    keys_of_all = wide * rows * ROWS / queries
    if causal:
        keys_of_all = (ROWS * (rows * (rows - 1) // 2) + wide) * ROWS / queries
    if not window or window >= keys:
        return keys_of_all
    # A tile of queries sees the window before its first query, and keys up to its last query.
    keys_in_window = (-(-(window + ROWS) // COLUMNS) * COLUMNS) * rows * ROWS / queries
    return min(keys_of_all, keys_in_window * (1 if causal else 2))


def fused_seconds(op: Op, rates: Rates) -> float:
    """Seconds of one pass of a fused attention kernel on a GPU.

    With a single query per head, as when a token is generated, the keys are split among thread blocks.
    """
    if op.m <= 1:
        return max(op.flops / rates.attention, (op.read + op.written) / rates.memory)
    # Under context parallelism a device has a part of the queries, some early and some late.
    queries = op.n if op.causal else op.m
    scores = op.batch * op.m * keys_computed(queries, op.n, causal=op.causal, window=op.window)
    flops = (4.0 if op.forward else 10.0) * scores * op.k
    forward, backward = rates.attention, rates.attention_backward
    if op.function == BIASED:
        forward, backward = rates.biased_attention
    rate = forward if op.forward else backward
    return (
        flops / rate
        + scores / rates.exponentials
        + MOVED[op.forward] * op.elements * rates.compute / rates.memory
    )


def _form_of(op: Op, products: Products) -> ProductForm:
    """The form by which a CPU's product of a linear layer is priced."""
    forms: dict[ProductForm, tuple[float, ProductForm]] = {
        "forward": (op.n, "vocabulary"),
        "input": (op.k, "vocabulary_input"),
        "weight": (max(op.m, op.n), "vocabulary_weight"),
    }
    outputs, form = forms[op.form]
    if outputs >= VOCABULARY and form in products.shares:
        return form
    return "ragged" if op.form == "forward" and op.n % VECTOR else op.form


def _host_seconds(op: Op, rates: Rates) -> float:
    """Seconds of one operator on a CPU."""
    moved = (op.read + op.written) / rates.memory
    backward = "" if op.forward else "_backward"
    if op.kind in MATRIX:
        measured = None
        # Scores are computed in blocks of queries, which attend to a part of the keys.
        share = op.window / max(op.m, op.n, op.k) if op.window else 1.0
        if op.kind == "bmm":
            features, _, tokens = sorted((op.m, op.n, op.k))
            measured = rates.kernel(f"bmm{backward}", tokens, features) or rates.kernel(
                "bmm", tokens, features
            )
        if measured:
            return share * op.flops / measured + moved
        products = products_of(op, rates)
        form = _form_of(op, products) if op.kind == "gemm" else op.form
        computed = share * products.seconds(op.m, op.n, op.k, op.batch, form=form)
        if form.startswith("vocabulary"):
            return computed
        weights = products.streamed * op.batch * op.n * op.k
        first = computed / math.ceil(op.m / STREAMED_ROWS)
        return computed - first + max(first, weights / rates.reading) + moved - weights / rates.memory
    if op.kind == "attention":
        flops = op.flops + op.repeated_flops
        # A causal mask lets the kernel skip half of the scores of its own tokens.
        flops *= min(0.5 if op.causal else 1.0, op.window / op.n if op.window else 1.0)
        special = op.function or ("attention_token" if op.m <= 1 else "")
        measured = rates.kernel(special, op.n, op.k) if special else None
        measured = measured or rates.kernel(f"attention{backward}", op.n, op.k)
        if measured:
            # A fused kernel's operands were in the cache when it was measured, and mostly are in a step.
            return flops / measured
        rate = rates.products.rate(op.m, op.n, op.k) * rates.attention_share
        return max(flops / rate, moved)
    if op.kind in ("norm", "softmax", "activation", "dropout", "torch_dropout", "quantize"):
        names: tuple[str, ...] = (op.kind,)
        if op.kind == "activation":  # as what is nearest to it of all that was measured
            names = op.function, op.function.removeprefix(FUSED_FORM), "gelu"
        measured_rates = (rates.kernel(f"{name}{backward}", op.row or USUAL_ROW) for name in names)
        element = next(filter(None, measured_rates), None)
        return moved + op.elements / element if element else moved
    return moved
