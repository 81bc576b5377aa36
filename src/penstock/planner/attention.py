"""Operators of the attention of one Transformer block.

Shapes: T = rows of tokens on this device, A features of the device's query heads, K features of its KV heads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.config.layer import Latent, Layer
from penstock.planner.listing import Lister
from penstock.planner.operators import BIASED, BlockKind, Op
from penstock.planner.terms import Form

WARP_SOFTMAX = 1024
"""Longest row that torch's softmax keeps in registers (its `PersistentSoftmax.cuh`)."""
ROTARY_EAGER_BYTES = 8
"""Bytes per rotated element that a rotation composed of single operators moves in each pass: it computes in fp32."""


def attend(
    to: Lister, block: BlockKind, rows: float, seen: int, *, cross: bool = False, causal: bool = False,
    computed: float,
) -> None:  # fmt: skip
    """List attention of `rows` to `seen` tokens of each sample, and the projections of the `computed` tokens."""
    one = _Attention(to, block, rows, seen, cross=cross, causal=causal, computed=computed)
    if cross:
        one.project_memory()
    elif block.layer.latent:
        _make_latents(to, block, block.layer.latent, computed, one.heads)
        if to.terms.cached:
            _attend_latents(to, block, block.layer.latent, rows, seen, one.heads)
            return
        one.project_latents(block.layer.latent)
    else:
        one.project()
    one.turn()
    kept = one.norm_heads()
    one.compute(kept, one.exchange_keys())
    one.put_out()


class _Attention:
    """One attention on this device: its sizes, and its operators by role."""

    def __init__(
        self, to: Lister, block: BlockKind, rows: float, seen: int, *, cross: bool, causal: bool, computed: float,
    ) -> None:  # fmt: skip
        t, layer = to.terms, block.layer
        self.to, self.block, self.t, self.layer, self.c = to, block, t, layer, t.product
        self.rows, self.seen, self.computed, self.cross, self.causal = rows, seen, computed, cross, causal
        self.name = "attention.cross" if cross else "attention"
        self.heads, self.kv_heads = max(1, layer.heads // t.tp), max(1, layer.kv_heads // t.tp)
        self.a, self.kv = self.heads * layer.head_width, self.kv_heads * layer.head_width
        self.inner = self.heads * layer.value_width
        self.form, self.window = t.form(block, rows, seen, cross=cross, causal=causal)
        self.others = (
            max(1.0, t.samples * block.share * seen / t.cp) if cross else rows + t.samples * t.cached
        )
        self.queries, self.keys = rows * self.a, self.others * self.kv
        self.own = rows * (self.a + 2 * self.kv)

    def project_memory(self) -> None:
        """List the queries of the tokens, and the keys and values of the memory."""
        to, t, layer, a, d = self.to, self.t, self.layer, self.a, self.block.stack.width
        to.gemm(f"{self.name}.q", self.rows, a, d, bias=layer.qkv_bias)
        # All blocks read the same output of the other stack, which keeps it; autocast casts it in each block.
        wide = self.block.cross_width
        cast = self.others * wide * self.c if t.stream == 4 and self.c == 2 and not t.fused else 0.0
        to.gemm(
            f"{self.name}.kv", self.others, 2 * self.kv, wide, bias=layer.qkv_bias, kept=cast,
            pieces=(self.kv, self.kv),
        )  # fmt: skip

    def project_latents(self, latent: Latent) -> None:
        """List keys and values made from the latents, joined with the rotary part of keys."""
        plain = self.heads * (self.layer.head_width - self.layer.rotary_width)
        self.to.gemm(f"{self.name}.kv_up", self.computed, plain + self.inner, latent.kv_rank)
        self.to.move(f"{self.name}.join", self.rows * 3 * self.a, (self.c, self.c), kind="copy")

    def project(self) -> None:
        """List queries, keys and values of the tokens, made by one product."""
        to, layer, c, a, kv = self.to, self.layer, self.c, self.a, self.kv
        to.gemm(
            f"{self.name}.qkv", self.computed, a + 2 * kv, self.block.stack.width,
            bias=layer.qkv_bias and layer.key_bias, pieces=(a, kv, kv),
        )  # fmt: skip
        if layer.shifted:
            to.move(f"{self.name}.shift", self.computed * (a + 2 * kv), (c, c), weights=a + kv, tensors=1)
        if self.computed < self.rows:
            to.move(f"{self.name}.pad", self.own, (c, c), kind="copy")

    def turn(self) -> None:
        """List the rotary positions of queries and keys."""
        t, layer, c = self.t, self.layer, self.c
        # The gradients of queries, keys and values are joined into the gradient of the packed projection.
        packed = (self.queries + 2 * self.keys) * c
        self.to.behind(Op(f"{self.name}.stack", "copy", False, read=packed, written=packed))
        if layer.rotary and not self.cross:
            share, joins = layer.rotary.share, layer.rotary.share < 1.0
            each = c * share if t.fused else ROTARY_EAGER_BYTES * share + c * joins
            latent = self.rows * (self.heads + 1) * layer.rotary_width
            turned = latent if layer.latent else self.rows * (self.a + self.kv)
            self.to.move("rotary", turned, (each, each), launches=1 if t.fused else 6 + 2 * joins)

    def norm_heads(self) -> float:
        """List norms of queries and keys; returns the bytes of queries, keys and values that attention keeps."""
        t, layer, c, rows = self.t, self.layer, self.c, self.rows
        kept, grouped = (self.queries + 2 * self.keys) * c, self.heads != self.kv_heads
        if grouped and not self.cross and not layer.rotary:
            # The queries of a group are copied together; keys and values stay in the projection's output.
            kept += self.queries * c
        if layer.qk_norm:
            normed, each, whole = rows * (self.a + self.kv), layer.norm.tensors, layer.qk_norm_whole
            learned = each * layer.head_width * (layer.heads + layer.kv_heads if whole else 2)
            copied = self.queries * c if grouped and not self.cross and not t.fused else 0.0
            copied = normed * c if whole and not t.fused else copied
            lines = rows * (2 if whole else self.heads + self.kv_heads)
            self.to.move(
                f"{self.name}.qk_norm", normed, (c, c), (2 * c, c), kind="norm", group="attention",
                weights=learned, tensors=2 * each,
                kept=_kept_by_head_norms(self.to, layer, self.form, self.own, normed, copied, lines),
            )  # fmt: skip
            if whole and t.tp > 1:  # sums of squares of queries and of keys, both ways
                sums = Op("qk_norm.sums", "allreduce", read=rows * 4.0, axis="tensor")
                self.to.add(*(sums._replace(forward=ahead) for ahead in (True, True, False, False)))
            kept = normed * c + (rows * self.kv * c if self.form == "plain" and t.copies else 0.0)
        # Plain attention writes a copy of keys and values for each query head that shares them.
        return 3 * self.queries * c if self.form == "plain" and grouped else kept

    def exchange_keys(self) -> float:
        """List the exchange of keys and values between context parallel devices; returns the bytes of their
        gradients."""
        t, keys = self.t, self.keys * self.c
        gathered, made = 2.0 * keys * t.cp, 2 * keys
        if t.cp > 1 and t.gathers_keys:
            # The backward kernel holds the gradients of all gathered keys and values in addition to these.
            made = 2 * gathered
            gather = Op("gather", "gather", read=gathered, axis="context")
            scatter = gather._replace(name="scatter", kind="scatter", forward=False)
            self.to.add(gather, scatter, gather._replace(forward=False))
        elif t.cp > 1:
            ring = Op("ring", "ring", read=gathered, axis="context", hides=True)
            self.to.add(ring, ring._replace(forward=False), ring._replace(forward=False))
        return made

    def compute(self, kept: float, made: float) -> None:
        """List scores, softmax and values in the form that is used here."""
        to, block, t, layer, c = self.to, self.block, self.t, self.layer, self.c
        queries, keys, own, cross = self.queries, self.keys, self.own, self.cross
        # Results of several inputs are concatenated, and that copy is kept, too.
        again = queries * c if block.inputs > 1 else 0.0
        # The causal mask is part of the added bias, so no kernel skips the masked scores.
        added = self.form == "fused" and block.stack.biased and not cross and not t.host
        core = Op(
            self.name, "attention", batch=t.samples * self.heads, m=self.rows / t.samples, n=self.seen,
            k=(layer.head_width + layer.value_width) / 2, read=queries * c + 2 * keys * (t.cache or c),
            written=queries * c, elements=queries, kept=kept + self.rows * self.heads * 4.0 + again,
            group="attention", causal=self.causal and not added, window=self.window, function=BIASED * added,
        )  # fmt: skip
        if self.form == "fused":
            read, written = (4 * queries + 2 * keys) * c, queries * c + made
            behind = [core._replace(forward=False, read=read, written=written)]
            if added and block.stack.positions == "relative":  # gradients per sample, and their sum
                numbers = core.batch * core.m * core.n * c
                behind.append(
                    Op("attention.bias", "reduce", False, read=numbers, written=numbers, scratch=True)
                )
            to.add(core, *behind)
            # Outputs are scaled by a factor from the kernel's sums of exponentials; backward makes its gradient.
            _sinks(to, layer, core, queries, (c, c), (2 * c + 4, 4), launches=5, cross=cross)
        elif self.form == "plain":
            _composed(to, block, core, self.form, keys, own, kept, cross=cross)
        else:
            # torch's own composition computes in fp32, on scaled copies of queries and keys, and on copies of values
            # unless these are already in fp32.
            values = keys * 4.0 if c != 4 or t.copies else 0.0 if layer.qk_norm else own * c
            _composed(to, block, core, self.form, keys, own, (queries + keys) * 4.0 + values, cross=cross)
        if t.cp > 1:
            _add_parts(to, f"{self.name}.parts", queries, 2 * keys, causal=block.causal and not cross)

    def put_out(self) -> None:
        """List the projection of the output."""
        to, layer, c, mixed = self.to, self.layer, self.c, self.computed * self.a
        if self.computed < self.rows:
            to.move(f"{self.name}.unpad", mixed, (c, c), kind="copy")
        # A fused kernel already keeps its outputs.
        beside = mixed * c if self.form == "fused" else 0.0
        values = self.computed * self.inner
        if layer.value_width < layer.head_width and self.form != "plain":
            # The kernel keeps its output, which has more features than the values.
            to.move(f"{self.name}.values", values, (c, c), kind="copy", kept=mixed * c, group="attention")
        to.gemm(
            f"{self.name}.out", self.computed, self.block.stack.width, self.inner, bias=layer.bias,
            group="attention", beside=beside,
        )  # fmt: skip


def _make_latents(to: Lister, block: BlockKind, latent: Latent, rows: float, heads: int) -> None:
    """List the queries of `rows` tokens, made through their latent, and the latents of keys and values with their
    norms."""
    t, d, norm = to.terms, block.stack.width, replace(block.layer.norm, eps=latent.norm_eps)
    again = 0.0 if t.stream == t.product else None  # another product keeps the same input
    if latent.query_rank:
        to.gemm("attention.q_down", rows, latent.query_rank, d)
        to.norm("attention.q_norm", rows, latent.query_rank, norm)
    to.gemm("attention.q_up", rows, heads * latent.head_width, latent.query_rank or d)
    to.gemm("attention.kv_down", rows, latent.kept, d, kept=again)
    to.norm("attention.kv_norm", rows, latent.kv_rank, norm)


def _attend_latents(to: Lister, block: BlockKind, latent: Latent, rows: float, seen: int, heads: int) -> None:
    """List attention of `rows` to cached latents, between products with the matrices that would make keys and
    values."""
    t, c, width = to.terms, to.terms.product, latent.kept
    kept, queries = (rows + t.samples * t.cached) * width, rows * heads * width

    def product(name: str, inner: int, outer: int) -> Op:
        read, written = rows * heads * inner + heads * inner * outer, rows * heads * outer
        return Op(name, "bmm", batch=heads, m=rows, n=outer, k=inner, read=read * c, written=written * c)

    to.move("rotary", rows * (heads + 1) * latent.rotary_width, (c, c), launches=1 if t.fused else 6)
    to.add(product("attention.to_keys", latent.plain_width, latent.kv_rank))
    to.add(
        Op(
            "attention", "attention", batch=t.samples * heads, m=rows / t.samples, n=seen, k=width,
            read=queries * c + kept * (t.cache or c), written=queries * c, elements=queries
        ),
    )  # fmt: skip
    to.add(product("attention.to_values", latent.kv_rank, latent.value_width))
    to.gemm("attention.out", rows, block.stack.width, heads * latent.value_width, group="attention")


def _sinks(
    to: Lister, layer: Layer, core: Op, size: float, *moved: tuple[float, float], cross: bool, **more: Any
) -> None:  # fmt: skip
    """List the operators, over `size` elements, that add a layer's attention sinks, if it has any, to the softmax of
    self-attention."""
    if layer.sinks and not cross:
        heads = max(1, layer.heads // to.terms.tp)
        to.move(f"{core.name}.sinks", size, *moved, weights=heads, tensors=1, **more)


def _add_parts(to: Lister, name: str, queries: float, keys: float, *, causal: bool) -> None:
    """List the weighted sum of the partial results of attention to each device's keys, and of their gradients, in
    place, as in `penstock.kernels.context`. For another device's keys, a causal mask leaves all queries with half of
    the keys, or half of the queries with all keys. `queries` and `keys` are a device's elements; `keys` includes
    values.
    """
    t, c = to.terms, to.terms.product
    sees = 0.75 * (t.cp + 1) if causal else t.cp
    # Single operators in fp32. Forward: cast, weigh both, add, write back. Backward: add, write back, and for keys
    # clear, cast and add the received gradients. A fused kernel adds a part in place.
    ahead, behind, own = (3 * c,) * 3 if t.software.adds_parts else (40 + c, 16 + c, 24 + 5 * c)
    moved = queries * sees * behind + keys * t.cp * own
    launches = 1 if t.software.adds_parts else 5
    to.add(
        Op(name, "pointwise", read=queries * sees * ahead, launches=launches * t.cp),
        Op(name, "pointwise", False, read=moved, launches=2 * launches * t.cp),
    )


def _kept_by_head_norms(
    to: Lister, layer: Layer, form: Form, own: float, normed: float, copied: float, rows: float
) -> float:
    """Bytes that norms of queries and keys keep for the backward pass. `own` elements are projected and `normed` of
    them normalised, in `rows` rows, after `copied` bytes of queries were copied."""
    t, c = to.terms, to.terms.product
    if layer.norm.kind == "layer":
        return own * c + copied + 2 * rows * t.statistic
    if t.fused or not (t.host or t.software.norms_apart):
        return own * c + copied + rows * t.statistic
    # torch composes the norms in fp32, and keeps both their normalised values and their inputs. Values stay in the
    # projection's output, unless attention copies them.
    values = 0.0 if form != "fused" and t.copies else own * c
    if c == 4:
        return (values if layer.qk_norm_whole else own * c) + copied + normed * 4 + rows * 4
    # The norms' inputs were cast to fp32.
    return values + normed * 8 + rows * 4


def _composed(
    to: Lister, block: BlockKind, core: Op, form: Form, keys: float, own: float, kept: float, *, cross: bool
) -> None:
    """List the operators that the fused kernel `core` would replace: scores, softmax and values.

    There are `keys` elements of keys, and `own` elements in the projection of this device's rows; `kept` is the bytes
    saved for the gradients of the scores.
    """
    t, c, name, queries = to.terms, to.terms.product, core.name, core.elements
    scores = core.batch * core.m * (core.window or core.n)
    group, each = "scores", 4.0 if form == "math" else c
    if t.copies:
        to.move(f"{name}.split", own, (c, c), kind="copy")

    def product(
        ending: str, m: float, n: int, k: float, read: float, written: float, forward: bool = False
    ) -> Op:
        """A product that reads and writes `read` and `written` elements."""
        return Op(
            f"{name}.{ending}", "bmm", forward, core.batch, m, n, k, read * each, written * each,
            window=core.window, scores=True,
        )  # fmt: skip

    tokens, seen, f = core.m, core.n, int(core.k)
    to.add(
        product("scores", tokens, seen, f, queries + keys, scores, True)._replace(
            kept=kept, group="attention", given=core.read
        ),
        product("scores.left", tokens, f, seen, scores + keys, queries),
        product("scores.right", seen, f, tokens, scores + queries, keys),
    )
    if block.stack.biased and not cross:
        to.move(f"{name}.bias", scores, (each, each), (0, 0), scores=True)
    if block.layer.score_cap is not None:
        kept = scores * each
        to.move(
            f"{name}.cap", scores, (2 * each,) * 2, (3 * each, 2 * each), kept=kept, group=group, launches=2,
            scores=True,
        )  # fmt: skip
    # Scores are written once more, with a column of sinks appended.
    _sinks(
        to, block.layer, core, scores, (each, each), (each, 2 * each), launches=2, cross=cross, scores=True
    )
    _softmax(to, core, scores, each, group)
    if block.stack.weights_dropout:
        to.dropout(f"{name}.dropout", scores, each, group, kept=each, torchs=form == "math", scores=True)
    to.add(
        product("values", tokens, f, seen, scores + keys, queries, True),
        product("values.left", tokens, seen, f, queries + keys, scores),
        product("values.right", seen, f, tokens, scores + queries, keys),
    )
    to.move(f"{name}.merge", queries, (c, c), kind="copy")


def _softmax(to: Lister, core: Op, scores: float, each: float, group: str) -> None:
    """List softmax and mask, as one kernel or one each. The product before them applies the scale as it writes."""
    t, name = to.terms, core.name
    softmax = f"{name}.softmax"
    if t.software.softmax_apart:
        to.move(f"{name}.cast", scores, (each, 4), (4, each), scores=True)
        to.move(f"{name}.scale", scores, (4, 4), scores=True)
        to.move(
            softmax, scores, (4, 4), (8, 4), kind="softmax", kept=4 * scores, group=group, row=core.n,
            scores=True,
        )  # fmt: skip
        to.move(f"{name}.round", scores, (4, each), (each, 4), kept=scores * each, group=group, scores=True)
        return
    unfused = not t.fused and not t.host
    if core.causal and unfused:
        # The mask is read again for each head.
        to.move(f"{name}.mask", scores, (2 * each, each), (0, 0), scores=True)
    read = (2 if unfused and core.n > WARP_SOFTMAX else 1) * each
    to.move(
        softmax, scores, (read, each), (2 * read, each), kind="softmax", kept=scores * each, group=group, row=core.n,
        scores=True,
    )  # fmt: skip
