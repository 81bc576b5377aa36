"""Seconds of one block, forward, backward and computed again, on one device: the roofline of every operator.

Traffic is counted per kernel as it is launched: eager PyTorch runs each pointwise operator on its own, compiled or
hand-fused code runs neighbours as one. Shapes: T tokens of a micro-batch on this device, D width, A features of all
query heads, K of all key heads, M hidden width; t the tensor parallel degree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.config.plan import Plan
from penstock.planner.attention import fused_seconds, keys_computed
from penstock.planner.collectives import (
    exchange_seconds,
    exposed_seconds,
    gather_seconds,
    group_of,
    reduce_seconds,
)
from penstock.planner.gemm import gemm_seconds
from penstock.planner.host_time import kernel_rate
from penstock.planner.rates import FUSED, Rates
from penstock.planner.shapes import Block

BACKWARD_ATTENTION = 2.5
"""FLOPs of fused attention's backward pass over its forward pass: it forms the scores again (Dao 2023, section 4.1)."""
KINDS = ("gemm", "attention", "pointwise", "tensor", "expert", "context")


@dataclass(slots=True)
class Parts:
    """Seconds by kind: matrix products, attention, other operators, and exposed collectives."""

    gemm: float = 0.0
    attention: float = 0.0
    pointwise: float = 0.0
    tensor: float = 0.0
    expert: float = 0.0
    context: float = 0.0

    @property
    def total(self) -> float:
        """All kinds together."""
        return self.gemm + self.attention + self.pointwise + self.tensor + self.expert + self.context

    def plus(self, other: Parts, times: float = 1.0) -> None:
        """Add `other`, so many times."""
        self.gemm += times * other.gemm
        self.attention += times * other.attention
        self.pointwise += times * other.pointwise
        self.tensor += times * other.tensor
        self.expert += times * other.expert
        self.context += times * other.context


@dataclass(slots=True)
class BlockTime:
    """Seconds of one block for one micro-batch. `again` is what the backward pass computes a second time."""

    forward: Parts
    backward: Parts
    again: Parts
    launches: int
    """Kernels, forward and backward."""
    weights: float = 0.0
    """Of `backward`, the gradients of weights: what a split backward pass can put off."""

    @property
    def total(self) -> float:
        """All three."""
        return self.forward.total + self.backward.total + self.again.total


def block_time(block: Block, rates: Rates, plan: Plan) -> BlockTime:
    """Seconds of `block` for `plan.micro_batch` samples on one device."""
    tokens = max(1, plan.micro_batch * block.tokens // plan.cp)
    forward, backward, again = Parts(), Parts(), Parts()
    hideable, last = _linears(block, rates, plan, tokens, forward, backward)
    scores = _attention(block, rates, plan, tokens, forward, backward)
    _pointwise(block, rates, plan, tokens, forward, backward)
    if plan.tp > 1:
        _tensor(block, rates, plan, tokens, hideable, forward, backward)
    if block.experts and plan.ep > 1:
        _experts(block, rates, plan, tokens, forward, backward)
    if plan.recompute in ("full", "early"):
        again.plus(forward)
        if plan.recompute == "early":
            again.gemm -= last
            again.tensor -= forward.tensor / block.norms if plan.tp > 1 else 0.0
    elif plan.recompute == "selective":
        again.attention = scores
    elif plan.recompute == "operators":
        again.pointwise = forward.pointwise
        again.gemm = _every_other(block, rates, plan, tokens)
    if plan.recompute_every > 1:
        again = _scaled(again, 1 / plan.recompute_every)
    return BlockTime(forward, backward, again, 60 if plan.compile == "none" else 40, hideable)


def _scaled(parts: Parts, times: float) -> Parts:
    result = Parts()
    result.plus(parts, times)
    return result


def _linears(
    block: Block, rates: Rates, plan: Plan, tokens: int, forward: Parts, backward: Parts
) -> tuple[float, float]:
    """Matrix products with weights; gives the seconds of the weights' gradients, which collectives can hide behind,
    and of the block's last product."""
    t, d = plan.tp, block.width
    a, kv = block.heads * block.features // t, max(1, block.kv_heads // t) * block.features
    products = [(tokens, a + 2 * kv, d, 1), (tokens, d, a, 1)]
    if block.cross:
        other = max(1, plan.micro_batch * block.cross // plan.cp)
        products += [(tokens, a, d, 1), (other, 2 * kv, d, 1), (tokens, d, a, 1)]
    hidden = max(1, block.hidden // t)
    if block.experts:
        local = max(1, block.experts // plan.ep)
        routed = max(1, int(tokens * block.routed * block.capacity * plan.ep / block.experts))
        products += _mlp(routed, hidden, d, block.gated, local)
        products.append((tokens, block.experts, d, 1))
        if block.shared:
            products += _mlp(tokens, hidden * block.shared, d, block.gated, 1)
    else:
        products += _mlp(tokens, hidden, d, block.gated, 1)
    weights = last = 0.0
    for m, n, k, batch in products:
        last = gemm_seconds(rates, m, n, k, batch)
        forward.gemm += last
        backward.gemm += gemm_seconds(rates, m, k, n, batch)
        weights += gemm_seconds(rates, k, n, m, batch, over_rows=True)
    backward.gemm += weights
    return weights, last


def _every_other(block: Block, rates: Rates, plan: Plan, tokens: int) -> float:
    """The products that torch's per-operator policy computes again: each second one of a block."""
    d, a = block.width, block.heads * block.features // plan.tp
    seconds = gemm_seconds(rates, tokens, d, a)
    if block.gated:
        seconds += gemm_seconds(rates, tokens, max(1, block.hidden // plan.tp), d)
    return seconds


def _mlp(tokens: int, hidden: int, width: int, gated: bool, batch: int) -> list[tuple[int, int, int, int]]:
    up = (tokens, hidden * 2 if gated else hidden, width, batch)
    return [up, (tokens, width, hidden, batch)]


def _attention(block: Block, rates: Rates, plan: Plan, tokens: int, forward: Parts, backward: Parts) -> float:
    """Scores and values; gives the seconds of what selective recomputation repeats."""
    t = plan.tp
    heads = max(1, block.heads // t)
    seen = block.tokens + block.cross
    if plan.attention in FUSED and not (plan.attention == "auto" and rates.cpu):
        once, back = _fused(block, rates, tokens, heads)
        forward.attention += once
        backward.attention += back
        if plan.cp > 1:
            _context(block, rates, plan, tokens, once, back, forward, backward)
        return 0.0  # no scores are kept, so none are made again
    batch = max(1, plan.micro_batch * heads)
    rows = max(1, tokens // plan.micro_batch)
    scores = gemm_seconds(rates, rows, seen, block.features, batch, linear=False)
    values = gemm_seconds(rates, rows, block.features, seen, batch, linear=False)
    keys = gemm_seconds(rates, seen, block.features, rows, batch, linear=False)
    elements = float(tokens) * seen * heads
    fused = plan.compile != "none"
    c = rates.compute
    # Softmax with scale and mask, if there is one, in one kernel or each in its own; dropout with a mask of one byte.
    passes = elements * c * (2 if fused else 6 if block.causal else 4)
    drop = elements * (2 * c + 1) if block.dropout else 0.0
    back = elements * c * (3 if fused else 5) + drop
    # A bias of distances is spread over the scores' place, and read by the product that adds to it.
    bias = 2 * elements * c if block.linear_bias else 0.0
    once = (passes + drop + bias) / rates.memory
    # Gradients of probabilities, values, queries and keys.
    behind = scores + 2 * keys + values + back / rates.memory
    forward.attention += scores + values + once
    backward.attention += behind
    if plan.cp > 1:
        _context(block, rates, plan, tokens, scores + values + once, behind, forward, backward)
    return scores + values + once


def _fused(block: Block, rates: Rates, tokens: int, heads: int) -> tuple[float, float]:
    """Seconds of fused attention's forward and of its backward pass."""
    size = float(tokens) * heads * block.features * rates.compute
    if not rates.cpu:
        keys = keys_computed(block.tokens, block.tokens, causal=block.causal)
        keys += keys_computed(block.tokens, block.cross) if block.cross else 0.0
        once = fused_seconds(rates, tokens * keys * heads, block.features, size, backward=False)
        back = fused_seconds(rates, tokens * keys * heads, block.features, size, backward=True)
        return once + rates.kernel_seconds, back + rates.kernel_seconds
    # A causal mask lets the kernel skip half of the scores of its own tokens.
    keys = block.tokens * (0.5 if block.causal else 1.0) + block.cross
    flops = 4.0 * tokens * keys * heads * block.features
    measured = [
        kernel_rate(rates.kernels, name, block.tokens, block.features)
        for name in ("attention", "attention_backward")
    ]
    ahead, behind = measured[0] or rates.attention, measured[1] or rates.attention_backward
    once = max(flops / ahead, 4 * size / rates.memory) + rates.kernel_seconds
    back = max(BACKWARD_ATTENTION * flops / behind, 10 * size / rates.memory) + rates.kernel_seconds
    return once, back


def _context(
    block: Block,
    rates: Rates,
    plan: Plan,
    tokens: int,
    once: float,
    back: float,
    forward: Parts,
    backward: Parts,
) -> None:
    """Ring attention (Liu et al. 2023): keys and values go round while the part at hand is computed."""
    group = group_of(rates, plan.cp, plan.tp)
    kv = 2.0 * tokens * max(1, block.kv_heads // plan.tp) * block.features * rates.compute
    turn = gather_seconds(group, kv * plan.cp)
    forward.context += exposed_seconds(rates, turn, once)
    backward.context += exposed_seconds(rates, 2 * turn, back)


def _pointwise(block: Block, rates: Rates, plan: Plan, tokens: int, forward: Parts, backward: Parts) -> None:
    """Norms, residual additions, dropout, activation, rotation of positions, and copies."""
    e, c, t = rates.stream, rates.compute, plan.tp
    fused = plan.compile != "none"
    d = block.width / (t if plan.sp else 1)
    a = (block.heads + 2 * block.kv_heads) * block.features / t
    # Norms: read the stream, write a product's input; RMSNorm is eight operators in eager code.
    eager_rms = block.rms and not fused
    once = block.norms * d * ((e + c) if not eager_rms else 9 * e)
    back = block.norms * d * ((2 * e + c) if not eager_rms else 14 * e)
    # Each branch: dropout and addition to the stream; the gradient of the addition costs an addition backward.
    branch = d * 3 * e + (d * ((e + 1) if fused else (2 * e + 1)) if block.dropout else 0)
    once += block.norms * branch
    back += block.norms * d * (3 * e + ((2 * c + 1) if block.dropout else 0))
    hidden = block.hidden / t * ((block.routed * block.capacity + block.shared) if block.experts else 1)
    if block.gated:
        once += hidden * c * (3 if fused else 5)
        back += hidden * c * (5 if fused else 9)
    else:
        once += hidden * c * 2
        back += hidden * c * 3
    if block.rotary:
        turned = (block.heads + block.kv_heads) * block.features / t
        once += turned * (2 * c if fused else 16)
        back += turned * (2 * c if fused else 16)
    if block.bias:
        back += (a + 2 * d + hidden) * c
    # Packed queries, keys and values: the gradients of the three are copied together.
    back += 2 * a * c
    if plan.attention not in FUSED:
        once += 2 * block.heads * block.features / t * c
    if block.experts:
        # Tokens are sorted to experts and back.
        once += 4 * d * block.routed * c
        back += 4 * d * block.routed * c
    if plan.precision == "O1":
        once += 2 * 6 * block.width
    if rates.linear == 1:
        # Inputs and gradients are scaled and cast: an amax and a cast each.
        cast = (3 * block.width + 2 * hidden) * (2 * c + 1)
        once += cast
        back += cast
    if rates.kernels:
        computed = {"norm": block.norms * d, "gelu": hidden}
        for name, elements in computed.items():
            forward.pointwise += tokens * elements / (kernel_rate(rates.kernels, name, 0, 0) or math.inf)
            backward.pointwise += (
                tokens * elements / (kernel_rate(rates.kernels, f"{name}_backward", 0, 0) or math.inf)
            )
    kernels = 8 if fused else 14
    forward.pointwise += tokens * once / rates.memory + kernels * rates.kernel_seconds
    backward.pointwise += tokens * back / rates.memory + kernels * rates.kernel_seconds


def _tensor(
    block: Block, rates: Rates, plan: Plan, tokens: int, weights: float, forward: Parts, backward: Parts
) -> None:
    """Tensor parallel collectives: two all-reduces a pass, or as many all-gathers and reduce-scatters (Shoeybi et al.
    2019, section 3; Korthikanti et al. 2022, section 4.2.2).

    Backward, the reduction of inputs' gradients, and with sequence parallelism the second gathering of inputs, can
    hide behind the gradients of weights; the gathering of outputs' gradients cannot.
    """
    group = group_of(rates, plan.tp, 1)
    moved = float(tokens) * block.width * rates.compute
    times = block.norms
    if plan.sp:
        one = gather_seconds(group, moved)
        once, shown, hidden = 2 * times * one, times * one, 2 * times * one
    else:
        one = reduce_seconds(group, moved)
        once, shown, hidden = times * one, 0.0, times * one
    if plan.tp_overlap == "none":
        shown, hidden = shown + hidden, 0.0
    elif plan.tp_overlap == "all":
        # Products are cut into pieces, one per member, and the first piece's transfer stays visible.
        whole = once
        once, shown, hidden = once / plan.tp, shown / plan.tp, hidden + shown * (1 - 1 / plan.tp)
        once += rates.taken * (whole - once)
    forward.tensor += once
    backward.tensor += shown + exposed_seconds(rates, hidden, weights)


def _experts(block: Block, rates: Rates, plan: Plan, tokens: int, forward: Parts, backward: Parts) -> None:
    """Tokens go to their experts and come back: two all-to-alls a pass (Lepikhin et al., ICLR 2021)."""
    group = group_of(rates, plan.ep, plan.tp * plan.cp)
    moved = (
        float(tokens)
        * block.routed
        * block.capacity
        * block.width
        * rates.compute
        / (plan.tp if plan.sp else 1)
    )
    one = exchange_seconds(group, moved)
    forward.expert += 2 * one
    backward.expert += 2 * one
