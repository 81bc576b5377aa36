"""The Transformer block, of the parts that a configuration's `Stack` chooses: it serves every family.

Shapes: B samples, N tokens, D width, H heads, K features per head. Tokens come as (B, N, D), or as (N, B, D)
where `sequence_first` is set. Only attention and stochastic depth depend on the order.

Modules only ever call their submodules and read sizes from the tensors that they get. So a submodule may be replaced by
one that holds a share of the weights, or computes in another type.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

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
from penstock.kernels.dropout import Dropout
from penstock.kernels.padding import Real
from penstock.kernels.residual_norm import residual_norm
from penstock.models.experts import MixtureOfExperts
from penstock.models.perceptron import MLP

_RATE_UNIT = 2.0**-24


class Context(NamedTuple):
    """The inputs of all blocks of a stack besides the tokens, in one pass. Masks are as `attention` takes them."""

    mask: Tensor | AttentionMask | None = None
    near: Tensor | AttentionMask | None = None
    """The mask of blocks with a sliding window."""
    rotation: tuple[Tensor, Tensor] | None = None
    """Cosine and sine of rotary positions, broadcast to the first half of each head's features."""
    near_rotation: tuple[Tensor, Tensor] | None = None
    """Cosine and sine for blocks with a sliding window."""
    memory: Tensor | None = None
    """Features that cross attention reads, in the order of the tokens."""
    memory_mask: Tensor | AttentionMask | None = None
    real: Real | None = None
    """Which tokens are computed, if padding is left out but attention sees it: see `penstock.kernels.padding`."""
    shares: Tensor | None = None
    """The share of each token in the balance of experts, in the order of the tokens, fp64: 0 of padding; the others of
    a sample have alike shares, and all samples together 1. None: alike ones of all."""
    routes: Tensor | None = None
    """The expert of each token, or its group of experts, in the order of the tokens, where they are given."""
    samples: Tensor | None = None
    """The number of each token's sample, in the order of the tokens, where experts are chosen by sample."""
    places: Tensor | None = None
    """The place of each token among all of the samples, sample by sample, in the order of the tokens, where experts
    have room for the first ones alone."""
    condition: Tensor | None = None
    """The vector of each sample that modulates norms, with a dimension of 1 for the tokens."""
    samples_of: tuple[Tensor, ...] = ()
    """The numbers of the samples of each expert, where experts are whole blocks."""
    causal: bool | None = None
    """Whether a token sees itself and those before it only, where no mask says so. None: as the blocks are made."""

    def take(self, samples: Tensor, along: int) -> Context:
        """The inputs of these samples alone, which are dimension `along` of the tokens."""
        mask = self.memory_mask
        if mask is not None:
            assert isinstance(mask, Tensor)
            mask = mask.index_select(0, samples)
        memory, condition = (
            None if one is None else one.index_select(along, samples) for one in (self.memory, self.condition)
        )
        return self._replace(memory=memory, memory_mask=mask, condition=condition)


_ALONE = Context()


class TokenCache(Protocol):
    """The keys and values of earlier tokens, with which a model continues them: see `penstock.decode.kv_cache`."""

    places: Tensor
    """Positions of the tokens of this pass, (N,) or (B, N)."""
    remembers: bool
    """Whether it keeps the keys and values of the memory too, so that no source need be encoded."""

    def context(self, stack: Any, x: Tensor, memory: Tensor | None) -> Context:
        """The `Context` for the blocks of a `TokenStack` in this pass."""
        ...

    def see(self, seen: Tensor) -> None:
        """Note which tokens of several memories each text sees, (B, 1, 1, M)."""
        ...


class Continued(AttentionMask):
    """An `AttentionMask` of tokens and of those before them, whose keys and values are kept."""

    first: bool
    """Whether nothing is kept yet."""

    def keep(self, k: Tensor, v: Tensor) -> Tensor | None:
        """Keep keys and values of the first tokens, (B, G, N, K), and return the mask of their scores; None: causal.
        Values without features are those of the keys."""
        raise NotImplementedError


class OneCall(Protocol):
    """A block in one call: returns its output, or None for inputs that it does not take."""

    def __call__(self, block: Block, x: Tensor, context: Context) -> Tensor | None: ...


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
    """A norm over n features; unless `affine`, without weights."""
    if norm.kind == "rms":
        kind = ZeroCentredNorm if norm.zero_centred and affine else nn.RMSNorm
        return kind(features, eps=norm.eps, elementwise_affine=affine, **where)
    return nn.LayerNorm(features, eps=norm.eps, elementwise_affine=affine, bias=norm.bias, **where)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor], *, interleaved: bool = False) -> Tensor:
    """Turn feature i and feature i + K/2 of each head by their position's angle: (·, ·, H, K), in fp32 and back. Of
    fewer angles than pairs, the features behind theirs stay as they are. `interleaved` are features 2 i and 2 i + 1,
    which become i and i + K/2."""
    cosine, sine = rotation
    turns = 2 * cosine.shape[-1]
    if turns < x.shape[-1]:
        return torch.cat([rotate(x[..., :turns], rotation, interleaved=interleaved), x[..., turns:]], dim=-1)
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    return turned.to(x.dtype)


def drop_path(branch: Tensor, rate: Tensor, *, batch_dim: int) -> Tensor:
    """Stochastic depth (Huang et al., ECCV 2016, eq. 2): zero the branch of each sample with probability `rate`, and
    scale those kept by 1 / (1 − rate).

    branch: (B, N, D), or (N, B, D) with `batch_dim` 1. `rate` is a tensor, not a number, so that blocks of
    different rates share one compiled graph and nothing waits for the device.
    """
    shape = [1] * branch.dim()
    shape[batch_dim] = branch.shape[batch_dim]
    keep = 1.0 - rate
    mask = (torch.rand(shape[batch_dim], device=branch.device) < keep).to(torch.float32) / keep
    return branch * mask.to(branch.dtype).view(shape)


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
        """Whether the backward pass computes scores again, where they would be kept for it."""
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
        """Heads in token order to the mean of the values that each token attends to: (·, ·, H·K)."""
        scores = self.scores(mask, causal)
        attend = partial(token_attention, sequence_first=self.sequence_first, scores=scores)
        tokens = q.shape[0 if self.sequence_first else 1]
        again = self.scores_again and torch.is_grad_enabled()
        if again and keeps_scores(self.backend, q, tokens, scores):
            return checkpoint(attend, q, k, v, self.backend, use_reentrant=False)  # type: ignore[no-any-return]
        return attend(q, k, v, self.backend)

    def scores(self, mask: Tensor | AttentionMask | None, causal: bool | None) -> Scores:
        """How scores are made and masked in one pass."""
        causal = self.causal if causal is None else causal
        rate, sinks = self.rate if self.training else 0.0, None if self.sinks is None else self.sinks()
        return Scores(mask, causal and mask is None, rate, self.scale, cap=self.cap, sinks=sinks)

    def normed(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys after their norms, if they have any."""
        if self.q_norm is None or self.k_norm is None:
            return q, k
        if self.norms_heads_together:
            normed = (_of_its_type(norm, x.flatten(2)) for norm, x in ((self.q_norm, q), (self.k_norm, k)))
            q, k = (torch.unflatten(x, 2, (-1, self.head_width)).to(v.dtype) for x in normed)
            return q, k
        # Autocast widens norms to fp32 on a GPU, but attention runs in the type of v.
        return _of_its_type(self.q_norm, q).to(v.dtype), _of_its_type(self.k_norm, k).to(v.dtype)


def _of_its_type(norm: nn.LayerNorm | nn.RMSNorm, x: Tensor) -> Tensor:
    """`norm` of x, of RMS norms in the type of their weights: torch has no fused kernel of two types, and before 2.12
    autocast leaves the input as it is."""
    if isinstance(norm, nn.RMSNorm):
        x = x.to(norm.weight.dtype)
    normed: Tensor = norm(x)
    return normed


class Sinks(nn.Module):
    """A number for each head of attention, (H,): see `penstock.kernels.sinks`."""

    def __init__(self, heads: int, **where: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, **where))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self) -> Tensor:
        return self.weight.unsqueeze(1)


class HeadShift(nn.Module):
    """Adds a bias to queries and values, and nothing to keys, as `Attention.qkv` orders them."""

    def __init__(self, layer: Layer, **where: Any) -> None:
        super().__init__()
        self.shape = layer.queries_per_key + 1, layer.head_width
        rows = layer.kv_heads * self.shape[0] * self.shape[1]
        self.weight = nn.Parameter(torch.empty(rows, **where))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, packed: Tensor) -> Tensor:
        """packed: (·, ·, rows of all three)."""
        bias = self.weight.to(packed.dtype).view(-1, *self.shape)
        return (
            packed + torch.cat([bias[:, :-1], torch.zeros_like(bias[:, :1]), bias[:, -1:]], dim=1).flatten()
        )


class Attention(_Attending):
    """Multi-head self-attention.

    There are as many heads as the projection returns. `causal` lets a token see itself and those before it. A layer
    with a window takes its mask from the context. `where` are the device and the type of the weights.
    """

    def __init__(self, sizes: Stack, layer: Layer, *, causal: bool = False, **where: Any) -> None:
        super().__init__(sizes, layer, **where)
        self.causal, self.windowed = causal, layer.window > 0
        self.shared, self.rotary = layer.queries_per_key, layer.rotary
        self.looked: list[tuple[Tensor, ...]] | None = None
        """Where queries, keys and values are put, for one who looks at them, and behind them queries and keys as they
        multiply, normed and rotated; none: nowhere."""
        rows = (layer.heads + 2 * layer.kv_heads) * layer.head_width
        # Rows are ordered (head of keys, {its queries, k, v}, K); kernels/attention.py says why.
        self.qkv = nn.Linear(sizes.width, rows, bias=layer.qkv_bias and layer.key_bias, **where)
        self.shift = HeadShift(layer, **where) if layer.shifted else None
        self.out = nn.Linear(layer.heads * layer.head_width, sizes.width, bias=layer.bias, **where)
        self.sinks = Sinks(layer.heads, **where) if layer.sinks else None

    def forward(self, x: Tensor, context: Context = _ALONE) -> Tensor:
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
                v = v.contiguous()  # a view would keep the whole projection, of which nothing else is needed
        if self.looked is not None:
            self.looked.append((*projected, q, k))
        mixed = self.mix(q, k, v, context.near if self.windowed else context.mask, context.causal)
        mixed = mixed if context.real is None else context.real.take(mixed)
        return self.out(mixed)  # type: ignore[no-any-return]

    def _stays_packed(self, context: Context) -> bool:
        """Whether one kernel takes queries, keys and values as the projection makes them."""
        plain = self.backend == "native" and self.shared == 1 and self.q_norm is None and self.looked is None
        plain = plain and self.cap is None and self.sinks is None
        whole = context.rotation is None and context.real is None and not self.windowed
        return plain and whole and (context.mask is None or isinstance(context.mask, Tensor))

    def _mix_packed(self, packed: Tensor, context: Context) -> Tensor:
        scores = self.scores(context.mask, context.causal)
        return packed_attention(packed, self.head_width, sequence_first=self.sequence_first, scores=scores)


class LatentAttention(_Attending):
    """Multi-head self-attention whose keys and values are made of a latent of each token: see
    `penstock.config.layer.Latent`.

    Tokens that continue others attend to kept latents: each query is multiplied with the matrix that would make keys of
    them, and the mean of latents with the one that makes values, so that no key and no value is made.
    """

    def __init__(self, sizes: Stack, layer: Layer, *, causal: bool = False, **where: Any) -> None:
        super().__init__(sizes, layer, **where)
        assert layer.latent is not None
        self.causal, self.latent, norm = causal, layer.latent, replace(layer.norm, eps=layer.latent.norm_eps)
        self.scale = self.scale or self.head_width**-0.5
        rank, source = self.latent.query_rank, self.latent.query_rank or sizes.width
        self.q_down = nn.Linear(sizes.width, rank, bias=False, **where) if rank else None
        self.q_norm = make_norm(norm, rank, **where) if rank else None
        self.q_up = nn.Linear(source, layer.heads * self.head_width, bias=False, **where)
        self.kv_down = nn.Linear(sizes.width, self.latent.kept, bias=False, **where)
        self.kv_norm = make_norm(norm, self.latent.kv_rank, **where)
        rows = layer.heads * (self.latent.plain_width + self.latent.value_width)
        self.kv_up = nn.Linear(self.latent.kv_rank, rows, bias=False, **where)
        self.out = nn.Linear(layer.heads * self.latent.value_width, sizes.width, bias=False, **where)

    def forward(self, x: Tensor, context: Context = _ALONE) -> Tensor:
        sizes, real = self.latent, context.real
        made, seen = self.kv_down(x), x
        if self.q_down is not None and self.q_norm is not None:
            seen = _of_its_type(self.q_norm, self.q_down(x)).to(made.dtype)
        q = self.q_up(seen)
        if real is not None:
            q, made = real.put(q), real.put(made)
        plain, turned = torch.unflatten(q, -1, (-1, self.head_width)).split_with_sizes(
            (sizes.plain_width, sizes.rotary_width), -1
        )
        latent, shared = made.unsqueeze(2).split_with_sizes((sizes.kv_rank, sizes.rotary_width), -1)
        latent = _of_its_type(self.kv_norm, latent).to(made.dtype)
        if context.rotation is not None:
            turn = partial(rotate, rotation=context.rotation, interleaved=sizes.interleaved)
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
        if self.backend != "plain" or not isinstance(
            mask, Tensor | None
        ):  # others take values as wide as keys
            v = F.pad(v, (0, self.head_width - sizes.value_width))
        mixed = self.mix(q, k, v, mask, causal)
        mixed = torch.unflatten(mixed, -1, (-1, v.shape[-1]))[..., : sizes.value_width].flatten(2)
        return self.out(mixed if real is None else real.take(mixed))  # type: ignore[no-any-return]

    def _among_latents(self, plain: Tensor, turned: Tensor, kept: Tensor, mask: Continued) -> Tensor:
        """Attention of queries to all that is kept, and `kept` of these tokens with it: (·, ·, H·V)."""
        sizes, made = self.latent, self.kv_up
        each = sizes.plain_width + sizes.value_width
        # An adapter beside it, or another form of its weight, says what it is by what it makes.
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


class Branch(nn.Module):
    """The operations on a residual branch before it is added: a norm, where these are on both sides, dropout,
    LayerScale, stochastic depth.

    LayerScale (Touvron et al., ICCV 2021, "Going deeper with Image Transformers", eq. 4) is a learned factor
    per feature. `drop_path` is the rate of stochastic depth, none leaves it
    out. It is held as an integer, which casting the model to half precision leaves alone, and as a tensor, so that
    blocks of different rates share one compiled graph.
    """

    drop_rate: Tensor

    def __init__(self, sizes: Stack, layer: Layer, drop_path: float | None = None, **where: Any) -> None:
        super().__init__()
        self.sequence_first, self.rate = False, drop_path
        self.initial_scale = layer.layer_scale
        self.norm = make_norm(layer.norm, sizes.width, **where) if layer.norms_branches else None
        self.dropout = Dropout(sizes.dropout) if sizes.dropout else None
        self.scale: nn.Parameter | None = None
        if layer.layer_scale is not None:
            self.scale = nn.Parameter(torch.empty(sizes.width, **where))
        self.stochastic = drop_path is not None  # read in `forward`: a rate there would be compiled in
        if self.stochastic:
            rate = torch.zeros((), dtype=torch.int32, device=where.get("device"))
            self.register_buffer("drop_rate", rate, persistent=False)

    def init_weights(self) -> None:
        """LayerScale to its initial value, and the rate of stochastic depth to this block's."""
        if self.scale is not None and self.initial_scale is not None:
            nn.init.constant_(self.scale, self.initial_scale)
        if self.rate is not None:
            with torch.no_grad():
                self.drop_rate.fill_(round(self.rate / _RATE_UNIT))

    @property
    def dropout_alone(self) -> float | None:
        """The probability of dropout where a branch gets nothing else before it is added; None where it does."""
        if self.norm is not None or self.scale is not None or self.stochastic:
            return None
        return self.dropout.p if self.dropout is not None and self.training else 0.0

    def forward(self, branch: Tensor) -> Tensor:
        if self.norm is not None:
            branch = _of_its_type(self.norm, branch)
        if self.dropout is not None:
            branch = self.dropout(branch)
        if self.scale is not None:
            branch = branch * self.scale
        if self.stochastic and self.training:
            rate = self.drop_rate.to(torch.float32) * _RATE_UNIT
            branch = drop_path(branch, rate, batch_dim=1 if self.sequence_first else 0)
        return branch


class ZeroLinear(nn.Linear):
    """A linear layer whose weight is 0 at first."""


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Features of tokens after a norm without weights, shifted and scaled by those of their sample."""
    return x * (1 + scale) + shift


class Block(nn.Module):
    """Attention and an MLP, or a mixture of experts, each added to the tokens: x + attention(norm(x)) (pre-norm), or
    norm(x + attention(x)), as the layer's `placement` says. In a `parallel` block both read one norm. Cross attention
    to a memory of `cross` features is between the two; 0: there is none.

    `drop_path` is as in `Branch`. A block of an `expert` computes its samples alone, and the others stay as they
    are. Where the layer has no norm, attention reads the tokens as they are. In a `modulated` block the condition in
    the context makes a shift, a scale and a gate of each of the two branches, where gates are 0 at first (adaLN-Zero):
    x + gate · attention(norm(x) · (1 + scale) + shift).
    """

    def __init__(
        self, sizes: Stack, layer: Layer, drop_path: float | None = None, *, causal: bool = False,
        cross: int = 0, modulated: bool = False, expert: int | None = None, **where: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.expert, self.sequence_first, affine = expert, False, not modulated
        self.joins = False
        """Whether other ranks take part in it, so that it computes even where none of its samples are here."""
        self.norm_first = layer.placement != "after"
        self.fused_norms = False
        """Whether a branch is added and normed in one pass (`penstock.kernels.residual_norm`)."""
        self.modulation = ZeroLinear(sizes.width, 6 * sizes.width, **where) if modulated else None
        first, second = layer.normed and layer.placement != "branch", layer.placement != "branch"
        self.norm1 = make_norm(layer.norm, sizes.width, affine=affine, **where) if first else nn.Identity()
        self.attention = (LatentAttention if layer.latent else Attention)(
            sizes, layer, causal=causal, **where
        )
        self.branch1 = Branch(sizes, layer, drop_path, **where)
        self.cross: CrossAttention | None = None
        if cross:
            self.cross_norm = make_norm(layer.norm, sizes.width, **where) if second else nn.Identity()
            self.cross = CrossAttention(sizes, layer, cross, **where)
            self.cross_branch = Branch(sizes, layer, drop_path, **where)
        self.whole: OneCall | None = None
        """Computes the block in inference where that is faster: see `penstock.products.blocks`."""
        norm2 = make_norm(layer.norm, sizes.width, affine=affine, **where) if second else nn.Identity()
        self.norm2 = None if layer.parallel else norm2
        self.mlp: MLP | MixtureOfExperts = (MixtureOfExperts if layer.mixture else MLP)(sizes, layer, **where)
        self.branch2 = Branch(sizes, layer, drop_path, **where)

    def forward(self, x: Tensor, context: Context = _ALONE) -> Tensor:
        if self.whole is not None and not torch.compiler.is_compiling():
            made = self.whole(self, x, context)
            if made is not None:
                return made
        return self._compute(x, context) if self.expert is None else self._of_its_samples(x, context)

    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
    def _of_its_samples(self, x: Tensor, context: Context) -> Tensor:
        """x with its expert's samples computed: how many these are differs from step to step, so that compiled code is
        `_compute` alone."""
        assert self.expert is not None
        samples, along = context.samples_of[self.expert], 1 if self.sequence_first else 0
        count = len(samples)
        if not count:
            if not (self.joins or torch.is_grad_enabled()):
                return x
            # Another expert's sample, of whose result nothing is taken: so every weight has a gradient.
            samples = torch.zeros(1, dtype=torch.int64, device=x.device)
        own = x.index_select(along, samples)
        made = self._compute(own, context.take(samples, along)).narrow(along, 0, count)
        wide = torch.promote_types(x.dtype, made.dtype)
        # Unlike `index_copy` it keeps nothing of what is put.
        x, made = x.to(wide).transpose(0, along), made.to(wide).transpose(0, along)
        return x.index_put((samples[:count],), made).transpose(0, along)

    def _compute(self, x: Tensor, context: Context) -> Tensor:
        """x + attention(norm(x)), then x + cross(norm(x)), then x + feed(norm(x)), with norms as they are placed."""
        if self.modulation is not None:
            return self._modulated(x, context)
        seen = self.norm1(x) if self.norm_first else x
        if self.norm2 is None:
            x = x + self.branch1(self.attention(seen, context))
            return x + self.branch2(self._feed(seen, context))  # type: ignore[no-any-return]
        norms: list[Any] = [self.norm2, None] if self.cross is None else [self.cross_norm, self.norm2, None]
        if not self.norm_first:
            norms = [self.norm1, *norms[:-1]]  # each sum has its own part's norm, and not the next one's
        x, seen = self._add(x, self.branch1, self.attention(seen, context), norms[0])
        if self.cross is not None:
            x, seen = self._add(x, self.cross_branch, self.cross(seen, context), norms[1])
        return self._add(x, self.branch2, self._feed(seen, context), norms[-1])[0]

    @property
    def adds_and_norms(self) -> bool:
        """Whether what it norms are sums that it makes, by norms with weights alone."""
        norms = [self.norm2, *([] if self.norm_first else [self.norm1])]
        norms += [] if self.cross is None else [self.cross_norm]
        plain = [isinstance(norm, nn.LayerNorm | nn.RMSNorm) for norm in norms]
        return self.modulation is None and all(plain) and not isinstance(self.norm2, ZeroCentredNorm)

    def _add(self, x: Tensor, part: Branch, branch: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
        """The tokens with a branch added, and the norm of them; where norms come after, twice the norm."""
        if not self.fused_norms or norm is None:
            x = x + part(branch)
            seen = x if norm is None else norm(x)
        else:
            rate = part.dropout_alone
            if rate is None:
                branch, rate = part(branch), 0.0
            # A mixture's router reads the norm in its own type, and post-norm ones are the tokens of the next sum.
            narrow = self.norm_first and not isinstance(self.mlp, MixtureOfExperts)
            x, seen = residual_norm(x, branch, norm, dropout=rate, for_products=narrow)
        return (x if self.norm_first else seen), seen

    def _modulated(self, x: Tensor, context: Context) -> Tensor:
        assert self.modulation is not None
        assert self.norm2 is not None
        assert context.condition is not None
        made = self.modulation(F.silu(context.condition))
        shift1, scale1, gate1, shift2, scale2, gate2 = made.to(x.dtype).chunk(6, dim=-1)
        seen = modulate(self.norm1(x), shift1, scale1)
        x = x + gate1 * self.branch1(self.attention(seen, context))
        if self.cross is not None:
            x = x + self.cross_branch(self.cross(self.cross_norm(x), context))
        return x + gate2 * self.branch2(self._feed(modulate(self.norm2(x), shift2, scale2), context))  # type: ignore[no-any-return]

    def _feed(self, x: Tensor, context: Context) -> Tensor:
        """The MLP of x, or the mixture of experts that takes its place."""
        if isinstance(self.mlp, MixtureOfExperts):
            known = context.shares, context.routes, context.samples, context.places
            return self.mlp(x, *known)  # type: ignore[no-any-return]
        return self.mlp(x)  # type: ignore[no-any-return]
