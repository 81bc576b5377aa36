"""Multi-head self-attention: softmax(q kᵀ / √K) v, in one plain form and through torch's fused ones.

Shapes: B samples, N tokens, H heads, K features per head, D = H·K; G KV heads, each shared by H / G queries. The packed
form takes the output of one fused qkv projection whose features are ordered (KV head, {its queries, k, v}, K). Two
things follow from grouping by head:

- A contiguous slice of the projection's rows is a whole number of heads, so that heads can be split over devices.
- Sequence first, (N, B, H, 3, K), sample and head merge into one strided dimension of B·H batched products,
  so that q, k and v are read in place; and a fused kernel that sees one sample of B·H heads writes (N, B, H,
  K) directly. Batch first, (B, N, H, 3, K), they do not merge, and batched products first copy q, k and v.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.config.plan import WITH_SINKS, AttentionBackend
from penstock.cpu import this_cpu
from penstock.dtypes import format_of
from penstock.errors import ConfigError
from penstock.kernels import choices
from penstock.kernels.choices import CAUSAL_BLOCK
from penstock.kernels.dropout import dropout
from penstock.kernels.native_attention import native_attention, native_packed_attention
from penstock.kernels.sinks import fused_attention_with_sinks

BACKENDS: tuple[AttentionBackend, ...] = get_args(AttentionBackend)

PINNED = {
    "flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH,
}  # fmt: skip
# Torch's messages for a missing kernel, on a GPU and on a CPU.
_NO_KERNEL = ("No available kernel", "No viable backend")


class AttentionMask(Protocol):
    """A mask that is not an N × M tensor, but computes attention itself, in parts."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, backend: AttentionBackend, scores: Scores) -> Tensor:
        """The same as `attention`."""
        ...


class Scores(NamedTuple):
    """Options of the attention scores; all may be left out."""

    mask: Tensor | AttentionMask | None = None
    """Broadcast to (B, H, N, M): true where a query may attend to a key, or values to add to the scores."""
    causal: bool = False
    """Whether a query attends only to its own and earlier tokens. A mask must hide later tokens itself."""
    dropout: float = 0.0
    """Probability of dropping an attention weight."""
    scale: float | None = None
    """Factor of the scores; None: 1 / √K."""
    cap: float | None = None
    """c: scores s become c·tanh(s / c) before they are masked; None: no cap."""
    sinks: Tensor | None = None
    """(H, 1) or (H, N): logit of the attention sink, an extra term in the denominator of each row's softmax."""


_PLAIN = Scores()


def kernel_for(
    backend: AttentionBackend, q: Tensor, scores: Scores = _PLAIN, queries: int | None = None, *,
    shared: bool = False,
) -> AttentionBackend:  # fmt: skip
    """The kernel that computes attention of q; `queries` is the number of tokens of a sample, by default N of (…, N,
    K). For `shared` see `penstock.kernels.choices.attention_kernel`."""
    mask = scores.mask
    learned = isinstance(mask, Tensor) and mask.requires_grad
    masked = (mask is not None and getattr(mask, "keeps_scores", True)) or q.shape[-1] % 8 > 0
    return choices.attention_kernel(
        backend, q.device.type, format_of(q.dtype), q.shape[-2] if queries is None else queries,
        avx512=this_cpu().avx512, dropout=scores.dropout > 0, learned_bias=learned, shared=shared,
        capped=scores.cap is not None, sinks=scores.sinks is not None, masked=masked,
    )  # fmt: skip


def attention(
    q: Tensor, k: Tensor, v: Tensor, backend: AttentionBackend = "sdpa", scores: Scores = _PLAIN
) -> Tensor:
    """Attend to the tokens that `scores` allows. q: (B, H, N, K), k and v: (B, G, M, K), any strides; returns (B, H, N,
    K).

    `plain` works in the type of its input; its softmax accumulates in fp32 and rounds once. `sdpa` is torch's own
    choice of kernel, `auto` ours (see `penstock.kernels.choices`); `flash`, `efficient`, `cudnn` and `math` pin one of
    torch's kernels, and `native` is our C++ kernel for CPUs. Causal attention and shared KV heads cost the fused
    kernels no memory; a mask tensor costs its own size. `penstock.kernels.choices.attention_kernel` says what `sdpa`
    means on a CPU with dropout or a learned bias.

    Raises ConfigError if a pinned kernel does not support these inputs.
    """
    if scores.mask is not None and not isinstance(scores.mask, Tensor):
        return scores.mask.attend(q, k, v, backend, scores)
    if backend not in BACKENDS:
        raise ConfigError(f"There is no attention backend {backend!r}; choose one of {', '.join(BACKENDS)}.")
    if scores.sinks is not None and backend not in WITH_SINKS:
        raise ConfigError(
            f"plan.attention {backend!r} has no kernel of attention sinks; use {', '.join(WITH_SINKS)}."
        )
    kernel = kernel_for(backend, q, scores)
    if kernel == "plain" or (scores.sinks is not None and torch.compiler.is_exporting()):
        return plain_attention(q, k, v, scores)
    if scores.sinks is not None:
        return fused_attention_with_sinks(
            q, k, v, scores.sinks, scores.mask, causal=scores.causal, scale=scores.scale
        )
    if kernel == "native":
        return native_attention(
            q, k, v, scores.mask, causal=scores.causal, dropout=scores.dropout, scale=scores.scale
        )  # fmt: skip
    return _pinned(q, k, v, backend, scores) if backend in PINNED else _torchs(q, k, v, scores)


_AUTOCASTING = frozenset(
    kind for kind in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia") if torch.amp.is_autocast_available(kind)
)
"""Device types that support torch.autocast, listed once: in compiled code, asking torch 2.11 breaks the graph."""


def type_of_scores(x: Tensor) -> torch.dtype:
    """The dtype of queries and keys that are projected from x."""
    return torch.get_autocast_dtype(x.device.type) if autocasts(x) else x.dtype


def autocasts(x: Tensor) -> bool:
    """Whether torch.autocast casts products of x."""
    return x.device.type in _AUTOCASTING and torch.is_autocast_enabled(x.device.type)


def keeps_scores(backend: AttentionBackend, q: Tensor, tokens: int, scores: Scores) -> bool:
    """Whether attention of samples with this number of tokens keeps its scores for the backward pass."""
    queries = getattr(scores.mask, "block", tokens)  # a mask may split samples into blocks
    holds = choices.holds_scores(kernel_for(backend, q, scores, queries))
    return holds and getattr(scores.mask, "keeps_scores", True)


def _torchs(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
    mask = scores.mask
    assert mask is None or isinstance(mask, Tensor)
    if mask is not None and mask.is_floating_point():
        mask = mask.to(q.dtype)
    return F.scaled_dot_product_attention(
        q, k, v, mask, scores.dropout, scores.causal, scale=scores.scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def plain_attention(q: Tensor, k: Tensor, v: Tensor, scores: Scores = _PLAIN) -> Tensor:
    """Two matrix products and a softmax: the reference that every other form is tested against.

    On a CPU, long causal attention is computed in blocks of queries; no block reads later keys.
    """
    device, tokens, keys = q.device.type, q.shape[-2], k.shape[-2]
    if torch.compiler.is_exporting() or not choices.cuts_causal(device, tokens, keys, causal=scores.causal):
        return _composed(q, k, v, scores)
    parts = []
    for start in range(0, tokens, CAUSAL_BLOCK):
        end = min(start + CAUSAL_BLOCK, tokens)
        later = q.new_full((end - start, end), -math.inf).triu(start + 1)
        block_scores = scores._replace(mask=later[None, None], causal=False)
        parts.append(_composed(q[:, :, start:end], k[:, :, :end], v[:, :, :end], block_scores))
    return torch.cat(parts, dim=2)


def _composed(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
    samples, heads, tokens, width = q.shape
    if k.shape[1] != heads:
        k, v = (t.repeat_interleave(heads // k.shape[1], dim=1) for t in (k, v))
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    # The matrix product also scales and adds the mask. With beta 0 its first argument is never read.
    added = _added(scores, q, k, samples)
    unread = q.new_zeros(1, 1, 1) if added is None else added
    scale = 1.0 / math.sqrt(width) if scores.scale is None else scores.scale
    if scores.cap is not None:
        unread, scale = q.new_zeros(1, 1, 1), scale / scores.cap
    beta = 0 if added is None or scores.cap is not None else 1
    products = torch.baddbmm(unread, q, k.transpose(1, 2), beta=beta, alpha=scale)
    if scores.cap is not None:
        products = products.tanh()
        products = products * scores.cap if added is None else torch.add(added, products, alpha=scores.cap)
    # The dtype is explicit because autocast would otherwise widen the (N, M) scores to fp32.
    if scores.sinks is not None:
        column = scores.sinks.to(products.dtype).expand(samples, heads, tokens).reshape(-1, tokens, 1)
        products = torch.cat([products, column], dim=-1)
    weights = torch.softmax(products, dim=-1, dtype=products.dtype)
    if scores.sinks is not None:
        weights = weights[..., :-1]
    if scores.dropout:
        weights = dropout(weights, scores.dropout)
    return torch.bmm(weights, v).view(samples, heads, tokens, v.shape[-1])


def _added(scores: Scores, q: Tensor, k: Tensor, samples: int) -> Tensor | None:
    """The mask as values to add to the scores, broadcast to (B·H, N, M)."""
    shape = q.shape[-2], k.shape[-2]
    if scores.causal:
        return q.new_full(shape, -math.inf).triu(1).unsqueeze(0)
    mask = scores.mask
    if mask is None:
        return None
    assert isinstance(mask, Tensor)
    if mask.is_floating_point():
        mask = mask.to(q.dtype)
    else:
        mask = q.new_zeros(mask.shape).masked_fill(~mask, -math.inf)
    if mask.shape[:2] == (1, 1):
        return mask[0]
    return mask.expand(samples, len(q) // samples, *mask.shape[2:]).flatten(0, 1)


def _pinned(q: Tensor, k: Tensor, v: Tensor, backend: AttentionBackend, scores: Scores) -> Tensor:
    try:
        with sdpa_kernel(PINNED[backend]):
            return _torchs(q, k, v, scores)
    except RuntimeError as error:
        about = f" for {q.dtype} on {q.device.type} with {q.shape[-1]} features per head"
        raise_without_kernel(error, backend, about)
        raise


def raise_without_kernel(error: RuntimeError, backend: AttentionBackend, about: str) -> None:
    """Raise a `ConfigError` if `error` is torch's report that a backend has no kernel for its inputs; `about` names
    them."""
    if any(words in str(error) for words in _NO_KERNEL):
        raise ConfigError(
            f"plan.attention {backend!r} has no kernel{about} with these masks; use attention 'sdpa' or 'auto'."
        ) from error


def split_heads(qkv: Tensor, head_width: int, shared: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of a packed projection of any number of heads, (·, ·, G·(H/G + 2)·K): (·, ·, H, K) and twice (·, ·, G,
    K). `shared` is the number of query heads per KV head; if it is 1, all three are views.

    Uses `unbind`, not three slices: its backward pass stacks once, while each slice would fill a tensor of zeros.
    """
    first, second, packed = qkv.shape
    groups = qkv.view(first, second, packed // ((shared + 2) * head_width), shared + 2, head_width)
    if shared == 1:
        q, k, v = groups.unbind(dim=3)
        return q, k, v
    q, k, v = groups.split_with_sizes((shared, 1, 1), dim=3)
    return q.flatten(2, 3), k.squeeze(3), v.squeeze(3)


def packed_attention(packed: Tensor, head_width: int, *, sequence_first: bool, scores: Scores) -> Tensor:
    """`native` attention over a packed projection with equal numbers of KV heads and query heads, without rotary
    positions or QK norm: (B, N, H·3·K) to (B, N, H·K), or (N, B, …) sequence first."""
    mask: Tensor | None = scores.mask  # type: ignore[assignment]  # callers split heads for an AttentionMask
    heads = packed.view(*packed.shape[:2], -1, 3, head_width)
    return native_packed_attention(
        heads, sequence_first, mask, causal=scores.causal, dropout=scores.dropout, scale=scores.scale
    ).flatten(2)  # fmt: skip


def token_attention(
    q: Tensor, k: Tensor, v: Tensor, backend: AttentionBackend, *, sequence_first: bool,
    scores: Scores = _PLAIN,
) -> Tensor:  # fmt: skip
    """Attention over heads still in token order: q (B, N, H, K), or (N, B, H, K) sequence first; k and v alike.

    Returns (B, N, H·V), or (N, B, H·V), with V features of a value. Sequence first, nothing is transposed: all samples'
    heads are treated as heads of one sample, unless the mask differs between samples or heads.
    """
    if not sequence_first:
        out = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), backend, scores)
        out = out.transpose(1, 2)
        if torch.compiler.is_exporting():
            # The decomposition of the exported program may choose a kernel with another layout.
            out = out.clone(memory_format=torch.contiguous_format)
        return out.flatten(2)
    tokens, batch = q.shape[:2]
    mask = scores.mask
    if mask is not None and not (isinstance(mask, Tensor) and mask.shape[:2] == (1, 1)):
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        return attention(q, k, v, backend, scores).permute(2, 0, 1, 3).flatten(2)
    if scores.sinks is not None:
        scores = scores._replace(sinks=scores.sinks.repeat(batch, 1))
    q, k, v = (t.flatten(1, 2).transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    out = attention(q, k, v, backend, scores)
    return out.squeeze(0).transpose(0, 1).reshape(tokens, batch, -1)
