"""Multi-head self-attention: softmax(q kᵀ / √K) v, in one plain form and through torch's fused ones.

Shapes: B samples, N tokens, H heads, K features per head, D = H·K. The packed form takes the output of one
fused qkv projection whose features are ordered (head, {q, k, v}, K). Two things follow from grouping by head:

- A contiguous slice of the projection's rows is a whole number of heads, so that heads can be split over
  devices.
- Sequence first, (N, B, H, 3, K), sample and head merge into one strided dimension of B·H batched products,
  so that q, k and v are read in place; and a fused kernel that sees one sample of B·H heads writes (N, B, H,
  K) directly. Batch first, (B, N, H, 3, K), they do not merge, and batched products first copy q, k and v.
"""

from __future__ import annotations

import functools
import math
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.config.plan import AUTO_PLAIN_TOKENS, AttentionBackend
from penstock.errors import ConfigError

BACKENDS: tuple[AttentionBackend, ...] = get_args(AttentionBackend)

_PINNED = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
# How torch words it, on a GPU and on a CPU.
_NO_KERNEL = ("No available kernel", "No viable backend")


def chosen_backend(
    backend: AttentionBackend, device: torch.device, dtype: torch.dtype, tokens: int
) -> AttentionBackend:
    """The backend that `auto` means for these inputs; any other is returned as it is.

    On a CPU with wide vectors or matrix units the plain form wins for short sequences in bf16; elsewhere torch's own
    choice is taken. Without them batched products in bf16 run at about 1 GFLOP/s, and SDPA, whose kernel works in fp32
    inside, is 20 times faster.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"There is no attention backend {backend!r}; choose one of {', '.join(BACKENDS)}.")
    if backend != "auto":
        return backend
    on_cpu = device.type == "cpu" and dtype == torch.bfloat16
    return "plain" if on_cpu and tokens <= AUTO_PLAIN_TOKENS and _wide_vectors() else "sdpa"


@functools.cache
def _wide_vectors() -> bool:
    """Whether oneDNN has batched products in bf16 for this CPU: it asks for AVX-512."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(available and torch.backends.cpu.get_cpu_capability() == "AVX512")


def attention(q: Tensor, k: Tensor, v: Tensor, backend: AttentionBackend = "sdpa") -> Tensor:
    """Attend over all tokens. q, k, v: (B, H, N, K), of any strides; returns (B, H, N, K).

    `plain` works in the type of its input; its softmax accumulates in fp32 and rounds once. `sdpa` is torch's
    own choice of kernel, `auto` ours (see `chosen_backend`), and `flash`, `efficient`, `cudnn` and `math` pin one of
    torch's.

    Raises ConfigError when a pinned kernel cannot take these inputs.
    """
    backend = chosen_backend(backend, q.device, q.dtype, q.shape[-2])
    if backend == "plain":
        return plain_attention(q, k, v)
    if backend == "sdpa":
        return F.scaled_dot_product_attention(q, k, v)
    return _pinned(q, k, v, backend)


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two matrix products and a softmax: the reference that every other form is tested against."""
    samples, heads, tokens, width = q.shape
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    # The product scales as it writes. With beta 0 its first argument is never read.
    unread = q.new_zeros(1, 1, 1)
    scores = torch.baddbmm(unread, q, k.transpose(1, 2), beta=0, alpha=1.0 / math.sqrt(width))
    # The type is given because autocast would otherwise widen the (N, N) scores to fp32.
    weights = torch.softmax(scores, dim=-1, dtype=scores.dtype)
    return torch.bmm(weights, v).view(samples, heads, tokens, width)


def _pinned(q: Tensor, k: Tensor, v: Tensor, backend: str) -> Tensor:
    try:
        with sdpa_kernel(_PINNED[backend]):
            return F.scaled_dot_product_attention(q, k, v)
    except RuntimeError as error:
        if not any(words in str(error) for words in _NO_KERNEL):
            raise
        raise ConfigError(
            f"plan.attention {backend!r} has no kernel for {q.dtype} on {q.device.type} with {q.shape[-1]} "
            f"features per head; use attention 'sdpa' or 'auto'."
        ) from error


def split_heads(qkv: Tensor, head_width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views q, k, v of a packed projection of any number of heads: (·, ·, H·3·K) → three of (·, ·, H, K).

    `unbind` rather than three slices: its backward stacks once, where each slice would fill a tensor of
    zeros.
    """
    first, second, packed = qkv.shape
    q, k, v = qkv.view(first, second, packed // (3 * head_width), 3, head_width).unbind(dim=3)
    return q, k, v


def token_attention(
    q: Tensor, k: Tensor, v: Tensor, backend: AttentionBackend, *, sequence_first: bool
) -> Tensor:
    """Attention over heads still in token order: q, k, v (B, N, H, K), or (N, B, H, K) sequence first.

    Returns (B, N, D), or (N, B, D). Sequence first, nothing is transposed: all samples' heads are taken for
    the heads of one sample.
    """
    if not sequence_first:
        out = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), backend)
        return out.transpose(1, 2).flatten(2)
    tokens, batch, heads, width = q.shape
    q, k, v = (t.flatten(1, 2).transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    out = attention(q, k, v, backend)
    return out.squeeze(0).transpose(0, 1).reshape(tokens, batch, heads * width)
