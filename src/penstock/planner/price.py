"""Cost of one operator on one device, or of one collective: operator × Machine × Numerics → seconds.

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

A collective takes the latency of its steps plus bytes over bandwidth, on rings and trees, within and between nodes.
Thakur, Rabenseifner and Gropp (IJHPCA 2005) give the ring's terms, Sanders, Speck and Träff (Parallel Computing 2009)
the double tree's. Devices are numbered as launchers number them: tensor parallel ranks are neighbours, then context,
then data, then pipeline. A group with members in several nodes shares the nodes' adapters with the groups that run at
the same time, so its ring gets one share of them for each member in a node.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from penstock.config.fused import FUSED_FORM
from penstock.config.machine import ProductForm
from penstock.kernels.choices import padded_entries
from penstock.planner.operators import BIASED, MATRIX, Op
from penstock.planner.rates import VECTOR, VOCABULARY, Products, Rates

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
        return max(op.flops / rates.attention[0], (op.read + op.written) / rates.memory)
    # Under context parallelism a device has a part of the queries, some early and some late.
    queries = op.n if op.causal else op.m
    scores = op.batch * op.m * keys_computed(queries, op.n, causal=op.causal, window=op.window)
    flops = (4.0 if op.forward else 10.0) * scores * op.k
    forward, backward = rates.biased_attention if op.function == BIASED else rates.attention
    rate = forward if op.forward else backward
    return (
        flops / rate
        + scores / rates.exponentials
        + MOVED[op.forward] * op.elements * rates.compute / rates.memory
    )


def form_of(products: Products, form: ProductForm, m: float, n: float, k: float) -> ProductForm:
    """The form by which a CPU's product (m, k) @ (k, n) of a linear layer is priced; `form` is the pass."""
    outputs: dict[ProductForm, tuple[float, ProductForm]] = {
        "forward": (n, "vocabulary"), "input": (k, "vocabulary_input"), "weight": (max(m, n), "vocabulary_weight"),
    }  # fmt: skip
    width, special = outputs[form]
    if width >= VOCABULARY and special in products.shares:
        return special
    return "ragged" if form == "forward" and n % VECTOR else form


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
        form = form_of(products, op.form, op.m, op.n, op.k) if op.kind == "gemm" else op.form
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


class DeviceGroup(NamedTuple):
    """Devices that communicate: `size` of them, `inside` in each node, over `bandwidth` bytes per second."""

    size: int
    inside: int
    bandwidth: float
    """Bus bandwidth: of one member in its ring."""
    step: float
    """Mean latency of one step of the ring."""
    hop: float
    """Latency of one level of a tree."""
    tree: float
    """Latency of a tree up and down, and of the ring inside each node."""
    outward: float
    """Bytes per second out of a node, of all its devices together."""
    rates: Rates


@lru_cache(maxsize=1 << 14)
def group_of(rates: Rates, size: int, stride: int) -> DeviceGroup:
    """The group of `size` devices that are `stride` apart."""
    per_node = rates.machine.devices_per_node
    link_step, node_step = rates.constants.link_step_seconds, rates.constants.node_step_seconds
    inside = min(size, max(1, per_node // stride))
    levels = 4 * (size - 1).bit_length()
    if inside >= size:
        rates = (rates.pairs or rates) if size == 2 else rates
        tree = levels * link_step
        return DeviceGroup(size, inside, rates.link, link_step, link_step, tree, rates.node, rates)
    nodes = -(-size // inside)
    # Members are `stride` apart, so that those in neighbouring nodes come first.
    node_stride = max(1, stride // per_node)
    above = rates.machine.leaf_nodes and nodes * node_stride > rates.machine.leaf_nodes
    node = rates.node * (rates.machine.spine_share if above else 1.0)
    bandwidth = min(rates.link, node * inside / per_node)
    step = (nodes * node_step + (size - nodes) * link_step) / size
    tree = levels * node_step + inside * step
    return DeviceGroup(size, inside, bandwidth, step, node_step, tree, node, rates)


def gather_seconds(group: DeviceGroup, moved: float, calls: float = 1.0, *, scatters: bool = False) -> float:
    """Seconds of an all-gather to, or a reduce-scatter of, `moved` bytes: each member ends (or starts) with all of
    them.

    It uses a ring, whose steps add up: nccl has no tree for these before 2.23, and later only for one device per node.
    """
    n = group.size
    if n == 1 or moved <= 0:
        return 0.0
    called = calls * group.rates.call_seconds
    bandwidth = group.bandwidth * (group.rates.scattering if scatters else group.rates.gathering)
    return (n - 1) / n * moved / bandwidth + (n - 1) * group.step + _ramp(group, moved) / 2 + called


def reduce_seconds(group: DeviceGroup, moved: float, calls: float = 1.0) -> float:
    """Seconds of an all-reduce of `moved` bytes, by a ring or a double tree, whichever is faster."""
    n = group.size
    if n == 1 or moved <= 0:
        return 0.0
    called = calls * group.rates.call_seconds
    steps = min(2 * (n - 1) * group.step, group.tree)
    return 2 * (n - 1) / n * moved / group.bandwidth + steps + _ramp(group, moved) + called


def exchange_seconds(group: DeviceGroup, moved: float, once: int = 0, reach: float = 1.0) -> float:
    """Seconds of an all-to-all in which each member sends `moved` bytes in total, including the part that it keeps.

    Within a node they go over the links, between nodes through each member's own share of the adapters, both at the
    same time. With `once`, each token goes to `once` destinations, drawn evenly from the share `reach` of the members,
    and `moved` counts all of them: a token enters each node once, and is forwarded to each of the node's members once,
    as in DeepEP's kernels for training (its README). The same multiprocessors do both, so both slow down.
    """
    n, per_node = group.size, group.rates.machine.devices_per_node
    if n == 1 or moved <= 0:
        return 0.0
    nodes = n / group.inside
    inside, across = moved * (group.inside - 1) / n, moved * (n - group.inside) / n
    if once:
        inside = moved * (n - 1) / n * distinct_places(n * reach, once) / once
        across *= distinct_places(nodes * reach, once) / once
    seconds = inside / group.rates.link
    if nodes > 1:
        outside = across / (group.outward / per_node)
        seconds = math.hypot(seconds, outside) if once else max(seconds, outside)
    return seconds + group.hop + _ramp(group, moved) / 2 + group.rates.call_seconds


def collective_seconds(op: Op, rates: Rates, size: int, stride: int) -> float:
    """Seconds of a collective over `size` devices that are `stride` apart, overlapped or not."""
    group = group_of(rates, size, stride)
    if op.kind == "allreduce":
        return reduce_seconds(group, op.read)
    if op.kind == "exchange":
        routing = rates.constants.routing_seconds * op.elements
        return routing + exchange_seconds(group, op.read, int(op.k), reach=op.m)
    return gather_seconds(group, op.read, scatters=op.kind == "scatter")


def distinct_places(places: float, draws: int) -> float:
    """Expected number of distinct places among `draws` random draws from `places`; at least one."""
    places = max(1.0, places)
    return places * (1.0 - (1.0 - 1.0 / places) ** draws)


def send_seconds(rates: Rates, stride: int, moved: float) -> float:
    """Seconds to send `moved` bytes to the device that is `stride` away, while all devices of a node send."""
    constants, per_node = rates.constants, rates.machine.devices_per_node
    across = stride >= per_node
    bandwidth = min(rates.link, rates.node / per_node) if across else rates.sending
    latency = constants.node_step_seconds if across else constants.link_step_seconds
    return moved / bandwidth + latency + (rates.pairs or rates).call_seconds


def exposed_seconds(rates: Rates, transfer: float, computing: float) -> float:
    """Seconds that a transfer adds to the computation that it overlaps: the excess over the computation's time, but at
    least its duration times the share of the multiprocessors that it occupies."""
    return max(transfer - computing, rates.collective_share * transfer)


def _ramp(group: DeviceGroup, moved: float) -> float:
    constants = group.rates.constants
    return constants.ramp_seconds * float(min(1.0, moved / constants.ramp_bytes) ** 0.5)
