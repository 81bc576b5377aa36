"""What one micro-batch makes one device do: every operator of forward and backward, from a model and a Plan.

A block's operators are listed once for each kind of block and layout, and counted as often as the block repeats.
Eager code runs each pointwise operator on its own; compiled or hand-fused code (`plan.compile`) runs neighbours as one.

Shapes: B samples, T = rows of tokens on this device, R = rows of what sequence parallelism splits, D width, A features
of the device's query heads, K those of its key heads, M hidden width on this device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from penstock.config.model import EncoderConfig, ModelConfig, Seq2SeqConfig, ViTConfig
from penstock.config.numerics import BYTES, numerics_of
from penstock.config.plan import Plan
from penstock.planner.operators import Op
from penstock.planner.shapes import Block, blocks_of, counted_tokens, output_of

RELATIVE_BUCKETS = 32
"""Distances that relative position biases tell apart (Raffel et al., JMLR 2020, section 2.1)."""
AUTO_PLAIN_TOKENS = 512
"""Tokens up to which `attention=auto` means plain attention on a CPU in bf16."""
ROTARY_EAGER_BYTES = 16
"""Traffic of a rotation written as single operators, per rotated number: it computes in fp32."""
RMS_KERNELS = 8
"""Kernels of an RMSNorm written as single operators."""

Form = Literal["plain", "fused", "math"]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Operators of one part of a model: its entrance, one of `count` equal blocks, or its exit."""

    name: str
    count: int
    forward: tuple[Op, ...]
    backward: tuple[Op, ...]
    entering: float = 0.0
    """Bytes of what comes in: what recomputation of the whole part keeps."""
    parameters: int = 0
    """Learned numbers on one device before data parallel sharding, experts not counted."""
    experts: int = 0
    """Those of experts."""
    tensors: int = 0
    block: Block | None = None

    @classmethod
    def of(
        cls,
        name: str,
        forward: Iterable[Op],
        backward: Iterable[Op],
        *,
        count: int = 1,
        entering: float = 0.0,
        block: Block | None = None,
    ) -> Part:
        """A part with the sums over its operators."""
        forward = tuple(forward)
        experts = sum(op.weights for op in forward if op.name.startswith("experts."))
        return cls(
            name, count, forward, tuple(backward), entering, sum(op.weights for op in forward) - experts, experts,
            sum(op.tensors for op in forward), block,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Workload:
    """What one micro-batch makes one device do. Equal to itself alone, so that what follows may be cached by it."""

    parts: tuple[Part, ...]
    samples: int
    tokens: int = 0
    """Of one sample, as they are counted; 0 where it is not known."""
    tied: int = 0
    """Learned numbers of the entrance that the exit uses too."""
    kept_bytes: float | None = None
    """Kept for the backward pass, where it was counted, as of a traced model."""
    working_bytes: float = 0.0
    """The same of what the backward pass needs besides at its most."""
    blocks: tuple[Part, ...] = ()
    """The parts that repeat."""
    depth: int = 0
    """Blocks of all kinds; 0 where they are not told apart."""
    units: int = 1
    """Pieces that weights are gathered in where they are shared out: the blocks."""
    parameters: int = 0
    """Learned numbers on this device, with all stages and before data parallel sharding."""
    tensors: int = 0
    """Tensors that they are in."""
    vision: bool = False
    """Whether a sample is an image."""

    @classmethod
    def of(cls, parts: Iterable[Part], samples: int, *, units: int | None = None, **rest: Any) -> Workload:
        """The sums of `parts` beside them."""
        parts = tuple(parts)
        blocks = tuple(part for part in parts if part.block is not None)
        depth = sum(part.count for part in blocks)
        return cls(
            parts=parts, samples=samples, blocks=blocks, depth=depth, units=units or depth or 1,
            parameters=sum(part.count * (part.parameters + part.experts) for part in parts),
            tensors=sum(part.count * part.tensors for part in parts), **rest,
        )  # fmt: skip

    def operators(self) -> Iterator[tuple[int, Op]]:
        """All operators of forward and backward, with how often each runs."""
        for part in self.parts:
            for op in part.forward:
                yield part.count, op
        for part in reversed(self.parts):
            for op in part.backward:
                yield part.count, op


class Terms(NamedTuple):
    """What a list of operators depends on besides the model."""

    samples: int = 1
    tp: int = 1
    sp: bool = False
    cp: int = 1
    ep: int = 1
    stream: float = 4.0
    """Bytes of a number of the residual stream."""
    product: float = 4.0
    """Of a number that goes into a matrix product."""
    gradient: float = 4.0
    """Of a weight's gradient as the backward pass leaves it."""
    casts: bool = False
    """Whether autocast makes a copy of each weight in the type of products."""
    fp8: bool = False
    form: Form = "fused"
    fused: bool = False
    """Whether neighbouring pointwise operators are one kernel."""
    whole: bool = False
    """Whether the loss is compiled too."""
    copies: bool = False
    """Whether plain attention copies queries, keys and values."""
    host: bool = False
    """Whether the device is a CPU."""
    serving: bool = False
    """Whether text is generated: tensor parallel devices share experts out too, `ep` of them whole ones."""
    cached: int = 0
    """Tokens of each sequence whose keys and values lie in the cache."""
    weight: float = 0.0
    """Bytes of a weight as it is read, where these are not those of products."""
    cache: float = 0.0
    """The same of a number of the cache."""
    softmax_apart: bool = False
    """Whether the softmax of scores is computed in fp32, as single operators, even where other operators are fused."""


def attention_form(plan: Plan, tokens: int, device: str) -> Form:
    """What an attention backend does: keep the scores (`plain`, `math`) or compute them again (`fused`)."""
    backend = plan.attention
    if backend == "auto":
        half = numerics_of(plan).half
        return "plain" if device == "cpu" and half and tokens <= AUTO_PLAIN_TOKENS else "fused"
    if backend == "plain":
        return "plain"
    return "math" if backend == "math" else "fused"


def describe(model: ModelConfig, plan: Plan, device: str = "cuda") -> Workload:
    """The operators of one micro-batch of `model` on one device of a layout, all stages of a pipeline together."""
    return described(model, terms_of(model, plan, device))


def terms_of(model: ModelConfig, plan: Plan, device: str = "cuda") -> Terms:
    """What of `plan` the operators of `model` depend on."""
    numerics = numerics_of(plan)
    product = BYTES[numerics.compute]
    return Terms(
        plan.micro_batch, plan.tp, plan.sp, plan.cp, plan.ep, BYTES[numerics.residual], product,
        BYTES[numerics.gradients], numerics.gathered == "fp32" and product == 2, numerics.fp8 != "none",
        attention_form(plan, model.tokens, device), plan.compile != "none", plan.compile == "whole",
        plan.layout == "batch_first", device == "cpu",
    )  # fmt: skip


@lru_cache(maxsize=4096)
def described(model: ModelConfig, terms: Terms) -> Workload:
    """As `describe`, from the terms alone."""
    entrance = _Lister(terms)
    tied = _entrance(entrance, model)
    parts = [entrance.part("entrance")]
    for block in blocks_of(model):
        lister = _Lister(terms)
        lister.block(block)
        rows = terms.samples * block.tokens / terms.cp / (terms.tp if terms.sp else 1)
        parts.append(lister.part("block", block, entering=rows * block.width * terms.stream))
    exit_ = _Lister(terms)
    _exit(exit_, model)
    parts.append(exit_.part("exit"))
    vision = isinstance(model, ViTConfig)
    return Workload.of(parts, terms.samples, tokens=counted_tokens(model), tied=tied, vision=vision)


class Totals(NamedTuple):
    """Sums over a whole model, whatever its layout."""

    parameters: int
    forward_flops: float
    """Of one sample, attention in full."""
    model_flops: float
    """Forward and backward: the numerator of MFU."""
    active_parameters: int
    """Learned numbers that one token meets: fewer than all in a mixture of experts."""


@lru_cache(maxsize=1024)
def totals(model: ModelConfig) -> Totals:
    """Parameters and FLOPs of one sample."""
    work = described(model, Terms())
    # Room that experts make for more tokens than come is no work of the model's.
    share = {part: 1.0 / part.block.capacity if part.block else 1.0 for part in work.parts}
    forward = backward = active = 0.0
    for part in work.parts:
        for op in (*part.forward, *part.backward):
            flops = part.count * op.flops * (share[part] if op.name.startswith("experts.") else 1.0)
            if op.forward:
                forward += flops
            else:
                backward += flops
        block = part.block
        met = block.routed / block.experts if block and block.experts else 1.0
        active += part.count * (part.parameters + part.experts * met)
    return Totals(work.parameters, forward, forward + backward, round(active))


class _Lister:
    """Lists forward operators as they run, and with each the operators of its gradients as autograd runs them."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.forward: list[Op] = []
        self._gradients: list[tuple[Op, ...]] = []

    def part(self, name: str, block: Block | None = None, *, entering: float = 0.0) -> Part:
        """The part that was listed."""
        backward = [op for gradients in reversed(self._gradients) for op in gradients]
        return Part.of(
            name, self.forward, backward, count=block.count if block else 1, entering=entering, block=block
        )

    def add(self, op: Op, *gradients: Op) -> None:
        """A forward operator, and those of its gradients; the last of these lets go of what it kept."""
        self.forward.append(op)
        if gradients and op.kept:
            gradients = (*gradients[:-1], gradients[-1]._replace(kept=op.kept))
        self._gradients.append(gradients)

    # Single operators.

    def gemm(
        self,
        name: str,
        rows: float,
        n: int,
        k: int,
        *,
        batch: int = 1,
        bias: bool = False,
        first: bool = False,
        learned: int | None = None,
        tensors: int | None = None,
        kept: float | None = None,
        group: str = "inputs",
        fp8: bool | None = None,
        kind: Literal["gemm", "conv"] = "gemm",
        source: float | None = None,
    ) -> None:
        """`batch` products of rows (rows, k) with weights (k, n): and of the output's gradient with both of them.

        `first` says that nobody asks for the gradient of the rows, `source` how many numbers they are where a
        convolution reads each several times, `learned` how many weights are the model's own where not all are.
        """
        t = self.terms
        c, fp8 = t.product, t.fp8 if fp8 is None else fp8
        size = 1.0 if fp8 else c
        inputs = batch * (rows * k if source is None else source)
        outputs, weights = batch * rows * n, batch * n * k
        biases = batch * n if bias else 0
        own = weights + biases if learned is None else learned
        if kept is None:
            # Sequence parallelism keeps the device's rows and gathers the others again.
            kept = inputs * c / (t.tp if t.sp and group == "inputs" else 1)
        count = (1 + bool(biases) if tensors is None else tensors) if own else 0
        if fp8:
            self._quantize(name, inputs, weights, outputs)
        if t.casts and own:
            launches = 1 + bool(biases)
            self.add(
                Op("cast.weights", "copy", read=4.0 * own, written=2.0 * own,
                   kept=0.0 if first and kind == "gemm" else 2.0 * weights, group="cast_weights", launches=launches),
                Op("cast.gradients", "copy", False, read=2.0 * own, written=4.0 * own, launches=launches),
            )  # fmt: skip
        gradients = []
        if not first:
            gradients.append(Op(
                f"{name}.input", kind, False, batch, rows, k, n, (outputs + weights) * size, inputs * c,
                elements=inputs, fp8=fp8,
            ))  # fmt: skip
        gradients.append(Op(
            f"{name}.weight", kind, False, batch, n, k, rows, (outputs + inputs) * size, weights * c,
            elements=weights, weights=weights, fp8=fp8,
        ))  # fmt: skip
        if biases:
            gradients.append(Op(
                f"{name}.bias", "reduce", False, read=outputs * c, written=biases * c, elements=biases, weights=biases
            ))  # fmt: skip
        self.add(
            Op(name, kind, True, batch, rows, n, k, inputs * size + weights * (t.weight or size) + biases * c,
               outputs * c,
               elements=outputs, kept=kept, group=group, weights=own, tensors=count,
               fp8=fp8),
            *gradients,
        )  # fmt: skip

    def _quantize(self, name: str, inputs: float, weights: float, outputs: float) -> None:
        """What fp8 does beside each product. It reads inputs, and backward the outputs' gradients, for their largest
        number, reads them again and writes a byte for each. Single operators do so with weights in every pass, and
        backward they turn weights, inputs and gradients, whose long side must be that of the sum; fused ones cast
        weights when these are updated, and write turned copies along."""
        t = self.terms
        ahead, behind = inputs + (0.0 if t.fused else weights), outputs
        turned = 0.0 if t.fused else weights + inputs + outputs
        self.add(
            Op(f"{name}.quantize", "quantize", read=2 * t.product * ahead, written=ahead, elements=ahead),
            Op(f"{name}.quantize", "quantize", False, read=2 * t.product * behind + turned, written=behind + turned,
               elements=behind + turned, launches=1 if t.fused else 2),
        )  # fmt: skip

    def pointwise(
        self,
        name: str,
        read: float,
        written: float,
        back_read: float | None = None,
        back_written: float | None = None,
        *,
        kind: Literal["pointwise", "activation", "copy", "reduce", "softmax", "norm"] = "pointwise",
        elements: float = 0.0,
        kept: float = 0.0,
        group: str = "",
        weights: int = 0,
        tensors: int = 0,
        launches: int = 1,
    ) -> None:
        """An operator that only moves, and one that moves its gradients: as much, unless told otherwise; 0 is none."""
        back_read = read if back_read is None else back_read
        back_written = written if back_written is None else back_written
        ahead = Op(
            name, kind, read=read, written=written, elements=elements, kept=kept, group=group, weights=weights,
            tensors=tensors, launches=launches,
        )  # fmt: skip
        if not back_read and not back_written:
            self.add(ahead)
            return
        behind = Op(
            name, kind, False, read=back_read, written=back_written, elements=elements, launches=launches
        )
        if weights:
            learn = Op(f"{name}.weight", "reduce", False, launches=0, weights=weights)
            self.add(ahead, behind, learn)
        else:
            self.add(ahead, behind)

    def norm(
        self, name: str, rows: float, width: int, *, rms: bool = False, cast: bool = True, heads: int = 1
    ) -> None:
        """A norm over rows of `width` numbers, and under autocast the cast of its output to the type of products."""
        t = self.terms
        e, c, size = t.stream, t.product, rows * width
        autocast = t.stream == 4 and c == 2
        statistic = t.stream if t.host else 4.0
        kept = size * e + (1 if rms else 2) * rows * statistic
        learned, out = width * (1 if rms else 2), e if autocast else c
        if rms and not t.fused:
            self.pointwise(
                name, size * 8 * e, size * e, size * 12 * e, size * 2 * e, kind="norm", elements=size,
                kept=kept + size * (4 + c), group="norms", weights=learned, tensors=1, launches=RMS_KERNELS,
            )  # fmt: skip
        else:
            self.pointwise(
                name, size * e, size * out, size * (e + out), size * e, kind="norm", elements=size, kept=kept,
                group="norms", weights=learned, tensors=1 if rms else 2,
            )  # fmt: skip
        if autocast and cast:
            self.pointwise(f"{name}.cast", size * 4, size * 2, size * 2, size * 4, kind="copy", elements=size)

    def collective(self, ahead: Op | None, *behind: Op) -> None:
        """Collectives of a pass and of its gradients."""
        if ahead is not None:
            self.add(ahead, *behind)
        else:
            self._gradients.append(behind)

    # A block.

    def block(self, block: Block) -> None:
        """One Transformer block, attention before the MLP."""
        t = self.terms
        rows = t.samples * block.tokens / t.cp
        stream_rows = rows / (t.tp if t.sp else 1)
        self.norm("norm1", stream_rows, block.width, rms=block.rms)
        self._attend(block, rows, t.cached + block.tokens, "attention", causal=block.causal and not t.cached)
        if block.cross:
            self._branch("branch1", block, stream_rows)
            self.norm("cross_norm", stream_rows, block.width, rms=block.rms)
            self._attend(block, rows, block.cross, "attention.cross")
        if not block.parallel:
            self._branch("branch2" if block.cross else "branch1", block, stream_rows)
            self.norm("norm2", stream_rows, block.width, rms=block.rms)
        self._into(block, rows)
        if block.experts:
            self._mixture(block, rows)
        else:
            self._mlp("mlp", block, rows, max(1, block.hidden // t.tp), again=block.parallel)
        self._out_of(block, rows)
        self._branch("branch", block, stream_rows)

    def _into(self, block: Block, rows: float) -> None:
        """What tensor parallelism sends before a sharded product: the rows that sequence parallelism has split, and
        backward the sum of the inputs' gradients (Korthikanti et al. 2022, section 4.2.2)."""
        t = self.terms
        if t.tp == 1:
            return
        moved = rows * block.width * t.product
        if t.sp:
            self.collective(
                Op("gather", "gather", read=moved, axis="tensor"),
                Op("gather", "gather", False, read=moved, axis="tensor", hides=True),
                Op("scatter", "scatter", False, read=moved, axis="tensor", hides=True),
            )  # fmt: skip
        else:
            self.collective(None, Op("sum", "allreduce", False, read=moved, axis="tensor", hides=True))

    def _out_of(self, block: Block, rows: float) -> None:
        """What it sends after the second sharded product: the sum of the partial results."""
        t = self.terms
        if t.tp == 1:
            return
        moved = rows * block.width * t.product
        if t.sp:
            self.collective(
                Op("scatter", "scatter", read=moved, axis="tensor"),
                Op("gather", "gather", False, read=moved, axis="tensor"),
            )  # fmt: skip
        else:
            self.collective(Op("sum", "allreduce", read=moved, axis="tensor"))

    def _attend(self, block: Block, rows: float, seen: int, name: str, *, causal: bool = False) -> None:
        """Attention of `rows` over `seen` tokens of each sample, with its projections."""
        t, d, f = self.terms, block.width, block.features
        c, cross = t.product, name.endswith("cross")
        heads, kv_heads = max(1, block.heads // t.tp), max(1, block.kv_heads // t.tp)
        a, kv = heads * f, kv_heads * f
        self._into(block, rows)
        if cross:
            others = max(1.0, t.samples * seen / t.cp)
            self.gemm(f"{name}.q", rows, a, d, bias=block.qkv_bias, learned=(d + block.qkv_bias) * a)
            # All blocks read the same output of the other stack, which it keeps itself.
            self.gemm(f"{name}.kv", others, 2 * kv, d, bias=block.qkv_bias, kept=0.0)
        else:
            others = rows + t.samples * t.cached
            self.gemm(f"{name}.qkv", rows, a + 2 * kv, d, bias=block.qkv_bias)
        if block.rotary and not cross:
            moved = rows * (a + kv) * (c if t.fused else ROTARY_EAGER_BYTES / 2)
            self.pointwise("rotary", moved, moved, launches=1 if t.fused else 6)
        self._core(block, rows, others, seen, (heads, kv_heads), name, causal=causal)
        self.gemm(f"{name}.out", rows, d, a, bias=block.bias, group="attention")
        self._out_of(block, rows)

    def _core(
        self,
        block: Block,
        rows: float,
        others: float,
        seen: int,
        split: tuple[int, int],
        name: str,
        *,
        causal: bool,
    ) -> None:
        """Scores, softmax and values, each on its own or in one fused kernel."""
        t, f, c = self.terms, block.features, self.terms.product
        heads, kv_heads = split
        a, kv = heads * f, kv_heads * f
        queries, keys, own = rows * a, others * kv, rows * (a + 2 * kv)
        cached = 2 * keys * (t.cache or c)
        pairs, per_sample = t.samples * heads, rows / t.samples
        scores = rows * seen * heads
        statistic = t.stream if t.host else 4.0
        kept = (queries + 2 * keys) * c
        if block.qk_norm:
            normed = rows * (a + kv)
            self.pointwise(
                f"{name}.qk_norm", normed * c, normed * c, 2 * normed * c, normed * c, kind="norm", elements=normed,
                kept=own * c + 2 * rows * (heads + kv_heads) * statistic, group="attention", weights=4 * f, tensors=4,
            )  # fmt: skip
            kept = normed * c + (rows * kv * c if t.form == "plain" and t.copies else 0.0)
        if t.cp > 1:
            turn = 2.0 * others * kv * c * t.cp
            one = Op("ring", "ring", read=turn, axis="context")
            self.collective(one, one._replace(forward=False), one._replace(forward=False))
        if t.form == "fused":
            window = (
                block.window if block.window and block.window < seen and not name.endswith("cross") else 0
            )
            one = Op(
                name, "attention", True, pairs, per_sample, seen, f, queries * c + cached, queries * c, queries,
                kept + rows * heads * 4.0, "attention", causal=causal, window=window,
            )  # fmt: skip
            behind = one._replace(
                forward=False, read=(4 * queries + 2 * keys) * c, written=(queries + 2 * keys) * c
            )
            self.add(one, behind)
            self._stack(name, queries, keys)
            return
        if t.form == "math":
            # torch's own composition computes in fp32, on copies of queries and keys, scaled, and of values unless
            # these are fp32 in place.
            group = "attention"
            math_kept = (queries + keys) * 4.0
            if c != 4 or t.copies:
                math_kept += keys * 4.0
            elif not block.qk_norm:
                math_kept += own * c
            kept = math_kept
        else:
            group = "scores"
        if t.copies:
            self.pointwise(f"{name}.split", own * c, own * c, kind="copy", elements=own)
        each = 4.0 if t.form == "math" else c
        mask_bytes = (1.0 if not t.host else c) if block.score_dropout else 0.0
        score = Op(
            f"{name}.scores", "bmm", True, pairs, per_sample, seen, f, (queries + keys) * each, scores * each,
            elements=scores, kept=kept, group="attention",
        )  # fmt: skip
        moved = scores * each + (queries + keys) * each
        self.add(
            score,
            score._replace(name=f"{name}.scores.left", forward=False, n=f, k=seen, read=moved, written=queries * each,
                           elements=queries, kept=0.0, group=""),
            score._replace(name=f"{name}.scores.right", forward=False, m=seen, n=f, k=per_sample, read=moved,
                           written=keys * each, elements=keys, kept=0.0, group=""),
        )  # fmt: skip
        if block.linear_bias:
            self.pointwise(f"{name}.bias", scores * each, scores * each, 0.0, 0.0, elements=scores)
        self._softmax(block, name, scores, each, group, causal=causal)
        dropped = scores * (each + mask_bytes) if mask_bytes else 0.0
        if mask_bytes:
            self.pointwise(
                f"{name}.dropout", scores * each, dropped, dropped, scores * each, elements=scores, kept=dropped,
                group=group,
            )  # fmt: skip
        value = score._replace(
            name=f"{name}.values", n=f, k=seen, read=(scores + keys) * each, written=queries * each, elements=queries,
            kept=0.0, group="",
        )  # fmt: skip
        moved = (scores + keys + queries) * each
        self.add(
            value,
            value._replace(name=f"{name}.values.left", forward=False, n=seen, k=f, read=moved - scores * each,
                           written=scores * each, elements=scores),
            value._replace(name=f"{name}.values.right", forward=False, m=seen, n=f, k=per_sample,
                           read=moved - keys * each, written=keys * each, elements=keys),
        )  # fmt: skip
        self.pointwise(f"{name}.merge", queries * c, queries * c, kind="copy", elements=queries)
        self._stack(name, queries, keys)

    def _softmax(
        self, block: Block, name: str, scores: float, each: float, group: str, *, causal: bool
    ) -> None:
        """Softmax with its scale and its mask: in one kernel, or each in its own."""
        t, size = self.terms, scores * each
        if t.softmax_apart:
            wide = scores * 4
            self.pointwise(f"{name}.cast", size, wide, wide, size, elements=scores)
            self.pointwise(f"{name}.scale", wide, wide, elements=scores)
            self.pointwise(
                f"{name}.softmax",
                wide,
                wide,
                2 * wide,
                wide,
                kind="softmax",
                elements=scores,
                kept=wide,
                group=group,
            )
            self.pointwise(f"{name}.round", wide, size, size, wide, elements=scores, kept=size, group=group)
            return
        if not t.fused and not t.host:
            self.pointwise(f"{name}.scale", size, size, elements=scores)
            if causal:
                self.pointwise(f"{name}.mask", size, size, 0.0, 0.0, elements=scores)
        self.pointwise(
            f"{name}.softmax",
            size,
            size,
            2 * size,
            size,
            kind="softmax",
            elements=scores,
            kept=size,
            group=group,
        )

    def _stack(self, name: str, queries: float, keys: float) -> None:
        """The gradients of queries, keys and values become one of the packed projection."""
        moved = (queries + 2 * keys) * self.terms.product
        # Before the core's own gradients in the list, and so after them when it is turned round.
        position = next(i for i, op in enumerate(self.forward) if op.name in (f"{name}.qkv", f"{name}.kv"))
        stack = Op(
            f"{name}.stack", "copy", False, read=moved, written=moved, elements=moved / self.terms.product
        )
        self._gradients[position] = (stack, *self._gradients[position])

    def _mlp(
        self, name: str, block: Block, rows: float, hidden: int, *, batch: int = 1, again: bool = False
    ) -> None:
        """Up, activation and down; `batch` experts of `rows` each, where it is a mixture's. `again` says that another
        product keeps the same input already."""
        t, d = self.terms, block.width
        wide, size = 2 * hidden if block.gated else hidden, batch * rows * hidden
        c, matrices = t.product, 1 + block.gated
        self.gemm(
            f"{name}.up", rows, wide, d, batch=batch, bias=block.bias and not block.gated,
            kept=0.0 if again else None,
            learned=batch * wide * (d + block.bias), tensors=matrices * (1 + block.bias),
        )  # fmt: skip
        if block.gated and t.fused:
            self.pointwise(
                f"{name}.activation", 2 * size * c, size * c, 3 * size * c, 2 * size * c, kind="activation",
                elements=size, kept=2 * size * c, group="mlp",
            )  # fmt: skip
        elif block.gated:
            self.pointwise(
                f"{name}.activation", size * c, size * c, 2 * size * c, size * c, kind="activation", elements=size,
                kept=2 * size * c, group="mlp",
            )  # fmt: skip
            self.pointwise(
                f"{name}.gate", 2 * size * c, size * c, 4 * size * c, 2 * size * c, elements=size, kept=size * c,
                group="mlp",
            )  # fmt: skip
        else:
            self.pointwise(
                f"{name}.activation", size * c, size * c, 2 * size * c, size * c, kind="activation", elements=size,
                kept=size * c, group="mlp",
            )  # fmt: skip
        if block.hidden_dropout:
            mask = c if t.host else 1.0
            self.pointwise(
                f"{name}.dropout", size * c, size * (c + mask), size * (c + mask), size * c, elements=size,
                kept=size * mask, group="masks",
            )  # fmt: skip
        self.gemm(f"{name}.down", rows, d, hidden, batch=batch, bias=block.bias, group="mlp")

    def _mixture(self, block: Block, rows: float) -> None:
        """A router, tokens sent to their experts, the experts, and their results sent back (Lepikhin et al., ICLR
        2021)."""
        t, d, c = self.terms, block.width, self.terms.product
        self.gemm("router", rows, block.experts, d, fp8=False)
        visits = rows * block.routed * block.capacity
        moved, hidden = visits * d * c, block.hidden // t.tp
        # In training each device brings its own tokens; in generation all of a group have the same.
        met, brought, sent = block.experts, float(t.ep), moved / (t.tp if t.sp else 1)
        if t.serving:
            met, brought, sent = min(block.experts, int(visits)), 1.0, moved / t.tp
            hidden = -(-block.hidden * t.ep // t.tp)
        self.pointwise("experts.sort", moved, moved, kind="copy", elements=visits * d)
        exchange = Op("exchange", "exchange", read=sent, axis="expert")
        if t.ep > 1:
            self.collective(exchange, exchange._replace(forward=False))
        self._mlp(
            "experts", block, max(1.0, visits * brought / met), max(1, hidden), batch=max(1, -(-met // t.ep)),
        )  # fmt: skip
        if t.ep > 1:
            self.collective(exchange, exchange._replace(forward=False))
        self.pointwise("experts.merge", moved, moved, kind="copy", elements=visits * d)
        if block.shared:
            self._mlp("shared", block, rows, max(1, block.hidden // t.tp) * block.shared, again=True)

    def _branch(self, name: str, block: Block, rows: float) -> None:
        """What happens to a branch before it is added to the residual stream, and the addition."""
        t, size = self.terms, rows * block.width
        e, c = t.stream, t.product
        if block.dropout:
            mask = c if t.host else 1.0
            self.pointwise(
                f"{name}.dropout", size * c, size * (mask if t.fused else c + mask), size * (c + mask), size * c,
                elements=size,
                kept=size * mask, group="masks",
            )  # fmt: skip
        if block.layer_scale:
            self.pointwise(
                f"{name}.scale", size * c, size * e, size * (c + 2 * e), size * 2 * e, elements=size, kept=size * c,
                group="masks", weights=block.width, tensors=1,
            )  # fmt: skip
        if block.drop_path:
            factors = t.samples * (e if block.layer_scale else c)
            self.pointwise(
                f"{name}.drop_path", size * c, size * c, elements=size, kept=factors, group="masks"
            )
        branch = e if block.layer_scale else c
        self.pointwise(
            f"{name}.residual", size * (e + branch), size * e, 2 * size * e, size * e, elements=size
        )


def _entrance(lister: _Lister, model: ModelConfig) -> int:
    """What comes before the blocks; gives how many of its learned numbers the exit uses too."""
    if isinstance(model, ViTConfig):
        _stem(lister, model)
        return 0
    t = lister.terms
    (block, *_) = blocks_of(model)
    rows, d = t.samples * counted_tokens(model) / t.cp, block.width
    table = model.vocabulary * d
    learned = table + d * (model.token_types if isinstance(model, EncoderConfig) else 0)
    tensors = 1 + (isinstance(model, EncoderConfig) and model.token_types > 0)
    for stack in (model.encoder, model.decoder) if isinstance(model, Seq2SeqConfig) else (model,):
        if stack.positions == "learned":
            learned += (model.max_positions or model.sequence) * d
        if stack.positions == "relative":
            learned += RELATIVE_BUCKETS * stack.heads
        tensors += stack.positions in ("learned", "relative")
    own = -(-learned // t.tp)
    lister.pointwise(
        "embedding", rows * d * t.stream, rows * d * t.stream, 3 * rows * d * t.stream, rows * d * t.stream,
        kind="copy", elements=rows * d, weights=own, tensors=tensors,
    )  # fmt: skip
    if t.tp > 1:
        kind: Literal["scatter", "allreduce"] = "scatter" if t.sp else "allreduce"
        lister.collective(Op("sum", kind, read=rows * d * t.product, axis="tensor"))
    if model.embedding_norm:
        lister.norm("embedding_norm", rows, d, rms=block.rms, cast=False)
    return -(-table // t.tp) if model.tied else 0


def _stem(lister: _Lister, model: ViTConfig) -> None:
    t = lister.terms
    c, e, d = t.product, t.stream, model.width
    rows = t.samples * model.patches
    pixels = t.samples * model.channels * model.image_size**2
    tp = t.tp
    if model.stem == "patchify":
        features = model.channels * model.patch_size**2
        lister.pointwise("stem.patches", pixels * 4, pixels * 4, 0.0, 0.0, kind="copy", elements=pixels)
    else:
        side, channels = model.image_size, model.channels
        for i, width in enumerate(model.stem_widths):
            side //= 2
            area = t.samples * side * side
            image = t.samples * model.channels * model.image_size**2 if i == 0 else area * channels
            kept = image * (2.0 if t.casts else 0.0) if i == 0 else 0.0
            lister.gemm(
                f"stem.conv{i}", area, width, 9 * channels, first=i == 0, kind="conv", source=4 * area * channels,
                kept=kept, group="stem", fp8=False,
            )  # fmt: skip
            wide = area * width
            lister.pointwise(
                f"stem.norm{i}", wide * c, wide * c, 2 * wide * c, wide * c, kind="norm", elements=wide,
                kept=wide * c + 2 * width * (e if t.host else 4.0), group="stem", weights=2 * width, tensors=2,
            )  # fmt: skip
            lister.pointwise(
                f"stem.relu{i}",
                wide * c,
                wide * c,
                2 * wide * c,
                wide * c,
                elements=wide,
                kept=wide * c,
                group="stem",
            )
            channels = width
        features = channels
        lister.pointwise(
            "stem.tokens", rows * features * c, rows * features * c, kind="copy", elements=rows * features
        )
    lister.gemm(
        "stem.proj", rows, d, features, bias=True, first=model.stem == "patchify", group="stem", fp8=False,
        learned=-(-(features * d + d) // tp), kept=rows * features * c,
    )  # fmt: skip
    size = rows * d
    lister.pointwise(
        "positions", size * e, size * e, size * e, model.patches * d * e, elements=size,
        weights=-(-model.tokens * d // tp), tensors=1,
    )  # fmt: skip
    tokens = t.samples * model.tokens * d
    if model.classifier == "token":
        lister.pointwise(
            "class_token",
            tokens * e,
            tokens * e,
            kind="copy",
            elements=tokens,
            weights=-(-d // tp),
            tensors=1,
        )
    if model.dropout:
        mask = e if t.host else 1.0
        lister.pointwise(
            "dropout", tokens * e, tokens * (e + mask), tokens * (e + mask), tokens * e, elements=tokens,
            kept=tokens * mask, group="stem",
        )  # fmt: skip


def _exit(lister: _Lister, model: ModelConfig) -> None:
    """The last norm, the output and, of language models, their loss, whose logits are what is large."""
    t = lister.terms
    if isinstance(model, ViTConfig):
        _classifier(lister, model)
        return
    c = t.product
    *_, block = blocks_of(model)
    tokens, words = output_of(model)
    rows, d = t.samples * tokens / t.cp, block.width
    if isinstance(model, EncoderConfig):
        # The head of masked language models: a dense layer, a norm, and a bias of the output.
        lister.gemm(
            "head.dense", rows, d, d, bias=True, learned=-(-(d * d + d) // t.tp), fp8=False, group="output"
        )
        lister.pointwise(
            "head.activation", rows * d * c, rows * d * c, 2 * rows * d * c, rows * d * c, kind="activation",
            elements=rows * d, kept=rows * d * c, group="output",
        )  # fmt: skip
        lister.norm("norm", rows, d, rms=block.rms)
    else:
        for _ in range(2 if isinstance(model, Seq2SeqConfig) else 1):
            lister.norm("norm", rows, d, rms=block.rms)
    columns = -(-words // t.tp)
    moved = rows * d * c
    if t.tp > 1:
        if t.sp:
            lister.collective(
                Op("gather", "gather", read=moved, axis="tensor"),
                Op("scatter", "scatter", False, read=moved, axis="tensor"),
            )  # fmt: skip
        else:
            lister.collective(None, Op("sum", "allreduce", False, read=moved, axis="tensor"))
    biases = columns if isinstance(model, EncoderConfig) else 0
    lister.gemm(
        "head", rows, columns, d, fp8=False, group="output", learned=(0 if model.tied else columns * d) + biases,
        tensors=(not model.tied) + bool(biases),
    )  # fmt: skip
    _loss(lister, rows, columns)


def _loss(lister: _Lister, rows: float, columns: int) -> None:
    """Cross-entropy: a cast to fp32, log-softmax, its gradient and the cast back, each an operator of its own unless
    the whole model is compiled."""
    t, size, c = lister.terms, rows * columns, lister.terms.product
    if t.whole:
        lister.pointwise(
            "loss", 2 * size * c, 0.0, size * c, size * c + size * (2 if c == 2 else 0), kind="softmax", elements=size,
            kept=size * c, group="output",
        )  # fmt: skip
    else:
        if c < 4:
            # The training loop still holds the output in half precision when its gradient is made.
            lister.pointwise(
                "loss.cast", size * c, size * 4, size * 4, size * c, kind="copy", elements=size, kept=size * c,
                group="output",
            )  # fmt: skip
        # Over tensor parallel devices the exponentials are kept besides the logarithms.
        lister.pointwise(
            "loss.softmax", size * 4, size * 4, 2 * size * 4, size * 4, kind="softmax", elements=size,
            kept=size * (8 if t.tp > 1 else 4), group="output",
        )  # fmt: skip
        lister.pointwise("loss.pick", rows * 4, rows * 4, rows * 4, size * 4, kind="copy", elements=rows)
    if t.tp > 1:
        each = Op("loss.sum", "allreduce", read=rows * 4.0, axis="tensor")
        for _ in range(3):
            lister.collective(each)


def _classifier(lister: _Lister, model: ViTConfig) -> None:
    t = lister.terms
    e, d = t.stream, model.width
    tokens = t.samples * model.tokens * d
    pool_first = model.classifier == "pooled" and model.pool_norm == "after"
    norm_all = model.classifier == "pooled" and model.pool_norm == "before"
    rows = t.samples * (model.tokens if norm_all else 1)

    def pool() -> None:
        lister.pointwise("pool", tokens * e, t.samples * d * e, t.samples * d * e, tokens * e, kind="reduce")

    if model.classifier == "token":
        # The class token is a view; its gradient is zero everywhere else.
        lister.pointwise("class_row", 0.0, 0.0, t.samples * d * e, tokens * e, kind="copy", launches=0)
    if pool_first:
        pool()
    lister.norm("norm", rows, d, cast=not norm_all)
    if norm_all:
        pool()
    lister.gemm("head", t.samples, model.classes, d, bias=True, group="output", fp8=False,
                learned=-(-(model.classes * d + model.classes) // t.tp))  # fmt: skip
