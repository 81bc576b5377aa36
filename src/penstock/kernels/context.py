"""Context-parallel attention: each device holds some tokens of a sample, and keys and values are exchanged.

There are two ways. A ring passes keys and values from device to device while attention to the present ones is computed
(Liu et al., "Ring Attention with Blockwise Transformers", ICLR 2024). Or all are gathered first (Grattafiori et al.,
"The Llama 3 Herd of Models", 2024, section 3.3.2). A query attends to one device's keys at a time, and the parts are
combined by their log-sum-exp. Only queries, the device's own keys and values, outputs and these logarithms are saved
for the backward pass, in which keys and values are exchanged again and their gradients are sent back.

Shapes: B samples, H heads, G KV heads, K features per head; N tokens of whole samples, n on this device, M present
keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, distributed

from penstock.config.plan import AttentionBackend
from penstock.kernels.attention import Scores, kernel_for
from penstock.kernels.choices import holds_scores
from penstock.kernels.sinks import add_sinks, for_each_query, fused_gradients, fused_with_sums, sink_gradients
from penstock.kernels.token_cut import Cut

QUERIES = 1024
"""Most queries whose mask (or scores) is in memory at one time."""


class Shared:
    """The mask of context-parallel attention: which tokens attend to which, when every rank holds some of them."""

    keeps_scores = False

    def __init__(
        self, cut: Cut, tokens: int, *, window: int | None = None, lengths: Tensor | None = None,
        documents: Tensor | None = None, queries: int | None = None, biases: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.cut, self.tokens = cut, tokens
        self.queries = queries
        """Number of this rank's queries in cross-attention, where `tokens` counts the keys. None: self-attention."""
        self.window, self.biases = window, biases
        """Values added to scores by distance, (H, 2·reach − 1): from a key reach − 1 tokens before its query to a key
        reach − 1 after it."""
        self.lengths = None if cut.causal and queries is None else lengths
        """(B,) tokens before the padding. A causal mask hides padding already, except in cross-attention."""
        self.documents = None
        """(B, N), document numbers of whole samples, padded."""
        if documents is not None:
            missing = cut.chunk(tokens) * cut.chunks - tokens
            self.documents = F.pad(documents, (0, missing), value=-1) if missing else documents

    @property
    def reach(self) -> int:
        """Tokens per sample, including the padding of the last chunks."""
        return self.cut.chunk(self.tokens) * self.cut.chunks

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(self, q: Tensor, k: Tensor, v: Tensor, backend: AttentionBackend, scores: Scores) -> Tensor:
        """The same as `attention`: q (B, H, n, K), k and v (B, G, n, K); returns (B, H, n, K)."""
        scale = q.shape[-1] ** -0.5 if scores.scale is None else scores.scale
        # Drawn from the host's generator, which recomputation restores: each part's dropout is derived from this seed.
        seed = int(torch.randint(1 << 31, ())) if scores.dropout else 0
        how = _How(
            self, scale, scores.dropout, seed, holds_scores(kernel_for(backend, q, scores, shared=True)),
            scores.cap,
        )  # fmt: skip
        return _Exchanged.apply(q, k, v, self.biases, scores.sinks, how)  # type: ignore[no-any-return, no-untyped-call]

    def pieces(self, source: int, device: torch.device) -> Iterator[_Piece]:
        """Yield which of this rank's queries attend to which keys of rank `source`, as rectangles."""
        cut = self.cut
        each, rank = cut.chunk(self.tokens), cut.rank
        n = each * len(cut.held(rank))
        first, last, everything = slice(0, each), slice(each, n), slice(0, n)
        if not cut.causal:
            asking = everything if self.queries is None else slice(0, self.queries)
            parts = [_Piece(asking, everything, "all")]
        elif source == rank:
            parts = [_Piece(first, first, "causal"), _Piece(last, first, "all"), _Piece(last, last, "causal")]
        elif source < rank:
            parts = [_Piece(everything, first, "all")]
        else:
            parts = [_Piece(last, everything, "all")]
        padded = not cut.causal and self.lengths is None and self.reach > self.tokens
        masked = self.documents is not None or self.window is not None or self.lengths is not None
        masked = masked or self.biases is not None
        masked = masked or (padded and max(cut.held(source)) * each + each > self.tokens)
        for piece in parts:
            if not masked:
                yield piece
                continue
            # At most `QUERIES` rows of a mask are made at one time.
            for start in range(piece.queries.start, piece.queries.stop, QUERIES):
                queries = slice(start, min(start + QUERIES, piece.queries.stop))
                mask = self._mask(queries, source, piece.keys, device)
                distances = None
                if self.biases is not None:
                    looking = cut.places(rank, self.tokens, device)[queries]
                    seen = cut.places(source, self.tokens, device)[piece.keys]
                    distances = seen - looking[:, None] + self.reach - 1
                yield _Piece(queries, piece.keys, "mask", mask, distances)

    def _mask(self, queries: slice, source: int, keys: slice, device: torch.device) -> Tensor:
        """Which of these queries attend to which of these keys, (B or 1, 1, ·, ·)."""
        cut = self.cut
        seen = cut.places(source, self.tokens, device)[keys]
        mask = (seen < self.tokens).expand(queries.stop - queries.start, -1)
        if self.queries is None:
            looking = cut.places(cut.rank, self.tokens, device)[queries]
            behind = looking[:, None] - seen
            mask = behind >= 0 if cut.causal else mask
        if self.window is not None:
            near = behind < self.window if cut.causal else behind.abs() <= self.window // 2
            mask = mask & near
        mask = mask[None, None]
        if self.documents is not None:
            mask = mask & (self.documents[:, None, looking, None] == self.documents[:, None, None, seen])
        if self.lengths is not None:
            mask = mask & (seen < self.lengths[:, None])[:, None, None]
        return mask


class SharedMemories(Shared):
    """The same for cross-attention to several memories, concatenated along tokens; every rank holds some tokens of each
    memory. `memory_index` (B,) is the number of the memory that a sample attends to; None: all."""

    def __init__(self, memories: Sequence[tuple[int, Shared]], memory_index: Tensor | None) -> None:
        self.memories, self.memory_index = memories, memory_index
        first = memories[0][1]
        super().__init__(first.cut, sum(memory.tokens for _, memory in memories), queries=first.queries)

    def pieces(self, source: int, device: torch.device) -> Iterator[_Piece]:
        parts = []
        for number, memory in self.memories:
            places = memory.cut.places(source, memory.tokens, device)
            seen = (places < memory.tokens)[None]
            seen = seen if memory.lengths is None else seen & (places < memory.lengths[:, None])
            parts.append(seen if self.memory_index is None else seen & (self.memory_index == number)[:, None])
        samples = max(len(part) for part in parts)
        mask = torch.cat([part.expand(samples, -1) for part in parts], dim=1)[:, None, None]
        assert self.queries is not None
        for start in range(0, self.queries, QUERIES):
            queries = slice(start, min(start + QUERIES, self.queries))
            yield _Piece(queries, slice(0, mask.shape[3]), "mask", mask)


class _Piece(NamedTuple):
    queries: slice
    keys: slice
    kind: str
    """`all`: every query attends to every key; `causal`: to keys at its own place and before; or `mask`."""
    mask: Tensor | None = None
    distances: Tensor | None = None
    """Index of the bias by distance that is added to each score, (q, k)."""


class _How(NamedTuple):
    """Further arguments of attention."""

    shared: Shared
    scale: float
    dropout: float
    seed: int
    composed: bool
    cap: float | None = None

    def fused(self, q: Tensor, piece: _Piece) -> bool:
        """Whether torch has a kernel for this piece that also returns the log-sum-exp."""
        if self.composed or self.dropout or piece.mask is not None:
            return False
        if q.is_cuda:  # the CUDA kernel needs half precision and head widths that are multiples of 8
            return q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0
        return q.device.type == "cpu"


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, biases: Tensor | None, sinks: Tensor | None, how: _How
    ) -> Tensor:  # fmt: skip
        shared, sums = how.shared, torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(q.shape, dtype=sums)
        logs = q.new_full(q.shape[:-1], -math.inf, dtype=sums)
        for source, keys, values in _visits(shared.cut, torch.stack((k, v))):
            for at, piece in enumerate(shared.pieces(source, q.device)):
                rows, columns = piece.queries, piece.keys
                part, log = _forward(
                    q[:, :, rows], keys[:, :, columns], values[:, :, columns], biases, piece, how,
                    _number(source, at),
                )  # fmt: skip
                both = torch.logaddexp(logs[:, :, rows], log)
                # Both are −∞ as long as a query has attended to nothing.
                base = both.masked_fill(both == -math.inf, 0.0)
                before, now = (logs[:, :, rows] - base).exp(), (log - base).exp()
                out[:, :, rows] = out[:, :, rows] * before[..., None] + part * now[..., None]
                logs[:, :, rows] = both
        if sinks is not None:
            out, logs = add_sinks(out, logs, sinks)
        output = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, output, logs, biases, sinks)
        ctx.how = how
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, logs, biases, sinks = ctx.saved_tensors
        how: _How = ctx.how
        for_biases = torch.zeros_like(biases, dtype=logs.dtype) if ctx.needs_input_grad[3] else None
        cut, kv = how.shared.cut, torch.stack((k, v))
        for_queries = torch.zeros_like(q, dtype=logs.dtype)
        own: Tensor | None = None
        passed: _Hop | None = None
        others = None if cut.ring else kv.new_zeros(cut.size, *kv.shape)
        for source, keys, values in _visits(cut, kv):
            for_keys = torch.zeros_like(kv, dtype=logs.dtype)
            for at, piece in enumerate(how.shared.pieces(source, q.device)):
                rows, columns = piece.queries, piece.keys
                dq, dk, dv = _backward(
                    grad[:, :, rows], q[:, :, rows], keys[:, :, columns], values[:, :, columns], out[:, :, rows],
                    logs[:, :, rows], biases, for_biases, piece, how, _number(source, at),
                )  # fmt: skip
                for_queries[:, :, rows] += dq
                for_keys[0, :, :, columns] += dk
                for_keys[1, :, :, columns] += dv
            gradient = for_keys.to(kv.dtype)
            if others is not None:
                others[source] = gradient
            elif source == cut.rank:
                own = gradient
            else:
                # The earlier ranks' gradients of these keys arrive, and the sum is passed on.
                passed = _Hop(cut, gradient if passed is None else gradient + passed.received())
        if others is not None:
            own = torch.empty_like(kv)
            distributed.reduce_scatter(own, list(others.unbind()), group=cut.group)
        elif passed is not None and own is not None:
            own = own + passed.received()
        assert own is not None
        learned = None if for_biases is None else for_biases.to(biases.dtype)
        for_sinks = None if sinks is None else sink_gradients(grad, out, logs, sinks)
        return for_queries.to(q.dtype), own[0], own[1], learned, for_sinks, None


def _number(source: int, at: int) -> int:
    """A number for each piece of one attention, added to the seed of its dropout."""
    return source * 4096 + at


class _Hop:
    """Sends a tensor to the next rank of the ring, and receives the previous rank's."""

    def __init__(self, cut: Cut, tensor: Tensor) -> None:
        ahead, behind = (
            distributed.get_global_rank(cut.group, (cut.rank + step) % cut.size) for step in (1, -1)
        )
        self._sent, self._received = tensor.contiguous(), torch.empty_like(tensor.contiguous())
        send = distributed.P2POp(distributed.isend, self._sent, ahead, cut.group)
        receive = distributed.P2POp(distributed.irecv, self._received, behind, cut.group)
        self._works = distributed.batch_isend_irecv([send, receive])

    def received(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._received


def _visits(cut: Cut, kv: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield every rank's number, keys and values, (B, G, n, K) each."""
    if not cut.ring:
        gathered = kv.new_empty(cut.size, *kv.shape)
        distributed.all_gather(list(gathered.unbind()), kv, group=cut.group)
        for source in range(cut.size):
            yield source, gathered[source, 0], gathered[source, 1]
        return
    for step in range(cut.size):
        hop = _Hop(cut, kv) if step + 1 < cut.size else None
        yield (cut.rank - step) % cut.size, kv[0], kv[1]
        if hop is not None:
            kv = hop.received()


def _forward(
    q: Tensor, k: Tensor, v: Tensor, biases: Tensor | None, piece: _Piece, how: _How, number: int
) -> tuple[Tensor, Tensor]:
    """Attention to some keys: the weighted mean of their values (B, H, n, K), and the log-sum-exp of the scores (B, H,
    n), both in fp32 or wider."""
    sums = torch.promote_types(q.dtype, torch.float32)
    k, v = (for_each_query(x, q.shape[1]) for x in (k, v))
    if how.fused(q, piece):
        out, logs = fused_with_sums(q, k, v, None, causal=piece.kind == "causal", scale=how.scale)
        return out.to(sums), logs.to(sums)
    products = _products(q, k, biases, piece, how)
    logs = torch.logsumexp(products, -1)
    weights = (products - logs.masked_fill(logs == -math.inf, 0.0)[..., None]).exp()
    if how.dropout:
        weights = weights * _kept(weights, how, number)
    return (weights.to(v.dtype) @ v).to(sums), logs


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor, biases: Tensor | None,
    for_biases: Tensor | None, piece: _Piece, how: _How, number: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, keys and values for one part, from the whole output and log-sum-exp. Gradients of biases
    are added to `for_biases`."""
    groups = k.shape[1]
    wide_k, wide_v = (for_each_query(x, q.shape[1]) for x in (k, v))
    if how.fused(q, piece):
        causal = piece.kind == "causal"
        dq, dk, dv = fused_gradients(grad, q, wide_k, wide_v, out, logs, None, causal=causal, scale=how.scale)
    else:
        products = _products(q, wide_k, biases, piece, how)
        weights = (products - logs.masked_fill(logs == -math.inf, 0.0)[..., None]).exp()
        of_weights = (grad @ wide_v.transpose(-1, -2)).to(weights.dtype)
        dropped = weights
        if how.dropout:
            keep_mask = _kept(weights, how, number)
            of_weights, dropped = of_weights * keep_mask, weights * keep_mask
        dv = dropped.to(grad.dtype).transpose(-1, -2) @ grad
        mean = (grad.to(weights.dtype) * out.to(weights.dtype)).sum(-1, keepdim=True)
        of_scores = weights * (of_weights - mean)
        if how.cap is not None:
            slopes = 1.0 - (products / how.cap).square()
            of_scores = (of_scores * slopes).where(products > -math.inf, 0.0)
        if for_biases is not None and piece.distances is not None:
            for_biases.index_add_(1, piece.distances.flatten(), of_scores.sum(0).flatten(1))
        scores = (of_scores * how.scale).to(q.dtype)
        dq, dk = scores @ wide_k, scores.transpose(-1, -2) @ q
    # Sum over the query heads that share a KV head.
    dk, dv = (torch.unflatten(t, 1, (groups, -1)).sum(2) if t.shape[1] != groups else t for t in (dk, dv))
    return dq, dk, dv


def _products(q: Tensor, k: Tensor, biases: Tensor | None, piece: _Piece, how: _How) -> Tensor:
    """Scores in fp32 or wider: −∞ where a query does not attend to a key."""
    sums = torch.promote_types(q.dtype, torch.float32)
    products = (q @ k.transpose(-1, -2)).to(sums) * how.scale
    products = products if how.cap is None else torch.tanh(products / how.cap) * how.cap
    if biases is not None and piece.distances is not None:
        products = products + biases.to(sums)[:, piece.distances]
    if piece.kind == "causal":
        later = torch.ones(products.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return products.masked_fill(later, -math.inf)
    return products if piece.mask is None else products.masked_fill(~piece.mask, -math.inf)


def _kept(weights: Tensor, how: _How, number: int) -> Tensor:
    """Dropout's factors, the same in the forward and the backward pass."""
    generator = torch.Generator(weights.device).manual_seed(how.seed + number)
    chance = torch.rand(weights.shape, generator=generator, device=weights.device)
    return (chance >= how.dropout).to(weights.dtype) / (1.0 - how.dropout)
