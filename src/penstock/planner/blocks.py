"""Operators of one Transformer block, from top to bottom.

Shapes: B samples, T = rows of tokens on this device, R = rows that remain where sequence parallelism splits them, D
width, A features of the device's query heads, K features of its KV heads, M hidden width on this device.
"""

from __future__ import annotations

from penstock.config.activations import ACTIVATIONS, KERNELS
from penstock.config.layer import ExpertMixture
from penstock.config.stack import Stack
from penstock.planner.attention import attend
from penstock.planner.listing import Lister
from penstock.planner.operators import BlockKind, Op
from penstock.planner.price import distinct_places

_NUMBER = 8
"""Bytes of the index of an expert or of a visit."""
_REGROUP_LAUNCHES = 11
"""Operators that sort received tokens by expert, which no compiler fuses: three sums of exchanged counts, two copies of
them to the host, and six that make, sort and apply the order."""


def list_block(to: Lister, block: BlockKind) -> None:
    """One block, attention before the MLP. Norms cost the same before the branches and after the sums."""
    t, stack, layer = to.terms, block.stack, block.layer
    whole, d = t.samples * block.share * block.samples * block.tokens / t.cp, stack.width
    rows = whole if block.causal else whole * t.real
    stream_rows = rows / t.spread

    if layer.routed:
        _take_samples(to, block, stream_rows * d)
    if block.modulated:
        modulation(to, "modulation", stack, 6, share=block.share)
    fuses = t.fuses_as("residual_norm", f"{layer.norm.kind}_norm")
    inside = layer.placement == "branch"
    plain = not (block.modulated or layer.parallel or layer.norm.zero_centred or inside)
    fuses = fuses and layer.normed and plain
    before = not fuses or layer.placement != "after"
    if layer.normed and before and not inside:
        to.norm("norm1", stream_rows, d, layer.norm, modulated=block.modulated)
    seen, queries = t.cached + block.tokens, whole
    if not block.causal and t.unpads(stack, block.tokens):
        # Average number of keys that a token sees, if lengths are spread evenly around their mean.
        queries, seen = rows, round(block.tokens * (t.real + min(t.real, 1 - t.real) ** 2 / (3 * t.real)))
    before_split(to, rows, d)
    with to.inside("attention"):
        attend(to, block, queries, seen, causal=block.causal and not t.cached, computed=rows)
    _after_split(to, rows, d)
    _branch(to, "branch1", block, stream_rows, normed=fuses)
    if block.cross:
        if not (fuses or inside):
            to.norm("cross_norm", stream_rows, d, layer.norm)
        memory = round(block.cross * t.real) if t.unpads(stack, block.cross) else block.cross
        before_split(to, rows, d)
        with to.inside("cross"):
            attend(to, block, rows, memory, cross=True, computed=rows)
        _after_split(to, rows, d)
        _branch(to, "cross_branch", block, stream_rows, normed=fuses)
    if not (layer.parallel or fuses or inside):
        to.norm("norm2", stream_rows, d, layer.norm, modulated=block.modulated)
    if layer.mixture:
        _feed_experts(to, block, rows)
    else:
        before_split(to, rows, d)
        with to.inside("perceptron"):
            _mlp(to, "mlp", block, rows, max(1, layer.perceptron.width // t.tp), again=layer.parallel)
        _after_split(to, rows, d)
    _branch(to, "branch2", block, stream_rows, normed=fuses and layer.placement == "after")
    if layer.routed:
        e, experts = t.stream, stack.experts
        copied = (experts + 1) * e
        to.move("samples.put", stream_rows * d, (copied, copied), (copied, copied), kind="copy", launches=2)


def _take_samples(to: Lister, block: BlockKind, size: float) -> None:
    """Copies of an expert's samples: `size` elements of tokens, and the other inputs that blocks read. Their gradients
    are added into the gradients of all samples."""
    t, d = to.terms, block.stack.width
    e, experts = t.stream, block.stack.experts
    back = (1 + 3 * experts) * e, (1 + 2 * experts) * e
    to.move("samples.take", size, (e, e), back, kind="copy", launches=3)
    if block.modulated:
        # The activation of the condition already keeps its input.
        condition = t.samples * block.share * d
        to.move("samples.condition", condition, (e, e), back, kind="copy", kept=condition * e, group="norms")
    if block.cross:
        c, memory = t.product, t.samples * block.share * block.cross / t.cp * block.cross_width
        kept = 0.0 if e == 4 and c == 2 and not t.fused else memory * e  # else a cast of it is kept
        to.move("samples.memory", memory, (e, e), back, kind="copy", kept=kept, group="inputs")


def modulation(to: Lister, name: str, stack: Stack, parts: int, *, share: float = 1.0) -> None:
    """The linear layer that turns the condition of each sample into `parts` vectors, for a share of the samples; each
    such layer computes the activation again."""
    samples, d = to.terms.samples * share, stack.width
    to.activate(f"{name}.activation", samples * d, "silu", (to.terms.stream, to.terms.stream))
    to.gemm(name, samples, parts * d, d, bias=True, narrow=False, group="norms")


def before_split(to: Lister, rows: float, width: int, *, hides: bool = True) -> None:
    """Communication of tensor parallelism before a sharded product: gathering the rows that sequence parallelism has
    split, and in the backward pass the sum of the inputs' gradients (Korthikanti et al. 2022, section 4.2.2)."""
    t = to.terms
    if t.tp == 1:
        return
    moved = rows * width * t.product
    if not t.sp:
        to.behind(Op("sum", "allreduce", False, read=moved, axis="tensor", hides=hides))
        return
    scatter = Op("scatter", "scatter", False, read=moved, axis="tensor", hides=hides)
    gather = Op("gather", "gather", read=moved, axis="tensor")
    # The rows are gathered again for the gradients of weights.
    again = gather._replace(forward=False, hides=True)
    copy = turning_copies(to, moved, forward=False)
    to.add(gather, *[again, *copy] * hides, *copy, scatter)
    for ahead in turning_copies(to, moved):
        to.add(ahead)


def turning_copies(to: Lister, moved: float, *, forward: bool = True) -> tuple[Op, ...]:
    """The copy beside a gathering or scattering of `moved` bytes. Devices send contiguous memory, which some tokens of
    each of several samples are not. On GPUs predictions assume tokens in the first dimension, as in published runs, and
    so no copy."""
    copied = to.terms.host and to.terms.copies and to.terms.samples > 1
    return (Op("turn", "copy", forward, read=moved, written=moved),) * copied


def _after_split(to: Lister, rows: float, width: int) -> None:
    """Communication after the second sharded product: the sum of the partial results."""
    t = to.terms
    moved = rows * width * t.product
    if t.spread > 1:
        scatter = Op("scatter", "scatter", read=moved, axis="tensor")
        for copy in turning_copies(to, moved):
            to.add(copy, copy._replace(forward=False))
        to.add(scatter, scatter._replace(name="gather", kind="gather", forward=False))
    elif t.tp > 1:
        to.add(Op("sum", "allreduce", read=moved, axis="tensor"))


def _mlp(
    to: Lister, name: str, block: BlockKind, rows: float, hidden: int, *, batch: int = 1, again: bool = False
) -> None:
    """Up, activation and down; for a mixture, `batch` experts of `rows` each. `again`: another product keeps the same
    input already."""
    t, stack, layer, c = to.terms, block.stack, block.layer, to.terms.product
    d, mlp, gated = stack.width, layer.perceptron.activation, layer.perceptron.gated
    wide, size = (1 + gated) * hidden, batch * rows * hidden
    packed = (hidden,) * (1 + gated)
    fuses = mlp in KERNELS and t.fuses_as("bias_activation", mlp)
    merged = fuses and batch == 1 and not layer.mixture and t.tp == 1
    to.gemm(
        f"{name}.up", rows, wide, d, batch=batch, bias=layer.bias, kept=0.0 if again else None, pieces=packed,
        sums_bias=not merged,
    )  # fmt: skip
    activation = f"{name}.activation"
    if ACTIVATIONS[mlp].limit is not None and not t.fused:
        # The clamped values of both halves are kept, too.
        to.move(
            f"{name}.clamp", size, (3 * c, 3 * c), (5 * c + 4, 2 * c + 4), kept=2 * size * c, group="mlp", launches=3
        )  # fmt: skip
    if gated and (t.fused or merged):
        kept = 2 * size * c
        to.activate(activation, size, mlp, (2 * c, c), (3 * c, 2 * c), kept=kept, group="mlp", fused=merged)
    else:
        stays = ACTIVATIONS[mlp].keeps_output and not stack.hidden_dropout and t.kept == c
        kept = 0.0 if stays else (1 + gated) * size * c
        to.activate(activation, size, mlp, (c, c), (2 * c, c), kept=kept, group="mlp", fused=merged)
        if gated:
            # Both gradients, and the copies that place them side by side.
            to.move(
                f"{name}.gate", size, (2 * c, c), (4 * c, 2 * c), kept=size * c, group="mlp", launches_back=3
            )
    if stack.hidden_dropout:
        to.dropout(f"{name}.dropout", size, c)
    to.gemm(f"{name}.down", rows, d, hidden, batch=batch, bias=layer.bias, group="mlp")


def _feed_experts(to: Lister, block: BlockKind, rows: float) -> None:
    """A mixture of experts with its shared experts, which every token visits. Tensor parallelism splits each expert
    like a perceptron. In training with expert parallelism, experts are whole and each device routes some tokens."""
    t, d = to.terms, block.stack.width
    if not _routes_parts(to):
        before_split(to, rows, d)
        _mixture(to, block, rows)
        _share_experts(to, block, rows)
        _after_split(to, rows, d)
        return
    gathers = t.tp > 1 and not t.sp
    if gathers:
        to.behind(Op("gather", "gather", False, read=rows * d * t.stream, axis="tensor"))
    _mixture(to, block, rows / t.tp)
    if gathers:
        to.add(Op("gather", "gather", read=rows * d * t.product, axis="tensor"))
    if block.stack.shared_experts:
        before_split(to, rows, d)
        _share_experts(to, block, rows)
        _after_split(to, rows, d)


def _routes_parts(to: Lister) -> bool:
    """Whether each device routes its own tokens, to experts that are not split."""
    return to.terms.ep > 1 and not to.terms.serving


def _share_experts(to: Lister, block: BlockKind, rows: float) -> None:
    """The perceptron that every token visits."""
    t, shared = to.terms, block.stack.shared_experts
    if shared:
        hidden = max(1, block.layer.perceptron.width // t.tp) * shared
        with to.inside("perceptron"):
            _mlp(to, "shared", block, rows, hidden, again=t.product == 4.0)
            if not t.fused:
                to.move("shared.sum", rows * block.stack.width, (2 * t.product, t.product))


def _mixture(to: Lister, block: BlockKind, rows: float) -> None:
    """A router, tokens sent to their experts, the experts, and their results sent back (Lepikhin et al., ICLR
    2021)."""
    t, layer, c = to.terms, block.layer, to.terms.product
    assert layer.mixture is not None
    mixture, d = layer.mixture, block.stack.width
    k = mixture.experts_per_token
    if mixture.learns_routes:
        _route(to, mixture, rows, d, again=layer.parallel)
    visits = rows * k * min(1.0, 1.0 if mixture.capacity is None else mixture.capacity)
    sent, hidden = visits * d * c, mixture.expert.width
    met, brought = mixture.experts, float(t.ep)
    if not _routes_parts(to):
        # All devices of a tensor parallel group have the same tokens.
        brought, sent, hidden = 1.0, sent / t.tp, -(-hidden * t.ep // t.tp)
    met = min(met, int(visits)) if t.serving else met
    # All wait for the busiest device, which also sends back the most.
    once = k if t.software.sends_once and t.ep > 1 else 0
    merged = t.fused or bool(once)
    # A token's experts are in a few groups, which neighbouring devices hold.
    reach = mixture.groups_per_token / mixture.router_groups
    exchange = Op(
        "exchange", "exchange", m=reach, k=once, read=sent * t.uneven, axis="expert",
        hides=t.software.hides_exchange, beside=bool(mixture.shared_experts) and _routes_parts(to),
    )  # fmt: skip
    # Destinations of tokens are read once, before they are sent: all later exchanges of the block use the same routes.
    leaving = exchange._replace(elements=rows * t.ep if once else 0.0)
    each, batch = max(1.0, visits * brought / met * t.uneven), max(1, -(-met // t.ep))
    numbers = visits * _NUMBER * (1 + layer.bias) + mixture.experts * 4.0
    moved, arrived = visits * t.uneven * d, c * distinct_places(t.ep * reach, once) / k if once else c
    with to.inside("experts"):
        if not once:
            to.move(  # gradients are cleared, put in place, and those of a token's experts summed
                "experts.sort", visits * d, (c, c), kind="copy", kept=numbers, group="masks",
                launches_back=1 if t.fused else 3,
            )  # fmt: skip
        if t.ep > 1:
            if not once:
                to.add(exchange._replace(name="exchange.counts", read=_NUMBER * met, beside=False))
            to.add(leaving, exchange._replace(forward=False))
            to.move(
                "experts.regroup", moved, (arrived, c), (c, arrived), kind="copy", kept=numbers * bool(once),
                group="masks", launches=1 if once else _REGROUP_LAUNCHES, launches_back=1 if merged else 2,
            )  # fmt: skip
        _mlp(to, "experts", block, each, max(1, hidden), batch=batch)
        if t.ep > 1:
            to.move(
                "experts.ungroup", moved, (c, arrived), (arrived, c), kind="copy", launches=1 if merged else 2,
                launches_back=1,
            )  # fmt: skip
            back = exchange._replace(beside=False)
            to.add(back, back._replace(forward=False))
        _merge(to, rows * k, visits, d, k, once=bool(once), learns=mixture.learns_routes)


def _merge(to: Lister, chosen: float, visits: float, d: int, k: int, *, once: bool, learns: bool) -> None:
    """The results of visits, weighted and added up for each token."""
    t, c = to.terms, to.terms.product
    kept = chosen * (d + (c != 4.0)) * c if learns else 0.0
    if once:  # a device adds up its results for a token before it sends them
        to.move("experts.merge", chosen / k * d, (c, c), kind="copy", kept=kept, group="mlp")
    elif t.fused:
        to.move("experts.merge", visits * d, (c, c / k), (c / k + c, c), kind="copy", kept=kept, group="mlp")
    else:
        to.move("experts.place", visits * d, (c, c), kind="copy", launches=2, launches_back=1)
        to.move(
            "experts.merge", visits * d, (2 * c, c + c / k), (3 * c, 2 * c), launches=2, launches_back=3, kind="copy",
            kept=kept, group="mlp",
        )  # fmt: skip


def _choice_launches(mixture: ExpertMixture, *, fused: bool, serving: bool) -> tuple[int, int]:
    """Operators by which a router chooses, forward and backward: scores, top-k, their weights, the order of visits, and
    in training loads and the balance loss. `fused` means that torch's compiler has merged them."""
    balances = bool(mixture.balances or mixture.z_loss) and not serving
    if fused:
        return 6 if serving else 9, 1 + balances
    sigmoid, more = mixture.router == "sigmoid", 10 * balances + 3 * (balances and mixture.z_loss > 0)
    weighs = sigmoid and mixture.router_normalised
    return (11 if serving else 19) + more + 4 * sigmoid + 3 * weighs, 4 + balances + 7 * weighs


def _route(to: Lister, mixture: ExpertMixture, rows: float, width: int, *, again: bool) -> None:
    """The router, which computes in fp32 at every precision, and the choice of experts. `again`: another product keeps
    the same input already, if that is in fp32."""
    experts, k = mixture.experts, mixture.experts_per_token
    halved = 4.0 * experts * width if to.terms.stream != 4.0 else 0.0
    with to.inside("router"), to.exact():
        again = again and to.terms.stream == 4.0 and not mixture.router_jitter
        kept = halved + rows * width * 4.0 * (not again) * (2 if mixture.router_jitter else 1)
        to.gemm("router", rows, experts, width, bias=mixture.router_bias, kept=kept)
        # The indices of the chosen experts, what a softmax or sigmoid keeps, and the gradient of the balance loss.
        few = mixture.router == "sigmoid" or mixture.router_normalised
        share = k if few else experts
        share += experts * bool(mixture.balances or mixture.z_loss)
        share += 2 * k * bool(mixture.expert_dropout)
        kept = rows * (4.0 * share + _NUMBER * k)
        ahead, back = _choice_launches(mixture, fused=to.terms.fused, serving=to.terms.serving)
        to.move(
            "router.choose", rows * experts, (4, 4), kept=kept, group="masks", launches=ahead, launches_back=back,
        )  # fmt: skip


def _branch(to: Lister, name: str, block: BlockKind, rows: float, *, normed: bool = False) -> None:
    """Operators between a branch's output and the residual stream, and the addition. If `normed`, one operator computes
    the sum and its norm, and also the dropout if the branch has no other operator."""
    t, stack, layer = to.terms, block.stack, block.layer
    e, c, d, size = t.stream, t.product, stack.width, rows * stack.width
    if block.modulated and name != "cross_branch":
        to.modulate(f"{name}.gate", size)
    both = layer.norms_branches
    branch = e if both or layer.layer_scale is not None else c
    inside = normed and not both and layer.layer_scale is None and not stack.drop_path
    if both:
        to.norm(f"{name}.after", rows, d, layer.norm, cast=False)
    if stack.dropout and not inside:
        to.dropout(f"{name}.dropout", size, c, merged=t.fused)
    if layer.layer_scale is not None:
        to.move(
            f"{name}.scale", size, (c, e), (c + 2 * e, 2 * e), kept=size * c, group="masks", weights=d, tensors=1
        )  # fmt: skip
    if stack.drop_path:
        to.move(f"{name}.drop_path", size, (c, c), kept=t.samples * branch, group="masks")
    if normed:
        dropout = inside and stack.dropout > 0
        to.add_norm(
            f"{name}.norm", rows, d, layer.norm, branch=branch, dropout=dropout,
            both=layer.placement != "after",
        )  # fmt: skip
        return
    to.move(f"{name}.residual", size, (e + branch, e), (2 * e, e))
