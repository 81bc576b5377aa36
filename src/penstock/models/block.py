"""The Transformer block of every family, built from the parts that a configuration's `Stack` chooses.

Shapes: B samples, N tokens, D width. Tokens come as (B, N, D), or as (N, B, D) where `sequence_first` is set: only
attention and stochastic depth depend on the order.

Modules only ever call their submodules and read sizes from the tensors that they get. So a submodule may be replaced by
one that holds a shard of the weights or computes in another type, and `penstock.models.wrap` can wrap a block to
recompute it, join its calls or route samples.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.config.layer import Layer
from penstock.config.stack import Stack
from penstock.kernels.dropout import Dropout
from penstock.models.experts import MixtureOfExperts
from penstock.models.inputs import ALONE, Context
from penstock.models.sublayers import (
    MLP,
    Attention,
    CrossAttention,
    LatentAttention,
    make_norm,
    norm_in_its_type,
)
from penstock.models.wrap import Around

_RATE_UNIT = 2.0**-24


class Block(nn.Module):
    """Attention and an MLP, or a mixture of experts, each added to the tokens: x + attention(norm(x)) (pre-norm), or
    norm(x + attention(x)), as the layer's `placement` says. In a `parallel` block both read the output of the same
    norm. Cross attention to a memory of `cross` features is between the two; 0: there is no cross attention.

    `drop_path` is as in `Branch`. Norms have weights if they are `affine`. Where the layer has no norm, attention reads
    the tokens as they are.
    """

    def __init__(
        self, sizes: Stack, layer: Layer, drop_path: float | None = None, *, causal: bool = False,
        cross: int = 0, affine: bool = True, **where: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.sequence_first, self.norm_first = False, layer.placement != "after"

        def norm(*, there: bool = layer.placement != "branch", affine: bool = True) -> nn.Module:
            return make_norm(layer.norm, sizes.width, affine=affine, **where) if there else nn.Identity()

        self.norm1 = norm(there=layer.normed and layer.placement != "branch", affine=affine)
        attention = LatentAttention if layer.latent else Attention
        self.attention: Attention | LatentAttention = attention(sizes, layer, causal=causal, **where)
        self.branch1 = Branch(sizes, layer, drop_path, **where)
        self.cross: CrossAttention | None = None
        if cross:
            self.cross_norm = norm()
            self.cross = CrossAttention(sizes, layer, cross, **where)
            self.cross_branch = Branch(sizes, layer, drop_path, **where)
        self.norm2 = None if layer.parallel else norm(affine=affine)
        self.mlp: MLP | MixtureOfExperts = (MixtureOfExperts if layer.mixture else MLP)(sizes, layer, **where)
        self.branch2 = Branch(sizes, layer, drop_path, **where)

    def forward(self, x: Tensor, context: Context = ALONE) -> Tensor:
        if not self.norm_first:
            x = self.norm1(x + self.branch1(self.attention(x, context)))
            if self.cross is not None:
                x = self.cross_norm(x + self.cross_branch(self.cross(x, context)))
            assert self.norm2 is not None
            return self.norm2(x + self.branch2(self.feed(x, context)))  # type: ignore[no-any-return]
        seen = self.norm1(x)
        x = x + self.branch1(self.attention(seen, context))
        if self.cross is not None:
            x = x + self.cross_branch(self.cross(self.cross_norm(x), context))
        seen = seen if self.norm2 is None else self.norm2(x)
        return x + self.branch2(self.feed(seen, context))  # type: ignore[no-any-return]

    def feed(self, x: Tensor, context: Context) -> Tensor:
        """The MLP of x, or the mixture of experts that takes its place."""
        if isinstance(self.mlp, MixtureOfExperts):
            return self.mlp(x, context.shares, context.routes, context.samples, context.places)  # type: ignore[no-any-return]
        return self.mlp(x)  # type: ignore[no-any-return]


class ModulatedBlock(Block):
    """A block whose norms are modulated by the condition in the context, which yields a shift, a scale and a gate for
    each of the two branches; gates start at 0 (adaLN-Zero): x + gate · attention(norm(x) · (1 + scale) + shift)."""

    def __init__(self, sizes: Stack, *args: Any, **options: Any) -> None:
        super().__init__(sizes, *args, affine=False, **options)
        where = {name: options[name] for name in ("device", "dtype") if name in options}
        self.modulation = ZeroLinear(sizes.width, 6 * sizes.width, **where)
        self._modules = {"modulation": self.modulation, **self._modules}  # the order in checkpoints

    def forward(self, x: Tensor, context: Context = ALONE) -> Tensor:
        assert self.norm2 is not None
        assert context.condition is not None
        made = self.modulation(F.silu(context.condition))
        shift1, scale1, gate1, shift2, scale2, gate2 = made.to(x.dtype).chunk(6, dim=-1)
        seen = modulate(self.norm1(x), shift1, scale1)
        x = x + gate1 * self.branch1(self.attention(seen, context))
        if self.cross is not None:
            x = x + self.cross_branch(self.cross(self.cross_norm(x), context))
        return x + gate2 * self.branch2(self.feed(modulate(self.norm2(x), shift2, scale2), context))  # type: ignore[no-any-return]


class ExpertSamples(Around):
    """Runs a block on the samples of its expert, and does not change other samples. Their number changes every step, so
    only the block itself is compiled."""

    kind = "samples of an expert"

    def __init__(self, block: Block, expert: int) -> None:
        super().__init__(block.forward)
        self.block, self.expert = block, expert
        self.joins = False
        """Whether other ranks take part in it, so that it must run even if this rank has no sample for it."""

    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
    def __call__(self, x: Tensor, context: Context = ALONE) -> Tensor:
        samples, along = context.samples_of[self.expert], 1 if self.block.sequence_first else 0
        count = len(samples)
        if not count:
            if not (self.joins or torch.is_grad_enabled()):
                return x
            # Run a sample of another expert and drop the result, so that every weight has a gradient.
            samples = torch.zeros(1, dtype=torch.int64, device=x.device)
        own = x.index_select(along, samples)
        made = self.forward(own, context.take(samples, along)).narrow(along, 0, count)
        wide = torch.promote_types(x.dtype, made.dtype)
        # Unlike `index_copy` it saves nothing for the backward pass.
        x, made = x.to(wide).transpose(0, along), made.to(wide).transpose(0, along)
        return x.index_put((samples[:count],), made).transpose(0, along)


class Branch(nn.Module):
    """The operations on a residual branch before it is added: a norm (if norms are on both sides), dropout, LayerScale,
    stochastic depth.

    LayerScale (Touvron et al., ICCV 2021, "Going deeper with Image Transformers", eq. 4) is a learned factor per
    feature. `drop_path` is the rate of stochastic depth; None: there is none. It is stored as an integer, so that
    casting the model to half precision does not round it, and as a tensor, so that blocks of different rates share one
    compiled graph.
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
        """Set LayerScale to its initial value, and the rate of stochastic depth to this block's."""
        if self.scale is not None and self.initial_scale is not None:
            nn.init.constant_(self.scale, self.initial_scale)
        if self.rate is not None:
            with torch.no_grad():
                self.drop_rate.fill_(round(self.rate / _RATE_UNIT))

    @property
    def dropout_alone(self) -> float | None:
        """The probability of dropout if no other operation is on the branch; else None."""
        if self.norm is not None or self.scale is not None or self.stochastic:
            return None
        return self.dropout.p if self.dropout is not None and self.training else 0.0

    def forward(self, branch: Tensor) -> Tensor:
        if self.norm is not None:
            branch = norm_in_its_type(self.norm, branch)
        if self.dropout is not None:
            branch = self.dropout(branch)
        if self.scale is not None:
            branch = branch * self.scale
        if self.stochastic and self.training:
            rate = self.drop_rate.to(torch.float32) * _RATE_UNIT
            branch = drop_path(branch, rate, batch_dim=1 if self.sequence_first else 0)
        return branch


class ZeroLinear(nn.Linear):
    """A linear layer whose weight is initialised to 0."""


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Shift and scale normalised features x of tokens by the vectors of their sample: x · (1 + scale) + shift."""
    return x * (1 + scale) + shift


def drop_path(branch: Tensor, rate: Tensor, *, batch_dim: int) -> Tensor:
    """Stochastic depth (Huang et al., ECCV 2016, eq. 2): zero the branch of each sample with probability `rate`, and
    scale all other branches by 1 / (1 − rate).

    branch: (B, N, D), or (N, B, D) with `batch_dim` 1. `rate` is a tensor, not a number, so that blocks of
    different rates share one compiled graph and nothing waits for the device.
    """
    shape = [1] * branch.dim()
    shape[batch_dim] = branch.shape[batch_dim]
    keep = 1.0 - rate
    mask = (torch.rand(shape[batch_dim], device=branch.device) < keep).to(torch.float32) / keep
    return branch * mask.to(branch.dtype).view(shape)
