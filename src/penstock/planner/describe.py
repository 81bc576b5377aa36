"""Operators of one micro-batch on one device, forward and backward, from a model and a Plan.

A block's operators are listed once for each kind of block and layout, and counted as often as the block repeats. The
operators before the blocks, and those between the blocks and the loss, are listed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import penstock.config.graph as graphs
from penstock.config.formats import BYTES, FORMATS
from penstock.config.fused import FUSED, FusedName
from penstock.config.gains import variants_that_pay
from penstock.config.machine import Machine
from penstock.config.model import ModelConfig
from penstock.config.numerics import numerics_of
from penstock.config.plan import Plan
from penstock.config.stack import Stack
from penstock.planner.blocks import before_split, list_block, modulation, turning_copies
from penstock.planner.listing import Lister
from penstock.planner.loads import EVEN
from penstock.planner.loss import list_words
from penstock.planner.operators import PENSTOCK, Op, Software, Workload, blocks_of, counted_tokens
from penstock.planner.terms import OpTerms, Storing


def describe(
    model: ModelConfig, plan: Plan, device: Machine | str = "cuda", software: Software = PENSTOCK, *,
    avx512: bool = True, kind: str = "", real: float = 1.0, words: float = 1.0, uneven: Mapping[int, float] = EVEN,
    storing: Storing | None = None,
) -> Workload:  # fmt: skip
    """The operators of one micro-batch of `model` on one device of a layout, all stages of a pipeline together.

    `device` is a Machine, or else `cuda` or `cpu`, with a Machine's `avx512` and `kind` as arguments. For a batch of
    text, `real` is the share of an encoder's tokens that are not padding, `words` the share of tokens that have a
    target in the loss. `uneven` is the busiest device's load over the mean, by expert parallel degree: see
    `penstock.planner.loads.unevenness`. `storing` says how weights are stored for inference; None is a training step.
    """
    if isinstance(device, Machine):
        avx512, kind, device = device.avx512, device.kind, device.device
    numerics = numerics_of(plan)
    product = BYTES[numerics.compute]
    terms = OpTerms(
        plan.micro_batch, plan.tp, plan.sp, plan.cp, plan.ep, BYTES[numerics.residual], product,
        numerics.gathered == "fp32" and product == 2, numerics.products,
        numerics.gathered_linears == "fp8",
        plan.attention, numerics.compute, avx512, plan.compile != "none", plan.compiles_whole,
        plan.token_order == "batch_first", device == "cpu", chunked=plan.loss == "chunked", words=words,
        real=real if plan.padding == "remove" else 1.0,
        gathers_keys=plan.cp_exchange == "gather", uneven=uneven.get(plan.ep, 1.0), loops=plan.experts == "loop",
        fuses=fused_operators(plan, device, kind), software=software, norms=BYTES[numerics.norms],
    )  # fmt: skip
    return workload_of(model, terms if storing is None else storing.terms(terms))


def fused_operators(plan: Plan, device: str, kind: str) -> frozenset[str]:
    """The operators of `plan.fuse` that a device has kernels for. Under `auto` each is named with a variant, such as
    `bias_activation swiglu`, and only those measured to be faster on this kind of machine are returned."""
    able: list[FusedName] = [name for name, row in FUSED.items() if device in row.devices]
    if "auto" not in plan.fuse:
        return frozenset(name for name in able if name in plan.fuse)
    dtype = FORMATS[numerics_of(plan).compute].dtype
    return frozenset(
        f"{name} {variant}"
        for name in able
        for variant in variants_that_pay(name, kind, dtype, compiled=plan.compile != "none")
    )


@lru_cache(maxsize=4096)
def workload_of(model: ModelConfig, terms: OpTerms) -> Workload:
    """Workload as from `describe`, from the terms alone."""
    alone = OpTerms(software=terms.software)
    to = Lister(terms)
    tied = _entrance(to, model.graph)
    parts = [to.part("entrance")]
    blocks = blocks_of(model)
    for block in blocks:
        to = Lister(terms)
        list_block(to, block)
        rows = terms.samples * block.samples * block.tokens / terms.cp / terms.spread
        parts.append(to.part("block", block, entering=rows * block.stack.width * terms.stream))
    to = Lister(terms)
    _exit(to, model.graph)
    parts.append(to.part("exit"))
    return Workload(
        parts=tuple(parts), samples=terms.samples, tokens=counted_tokens(model), tied=tied,
        units=sum(block.count for block in blocks), vision=model.graph.vision,
        whole=None if terms == alone or terms.serving else workload_of(model, alone),
        software=terms.software, even=None if terms.uneven == 1.0 else workload_of(model, terms._replace(uneven=1.0)),
    )  # fmt: skip


def _touches_rows(terms: OpTerms, table: str, tied: list[str]) -> bool:
    """Whether the embedding's gradient is added row by row to the table's gradient from the logits: see
    `AddTouchedRows`."""
    return terms.whole and terms.host and table in tied


def totals(model: ModelConfig) -> Workload:
    """The workload of one sample on one device: parameters and FLOPs of the whole model in any layout."""
    return workload_of(model, OpTerms())


def _entrance(to: Lister, graph: graphs.Graph) -> int:
    """List the operators before the blocks; return the number of their parameters that the exit uses too."""
    # Entries of the vocabulary and heads are split over tensor parallel devices, the other tables are not.
    tables = {
        one.table: -(-one.vocabulary * graph.width_of(one) // to.terms.tp)
        for one in graph.inputs_of(graphs.TokenInput)
    }
    tied = [head.tied for head in graph.heads_of(graphs.WordHead) if head.tied]
    _shared_tables(to, graph, tables, tied)
    if graph.condition is not None:
        _condition(to, graph, graph.condition)
    listed: set[str] = set()
    for run in graph.runs:
        one = graph.input_of(run) if graph.enters(run) else None
        if isinstance(one, graphs.PatchInput):
            _stem(to, one, run)
        else:
            _embedding(to, graph, run, one, tables, tied, listed)
    return sum(tables[table] for table in dict.fromkeys(tied))


def _shared_tables(to: Lister, graph: graphs.Graph, tables: dict[str, int], tied: list[str]) -> None:
    """The sums of gradients of tables that several inputs or heads use."""
    every = [one for run in graph.runs if graph.enters(run) for one in graph.inputs_through(run)]
    used = [*(one.table for one in every if isinstance(one, graphs.TokenInput)), *tied]
    for table, entries in tables.items():
        if shared := used.count(table) - 1:
            added = 0 if _touches_rows(to.terms, table, tied) else shared * entries * to.terms.stream
            to.behind(
                Op("embedding.shared", "pointwise", False, n=entries, read=2 * added, written=added, launches=shared,
                   module="shared_table")
            )  # fmt: skip


def _condition(to: Lister, graph: graphs.Graph, condition: graphs.Condition) -> None:
    """The vector of each sample, made from its time and class, that modulates norms."""
    t, e = to.terms, to.terms.stream
    d = next((run.stack.width for run in graph.runs if run.modulated), graph.width)
    with to.inside("condition"):
        to.gemm("condition.up", t.samples, d, condition.frequencies, bias=True, first=True, narrow=False)
        to.activate("condition.activation", t.samples * d, "silu", (t.product, t.product))
        to.gemm("condition.down", t.samples, d, d, bias=True, narrow=False)
    if condition.classes:
        size, moved = (condition.classes + 1) * d, t.samples * d * e
        classes = Op("condition.classes", "copy", n=d, read=moved, written=moved, weights=size, tensors=1)
        to.table(classes, 3 * moved, moved, cleared=size * e)


def _embedding(
    to: Lister, graph: graphs.Graph, run: graphs.Run, one: graphs.TokenInput | None, tables: dict[str, int],
    tied: list[str], listed: set[str],
) -> None:  # fmt: skip
    """The embedding of the tokens of the input `one`, with positions, segments and norm, or the output of another run.
    Tables that are in `listed` are not listed again."""
    t, e, stack, d = to.terms, to.terms.stream, run.stack, run.stack.width
    rows, before = t.samples * graph.samples(run) * graph.length(run) / t.cp, graph.width_before(run)
    if before != d:
        to.gemm("bridge", rows, d, before, bias=stack.bias, narrow=False)
    weights = [-(-stack.relative_buckets * stack.heads // t.tp)] if stack.positions == "relative" else []
    entries, moved = (0, 0.0) if one is None else (tables[one.table], rows * d * e)
    for each in () if one is None else graph.inputs_through(run):
        assert isinstance(each, graphs.TokenInput)
        weights += [tables[each.table]] if each.table not in listed else []
        weights += [each.segments * d] if each.segments else []
        listed.add(each.table)
    weights += [run.rows * d] if one is not None and stack.positions == "learned" else []
    if weights or one is not None:
        to.table(
            Op("embedding", "copy", n=d, read=moved, written=moved, weights=sum(weights), tensors=len(weights)),
            # The gradient is as large as the table, and cleared before rows are added to it.
            3 * moved, moved,
            cleared=0.0 if one is not None and _touches_rows(t, one.table, tied) else entries * e, tables=weights,
        )  # fmt: skip
    if t.tp > 1 and one is not None:
        to.add(Op("sum", "allreduce", read=rows * d * e, axis="tensor"))
    _shared_out(to, rows * d)
    if run.embedding_norm:
        to.norm("embedding_norm", rows, d, stack.norm_kind, cast=not stack.norm_first)
    if stack.dropout and one is not None:
        to.dropout("embedding.dropout", rows * d, e)


def _shared_out(to: Lister, numbers: float, *, last: bool = False) -> None:
    """Sequence parallelism's split of tokens before the first block, whose backward pass gathers all gradients on all
    devices; or the gathering after the `last` block, before operators that every device computes on all tokens."""
    if to.terms.spread > 1:
        moved = numbers * to.terms.stream
        for op in (
            Op("gather", "gather", last, read=moved, axis="tensor"),
            *turning_copies(to, moved, forward=last),
        ):
            to.add(op) if last else to.behind(op)


def _stem(to: Lister, images: graphs.PatchInput, run: graphs.Run) -> None:
    """Patches, or a few convolutions, projected to tokens, and their positions."""
    t, stack, d = to.terms, run.stack, run.stack.width
    c, e = t.product, t.stream
    rows = t.samples * images.patches
    pixels = t.samples * images.channels * images.image_size**2
    features = images.channels * images.patch_size**2
    if images.stem == "patchify":
        to.move("stem.patches", pixels, (4, 4), (0, 0), kind="copy")
    else:
        _convolutions(to, images, d, pixels)
        features = images.stem_widths(d)[-1]
        to.move("stem.tokens", rows * features, (c, c), kind="copy")
    to.gemm(
        "stem.proj", rows, d, features, bias=images.bias, first=images.stem == "patchify", group="stem", narrow=False,
        kept=rows * features * c,
    )  # fmt: skip
    if stack.positions == "learned":
        to.table(
            Op("positions", "pointwise", n=d, read=rows * d * e, written=rows * d * e, weights=run.rows * d, tensors=1),
            rows * d * e, images.patches * d * e,
        )  # fmt: skip
    tokens = t.samples * images.length * d
    _shared_out(to, tokens)
    if learned := images.learned_tokens:
        tensors = images.class_token + images.distil_token + bool(images.registers)
        to.move("class_token", tokens, (e, e), kind="copy", weights=learned * d, tensors=tensors)
    if run.embedding_norm:
        rows = t.samples * images.length
        to.norm("embedding_norm", rows, d, stack.norm_kind, cast=not stack.norm_first)
    if stack.dropout:
        to.dropout("dropout", tokens, e, "stem")


def _convolutions(to: Lister, images: graphs.PatchInput, width: int, pixels: int) -> None:
    """3×3 convolutions of stride 2, each with its norm and its activation."""
    t, c = to.terms, to.terms.product
    side, channels = images.image_size, images.channels
    for i, wider in enumerate(images.stem_widths(width)):
        side //= 2
        area = t.samples * side * side
        to.gemm(
            f"stem.conv{i}", area, wider, 9 * channels, first=i == 0, kind="conv", source=4 * area * channels,
            kept=2.0 * pixels if t.casts and i == 0 else 0.0, group="stem", narrow=False,
        )  # fmt: skip
        wide = area * wider
        to.move(
            f"stem.norm{i}", wide, (c, c), (2 * c, c), kind="norm", kept=wide * c + 2 * wider * t.statistic,
            group="stem", weights=2 * wider, tensors=2,
        )  # fmt: skip
        to.move(f"stem.relu{i}", wide, (c, c), (2 * c, c), kept=wide * c, group="stem")
        channels = wider


def _exit(to: Lister, graph: graphs.Graph) -> None:
    """The last norms, the outputs and, for language models, the loss, whose logits are large."""
    t = to.terms
    for run in graph.runs:
        each = t.samples * graph.samples(run) * graph.length(run) / t.cp
        if run.stack.norm_first and run.last_norm:
            to.norm("norm", each / t.spread, run.stack.width, run.stack.norm_kind)
        if any(run.name in other.memories for other in graph.runs):
            # All blocks of the decoder read the memory, and each device's blocks add a part to its gradient.
            before_split(to, each, run.stack.width, hides=False)
    tied: set[str] = set()
    for head in graph.heads:
        run = graph.run(head.run)
        rows = t.samples * graph.samples(run) * graph.length(run) / t.cp
        if isinstance(head, graphs.WordHead):
            list_words(to, head, run, rows * t.words * head.target_share, again=head.tied in tied)
            tied |= {head.tied} - {""}
            continue
        _shared_out(to, rows * run.stack.width, last=True)
        if isinstance(head, graphs.PixelHead):
            _pixels(to, graph, run)
        elif isinstance(head, graphs.VectorHead):
            _vector(to, head, run, graph.length(run))
        elif not isinstance(head, graphs.FeatureHead):
            (_classifier if head.before in ("norm", "none") else _pooled)(to, head, run, graph.length(run))


def _pixels(to: Lister, graph: graphs.Graph, run: graphs.Run) -> None:
    """The last norm, a patch of each token, and the squared error of the images."""
    one, t, d = graph.input_of(run), to.terms, run.stack.width
    assert isinstance(one, graphs.PatchInput)
    rows, pixels = t.samples * one.patches, one.channels * one.patch_size**2
    if graph.condition is not None:
        modulation(to, "modulation", run.stack, 2)
    to.norm("norm", rows, run.stack.width, run.stack.norm_kind, modulated=graph.condition is not None)
    with to.inside("head"):
        to.gemm("head", rows, pixels, d, bias=True, group="output", narrow=False)
        to.move("head.images", rows * pixels, (t.product, 4), kind="copy")
    with to.inside("loss"):
        to.move("loss", rows * pixels, (12, 8), (12, 8), kept=rows * pixels * 4.0, group="output", launches=3)


def _pooled(to: Lister, head: graphs.ClassHead, run: graphs.Run, tokens: int) -> None:
    """The dense layer over a sample's vector, and the classes."""
    samples, stack, c = to.terms.samples, run.stack, to.terms.product
    d, tanh = stack.width, head.before == "tanh"
    to.gemm("pooler", samples, d, d, bias=tanh or stack.bias, narrow=False, group="output")
    size = samples * d
    to.move(
        "pooler.activation", size, (c, c), kind="activation", group="output", kept=size * c, function="tanh" * tanh
    )  # fmt: skip
    if not tanh:
        to.norm("pooler.norm", samples, d, stack.norm_kind)
    if head.dropout:
        to.dropout("pooler.dropout", size, c, "output")
    with to.inside("head"):
        to.gemm("head", samples, head.classes, d, bias=True, group="output", narrow=False)


def _vector(to: Lister, head: graphs.VectorHead, run: graphs.Run, tokens: int) -> None:
    """A sample's vector: its first token or the mean, projected and normalised to length 1. The contrastive loss is
    small in comparison and not listed."""
    t, e, d = to.terms, to.terms.stream, run.stack.width
    read = tokens if head.pool == "mean" else 1
    to.move("pool", t.samples * d, (read * e, e), (e, tokens * e), kind="reduce")
    with to.inside("head"):
        to.gemm("head", t.samples, head.features, d, bias=False, group="output", narrow=False)
    learned = 0 if head.scale is None else 1 + (head.offset is not None)
    to.move(
        "unit", t.samples * head.features, (4, 4), (8, 4), kind="norm", weights=learned,
        tensors=int(learned > 0),
    )  # fmt: skip


def _classifier(to: Lister, head: graphs.ClassHead, run: graphs.Run, tokens: int) -> None:
    """The last norm and the head, applied to the first token or to the mean over tokens."""
    t, e, d = to.terms, to.terms.stream, run.stack.width
    read = 1 + head.distilled
    if head.pool == "first":
        # The first token is a view; its gradient is zero everywhere else.
        to.move("class_row", t.samples * d, (0, 0), (read * e, tokens * e), kind="copy", launches=0)
    elif not head.norm_first:
        to.move("pool", t.samples * d, (tokens * e, e), (e, tokens * e), kind="reduce")
    rows = t.samples * (tokens if head.norm_first else read)
    if head.before == "norm":
        to.norm("norm", rows, d, run.stack.norm_kind, cast=not head.norm_first)
    if head.pool == "attention":
        with to.inside("head"):
            _attention_pool(to, run.stack, tokens)
    elif head.norm_first:
        to.move("pool", t.samples * d, (tokens * e, e), (e, tokens * e), kind="reduce")
    with to.inside("head"):
        for name in ("head", "distil_head")[:read]:
            to.gemm(name, t.samples, head.classes, head.vectors * d, bias=True, group="output", narrow=False)
        if head.distilled:
            c = t.product
            to.move("head.mean", t.samples * head.classes, (2 * c, c), (c, 2 * c), group="output")


def _attention_pool(to: Lister, stack: Stack, tokens: int) -> None:
    """Attention of a learned query to all tokens of a sample, and a perceptron, both not split over devices."""
    t, layer, d, c = to.terms, stack.plain_layer, stack.width, to.terms.product
    a, hidden = layer.heads * layer.head_width, stack.mlp_width
    more: dict[str, Any] = {"group": "output", "narrow": False}
    to.move("pool.query", t.samples * d, (0, 0), weights=d, tensors=1, launches=0)
    to.gemm("pool.q", t.samples, a, d, bias=layer.qkv_bias, **more)
    to.gemm("pool.kv", t.samples * tokens, 2 * a, d, bias=layer.qkv_bias, **more)
    kept = (2 * tokens + 1) * t.samples * a * c
    core = Op(
        "pool.attention", "attention", batch=t.samples * layer.heads, m=1, n=tokens, k=layer.head_width, read=kept,
        written=t.samples * a * c, elements=t.samples * a, kept=kept, group="output",
    )  # fmt: skip
    to.add(core, core._replace(forward=False, written=kept))
    to.gemm("pool.out", t.samples, d, a, bias=layer.bias, **more)
    to.norm("pool.norm", t.samples, d, layer.norm)
    gated = layer.perceptron.gated
    to.gemm("pool.up", t.samples, (1 + gated) * hidden, d, bias=layer.bias, **more)
    to.activate(
        "pool.activation", t.samples * hidden, stack.mlp, (c, c), (2 * c, c),
        kept=(1 + gated) * c * t.samples * hidden,
    )  # fmt: skip
    to.gemm("pool.down", t.samples, d, hidden, bias=layer.bias, **more)
