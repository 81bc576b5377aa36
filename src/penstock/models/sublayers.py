"""The sub-layers of a Transformer block and their norms: self-attention with keys and values per head or with latents,
cross attention to a memory, and the MLP.

Shapes: B samples, N tokens, D width, H heads, K features per head, G KV heads. Tokens come as (B, N, D), or as
(N, B, D) where `sequence_first` is set.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.config.layer import Layer, NormKind
from penstock.config.plan import AttentionBackend
from penstock.config.stack import Stack
from penstock.dtypes import widened
from penstock.kernels.attention import (
    AttentionMask,
    Scores,
    keeps_scores,
    packed_attention,
    split_heads,
    token_attention,
)
from penstock.kernels.bias_activation import activate
from penstock.kernels.dropout import Dropout
from penstock.models.inputs import ALONE, Context, Continued


class ZeroCentredNorm(nn.RMSNorm):
    """An RMS norm that multiplies by 1 + its weight, in fp32 at least."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(widened(x), self.normalized_shape, 1.0 + widened(self.weight), self.eps)
        return normed.to(x.dtype)


def make_norm(
    norm: NormKind, features: int, *, affine: bool = True, **where: Any
) -> nn.LayerNorm | nn.RMSNorm:
    """A norm over `features`; without weights unless `affine`."""
    if norm.kind == "rms":
        kind = ZeroCentredNorm if norm.zero_centred and affine else nn.RMSNorm
        return kind(features, eps=norm.eps, elementwise_affine=affine, **where)
    return nn.LayerNorm(features, eps=norm.eps, elementwise_affine=affine, bias=norm.bias, **where)


def norm_in_its_type(norm: nn.LayerNorm | nn.RMSNorm, x: Tensor) -> Tensor:
    """Apply `norm` to x; for an RMS norm x is cast to the type of its weight first, because torch's fused kernel takes
    one type only, and autocast does not cast the input before torch 2.12."""
    if isinstance(norm, nn.RMSNorm):
        x = x.to(norm.weight.dtype)
    normed: Tensor = norm(x)
    return normed


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor], *, interleaved: bool = False) -> Tensor:
    """Turn feature i and feature i + K/2 of each head by their position's angle: (·, ·, H, K), in fp32 and back. If
    there are fewer angles than pairs, the remaining features are not changed. With `interleaved`, the pairs are
    features 2 i and 2 i + 1, which become i and i + K/2."""
    cosine, sine = rotation
    turns = 2 * cosine.shape[-1]
    if turns < x.shape[-1]:
        return torch.cat([rotate(x[..., :turns], rotation, interleaved=interleaved), x[..., turns:]], dim=-1)
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    return turned.to(x.dtype)


class _Attending(nn.Module):
    """The base of self-attention and cross attention; `backend` and `sequence_first` change how attention is computed
    and never its result.
    """

    def __init__(self, sizes: Stack, layer: Layer, **where: Any) -> None:
        super().__init__()
        self.head_width = layer.head_width
        self.scale, self.cap = layer.attention_scale, layer.score_cap
        self.rate = sizes.weights_dropout
        self.causal, self.sequence_first = False, False
        self.backend: AttentionBackend = "sdpa"
        self.scores_again = False
        """Whether the backward pass recomputes the scores instead of keeping them."""
        self.q_norm: nn.LayerNorm | nn.RMSNorm | None = None
        self.k_norm: nn.LayerNorm | nn.RMSNorm | None = None
        self.sinks: Sinks | None = None
        self.norms_heads_together = layer.qk_norm_whole
        if layer.qk_norm:
            heads, kv_heads = (layer.heads, layer.kv_heads) if layer.qk_norm_whole else (1, 1)
            self.q_norm = make_norm(layer.norm, heads * layer.head_width, **where)
            self.k_norm = make_norm(layer.norm, kv_heads * layer.head_width, **where)

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | AttentionMask | None, causal: bool | None = None
    ) -> Tensor:
        """Attention of q to k and v, all in token order: for each token the weighted mean of values, (·, ·, H·K)."""
        scores = self.scores(mask, causal)
        attend = partial(token_attention, sequence_first=self.sequence_first, scores=scores)
        tokens = q.shape[0 if self.sequence_first else 1]
        again = self.scores_again and torch.is_grad_enabled()
        if again and keeps_scores(self.backend, q, tokens, scores):
            return checkpoint(attend, q, k, v, self.backend, use_reentrant=False)  # type: ignore[no-any-return]
        return attend(q, k, v, self.backend)

    def scores(self, mask: Tensor | AttentionMask | None, causal: bool | None) -> Scores:
        """The settings of the scores in one pass: mask, scale, dropout and the like."""
        causal = self.causal if causal is None else causal
        rate, sinks = self.rate if self.training else 0.0, None if self.sinks is None else self.sinks()
        return Scores(mask, causal and mask is None, rate, self.scale, cap=self.cap, sinks=sinks)

    def normed(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys after their norms, if they have any."""
        if self.q_norm is None or self.k_norm is None:
            return q, k
        if self.norms_heads_together:
            normed = (
                norm_in_its_type(norm, x.flatten(2)) for norm, x in ((self.q_norm, q), (self.k_norm, k))
            )
            q, k = (torch.unflatten(x, 2, (-1, self.head_width)).to(v.dtype) for x in normed)
            return q, k
        # Autocast widens norms to fp32 on a GPU, but attention runs in the type of v.
        return norm_in_its_type(self.q_norm, q).to(v.dtype), norm_in_its_type(self.k_norm, k).to(v.dtype)


class Sinks(nn.Module):
    """The attention sinks: a learned logit for each head, (H,); see `penstock.kernels.sinks`."""

    def __init__(self, heads: int, **where: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, **where))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self) -> Tensor:
        return self.weight.unsqueeze(1)


class HeadShift(nn.Module):
    """Adds a bias to queries and values, and none to keys, in the order of rows of `Attention.qkv`."""

    def __init__(self, layer: Layer, **where: Any) -> None:
        super().__init__()
        self.shape = layer.queries_per_key + 1, layer.head_width
        rows = layer.kv_heads * self.shape[0] * self.shape[1]
        self.weight = nn.Parameter(torch.empty(rows, **where))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, packed: Tensor) -> Tensor:
        """packed: (·, ·, rows of queries, keys and values)."""
        bias = self.weight.to(packed.dtype).view(-1, *self.shape)
        return (
            packed + torch.cat([bias[:, :-1], torch.zeros_like(bias[:, :1]), bias[:, -1:]], dim=1).flatten()
        )


class Attention(_Attending):
    """Multi-head self-attention. The number of heads follows from the projection's outputs. `causal` lets a token see
    itself and those before it. A layer with a window takes its mask from the context. `where` holds the device and the
    type of the weights.
    """

    def __init__(self, sizes: Stack, layer: Layer, *, causal: bool = False, **where: Any) -> None:
        super().__init__(sizes, layer, **where)
        self.causal, self.windowed = causal, layer.window > 0
        self.shared, self.rotary = layer.queries_per_key, layer.rotary
        self.looked: list[tuple[Tensor, ...]] | None = None
        """If a list, each pass appends its queries, keys and values, then the normed and rotated queries and keys."""
        rows = (layer.heads + 2 * layer.kv_heads) * layer.head_width
        # Rows are ordered (KV head, {its queries, k, v}, K); kernels/attention.py says why.
        self.qkv = nn.Linear(sizes.width, rows, bias=layer.qkv_bias and layer.key_bias, **where)
        self.shift = HeadShift(layer, **where) if layer.shifted else None
        self.out = nn.Linear(layer.heads * layer.head_width, sizes.width, bias=layer.bias, **where)
        self.sinks = Sinks(layer.heads, **where) if layer.sinks else None

    def forward(self, x: Tensor, context: Context = ALONE) -> Tensor:
        packed = self.qkv(x) if self.shift is None else self.shift(self.qkv(x))
        packed = packed if context.real is None else context.real.put(packed)
        if self._stays_packed(context):
            return self.out(self._mix_packed(packed, context))  # type: ignore[no-any-return]
        q, k, v = split_heads(packed, self.head_width, self.shared)
        projected = q, k, v
        q, k = self.normed(q, k, v)
        turn = context.near_rotation if self.windowed else context.rotation
        if turn is not None and self.rotary is not None:
            q, k = (rotate(heads, turn, interleaved=self.rotary.interleaved) for heads in (q, k))
            if self.q_norm is None:
                v = v.contiguous()  # a view would keep the whole projection in memory
        if self.looked is not None:
            self.looked.append((*projected, q, k))
        mixed = self.mix(q, k, v, context.near if self.windowed else context.mask, context.causal)
        mixed = mixed if context.real is None else context.real.take(mixed)
        return self.out(mixed)  # type: ignore[no-any-return]

    def _stays_packed(self, context: Context) -> bool:
        """Whether one kernel reads the projection's output directly, without separate queries, keys and values."""
        plain = self.backend == "native" and self.shared == 1 and self.q_norm is None and self.looked is None
        plain = plain and self.cap is None and self.sinks is None
        whole = context.rotation is None and context.real is None and not self.windowed
        return plain and whole and (context.mask is None or isinstance(context.mask, Tensor))

    def _mix_packed(self, packed: Tensor, context: Context) -> Tensor:
        scores = self.scores(context.mask, context.causal)
        return packed_attention(packed, self.head_width, sequence_first=self.sequence_first, scores=scores)


class LatentAttention(_Attending):
    """Multi-head self-attention whose keys and values are computed from one latent vector per token: see
    `penstock.config.layer.Latent`.

    With a cache, tokens attend to cached latents: the projection to keys is applied to the queries, and the projection
    to values to the weighted mean of the latents, so that keys and values are never computed.
    """

    def __init__(self, sizes: Stack, layer: Layer, *, causal: bool = False, **where: Any) -> None:
        super().__init__(sizes, layer, **where)
        assert layer.latent is not None
        self.causal, self.latent, norm = causal, layer.latent, replace(layer.norm, eps=layer.latent.norm_eps)
        self.scale, self.rotary = self.scale or self.head_width**-0.5, layer.rotary
        rank, source = self.latent.query_rank, self.latent.query_rank or sizes.width
        self.q_down = nn.Linear(sizes.width, rank, bias=False, **where) if rank else None
        self.q_norm = make_norm(norm, rank, **where) if rank else None
        self.q_up = nn.Linear(source, layer.heads * self.head_width, bias=False, **where)
        self.kv_down = nn.Linear(sizes.width, self.latent.kept, bias=False, **where)
        self.kv_norm = make_norm(norm, self.latent.kv_rank, **where)
        rows = layer.heads * (self.latent.plain_width + self.latent.value_width)
        self.kv_up = nn.Linear(self.latent.kv_rank, rows, bias=False, **where)
        self.out = nn.Linear(layer.heads * self.latent.value_width, sizes.width, bias=False, **where)

    def forward(self, x: Tensor, context: Context = ALONE) -> Tensor:
        sizes, real = self.latent, context.real
        made, seen = self.kv_down(x), x
        if self.q_down is not None and self.q_norm is not None:
            seen = norm_in_its_type(self.q_norm, self.q_down(x)).to(made.dtype)
        q = self.q_up(seen)
        if real is not None:
            q, made = real.put(q), real.put(made)
        plain, turned = torch.unflatten(q, -1, (-1, self.head_width)).split_with_sizes(
            (sizes.plain_width, sizes.rotary_width), -1
        )
        latent, shared = made.unsqueeze(2).split_with_sizes((sizes.kv_rank, sizes.rotary_width), -1)
        latent = norm_in_its_type(self.kv_norm, latent).to(made.dtype)
        if context.rotation is not None and self.rotary is not None:
            turn = partial(rotate, rotation=context.rotation, interleaved=self.rotary.interleaved)
            turned, shared = turn(turned), turn(shared)
        mask, causal = context.mask, context.causal
        if isinstance(mask, Continued):
            kept = torch.cat([latent, shared], dim=-1)
            if not mask.first:
                return self.out(self._among_latents(plain, turned, kept, mask))  # type: ignore[no-any-return]
            heads = kept.permute(1, 2, 0, 3) if self.sequence_first else kept.transpose(1, 2)
            mask, causal = mask.keep(heads, heads[..., :0]), True
        pairs = torch.unflatten(
            self.kv_up(latent.squeeze(2)), -1, (-1, sizes.plain_width + sizes.value_width)
        )
        k, v = pairs.split_with_sizes((sizes.plain_width, sizes.value_width), -1)
        q, k = torch.cat([plain, turned], -1), torch.cat([k, shared.expand(*k.shape[:-1], -1)], -1)
        if self.backend != "plain" or not isinstance(mask, Tensor | None):
            # Other kernels need values as wide as keys.
            v = F.pad(v, (0, self.head_width - sizes.value_width))
        mixed = self.mix(q, k, v, mask, causal)
        mixed = torch.unflatten(mixed, -1, (-1, v.shape[-1]))[..., : sizes.value_width].flatten(2)
        return self.out(mixed if real is None else real.take(mixed))  # type: ignore[no-any-return]

    def _among_latents(self, plain: Tensor, turned: Tensor, kept: Tensor, mask: Continued) -> Tensor:
        """Attention of queries to all cached latents, these tokens' latents `kept` included: (·, ·, H·V)."""
        sizes, made = self.latent, self.kv_up
        each = sizes.plain_width + sizes.value_width
        # With an adapter, or a quantised weight, the effective weight is read off the outputs.
        weight = made.weight if isinstance(made, nn.Linear) else made(torch.eye(sizes.kv_rank).to(kept)).T
        for_keys, for_values = torch.unflatten(weight, 0, (-1, each)).split_with_sizes(
            (sizes.plain_width, sizes.value_width), 1
        )
        q = torch.cat([torch.einsum("abhk,hkr->abhr", plain, for_keys), turned], dim=-1)
        mixed = torch.unflatten(self.mix(q, kept, kept[..., :0], mask), -1, (-1, sizes.kept))[
            ..., : sizes.kv_rank
        ]
        return torch.einsum("abhr,hvr->abhv", mixed, for_values).flatten(2)


class CrossAttention(_Attending):
    """Attention of tokens to the memory in the context, which has `width` features (Vaswani et al., NeurIPS 2017,
    section 3.2.3)."""

    def __init__(self, sizes: Stack, layer: Layer, width: int, **where: Any) -> None:
        super().__init__(sizes, layer, **where)
        inner = layer.heads * layer.head_width
        self.q = nn.Linear(sizes.width, inner, bias=layer.qkv_bias, **where)
        # Rows are ordered (head, {k, v}, K).
        self.kv = nn.Linear(width, 2 * layer.kv_heads * layer.head_width, bias=layer.qkv_bias, **where)
        self.out = nn.Linear(inner, sizes.width, bias=layer.bias, **where)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        assert context.memory is not None
        q = self.q(x).unflatten(-1, (-1, self.head_width))
        k, v = self.kv(context.memory).unflatten(-1, (-1, 2, self.head_width)).unbind(dim=3)
        q, k = self.normed(q, k, v)
        return self.out(self.mix(q, k, v, context.memory_mask))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """down(activation(up(x))), with dropout after the activation. The gate's rows come first in `up`. `hidden` is the
    hidden width, by default the layer's.
    """

    def __init__(self, sizes: Stack, layer: Layer, *, hidden: int | None = None, **where: Any) -> None:
        super().__init__()
        self.activation = layer.perceptron.activation
        self.activated = False
        """Whether `up` applies the activation itself (`penstock.models.fuse`)."""
        hidden = hidden or layer.perceptron.width
        rows = hidden * (2 if layer.perceptron.gated else 1)
        self.up = nn.Linear(sizes.width, rows, bias=layer.bias, **where)
        self.dropout = Dropout(sizes.hidden_dropout) if sizes.hidden_dropout else None
        self.down = nn.Linear(hidden, sizes.width, bias=layer.bias, **where)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden = hidden if self.activated else activate(hidden, self.activation)
        return self.down(hidden if self.dropout is None else self.dropout(hidden))  # type: ignore[no-any-return]
