"""The parts of a model's heads: the output over a vocabulary, layers before it or before the output over classes; and
the condition that modulates norms.

Shapes: B samples, N tokens, D width, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.config.activations import UNGATED
from penstock.config.graph import (
    ClassHead,
    Condition,
    Graph,
    Head,
    PatchInput,
    PixelHead,
    VectorHead,
    WordHead,
    part_of,
)
from penstock.config.stack import Stack
from penstock.dtypes import widened
from penstock.errors import ConfigError
from penstock.kernels.attention import autocasts
from penstock.kernels.bias_activation import activate
from penstock.kernels.choices import loss_budget
from penstock.kernels.cross_entropy import capped
from penstock.kernels.distil import Taught
from penstock.kernels.dropout import Dropout
from penstock.kernels.linear_cross_entropy import linear_cross_entropy
from penstock.kernels.probed_linear import probed_linear
from penstock.kernels.sample_losses import sample_losses
from penstock.kernels.split_linear import linear_apart
from penstock.kernels.vocabulary import Share
from penstock.models.block import ZeroLinear
from penstock.models.inputs import Context
from penstock.models.sublayers import MLP, CrossAttention, make_norm

TIME_STEPS = 1000.0
"""A time of 1 is embedded as the last of DDPM's 1,000 steps."""


class Vocabulary(nn.Linear):
    """Features (…, D) to logits over the vocabulary (…, V); with targets (…), to the sum of the losses, 0-d. With
    `by_sample`, (B, N, D) and targets (B, N) to the sum for each sample, (B,), which is computed in chunks even if not
    `chunked`."""

    chunked = False
    """Whether the loss computes its logits in chunks of rows."""
    tied = False
    """Whether the weight is shared with the table that embeds tokens."""
    share: Share | None = None
    """The entries of the vocabulary whose weights this rank has, if ranks split the vocabulary."""
    taught: Taught | None = None
    """The teacher's side of the next call's loss, which is then always computed in chunks, so that the logits of
    teacher and student are never stored as a whole."""
    cap = 0.0
    """The cap c of logits z, which become c·tanh(z / c); 0: no cap."""
    z_loss = 0.0
    """In training, the factor of the squared log-sum-exp of each row of logits in the loss."""
    probed = False
    """Whether each product takes the library that was measured to be faster, where logits are computed as a whole."""
    passes = False
    """Whether it returns its input: for a teacher, whose logits the student's head computes."""

    def forward(
        self, x: Tensor, targets: Tensor | None = None, smoothing: float = 0.0, by_sample: bool = False
    ) -> Tensor:
        if self.passes:
            return x
        # The weight of a tied table receives two gradients, which are added.
        added = self.tied and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        linear = linear_apart if added and not autocasts(x) else F.linear
        linear = probed_linear if self.probed else linear
        if targets is None:
            logits = linear(x, self.weight, self.bias)
            return capped(logits, self.cap) if self.cap else logits
        most = loss_budget(x.device.type)
        if by_sample:
            assert self.share is None
            assert self.taught is None
            return sample_losses(
                x, self.weight, self.bias, targets, smoothing=smoothing, budget=most, cap=self.cap
            )
        budget, taught = most if self.chunked or self.taught else None, self.taught
        if taught is not None and self.share is not None:
            here = slice(self.share.start, self.share.start + len(self.weight))
            bias = None if taught.bias is None else taught.bias[here]
            taught = taught._replace(weight=taught.weight[here], bias=bias)
        return linear_cross_entropy(
            x, self.weight, self.bias, targets, smoothing=smoothing, budget=budget, share=self.share,
            linear=linear, taught=taught, cap=self.cap, z_loss=self.z_loss if self.training else 0.0,
        )  # fmt: skip


def set_z_loss(model: nn.Module, factor: float) -> None:
    """Let the model's logits have a z-loss. Raises ConfigError if it has no logits over a vocabulary."""
    heads = [module for module in model.modules() if isinstance(module, Vocabulary)]
    if not heads:
        raise ConfigError(
            f"recipe.z_loss is {factor:g}, but this model has no logits over a vocabulary that Penstock computes; "
            "leave z_loss out."
        )
    for head in heads:
        head.z_loss = factor


class Transform(nn.Module):
    """A dense layer, an activation and a norm before the output over masked words or classes, (…, D) → (…, D)."""

    def __init__(self, sizes: Stack, **where: Any) -> None:
        super().__init__()
        self.activation = UNGATED.get(sizes.mlp, sizes.mlp)
        self.dense = nn.Linear(sizes.width, sizes.width, bias=sizes.bias, **where)
        self.norm = make_norm(sizes.norm_kind, sizes.width, **where)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(activate(self.dense(x), self.activation))  # type: ignore[no-any-return]


class Conditioner(nn.Module):
    """Embeds times and classes as the vectors that modulate norms (Peebles & Xie, ICCV 2023, "DiT", section 3.2)."""

    def __init__(self, condition: Condition, width: int, **where: Any) -> None:
        super().__init__()
        self.waves, self.none = condition.frequencies // 2, condition.classes
        self.up = nn.Linear(2 * self.waves, width, **where)
        self.down = nn.Linear(width, width, **where)
        self.classes = nn.Embedding(condition.classes + 1, width, **where) if condition.classes else None

    def forward(self, times: Tensor, classes: Tensor | None = None) -> Tensor:
        """times (B,) in [0, 1], in fp64 if the model may round its inputs to half precision; classes (B,) int64, None:
        no sample has a class. Returns (B, D)."""
        counted = torch.arange(self.waves, device=times.device, dtype=torch.float64)
        angles = times.double()[:, None] * (TIME_STEPS * torch.exp(counted * (-math.log(1e4) / self.waves)))
        embedded = torch.cat([angles.cos(), angles.sin()], dim=1)
        x: Tensor = self.down(F.silu(self.up(embedded.to(self.up.weight.dtype))))
        if self.classes is None:
            return x
        classes = torch.full_like(times, self.none, dtype=torch.int64) if classes is None else classes
        return x + self.classes(classes)  # type: ignore[no-any-return]


class Pooler(nn.Module):
    """A dense layer and tanh over a sample's vector: (B, D) → (B, D)."""

    def __init__(self, sizes: Stack, **where: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(sizes.width, sizes.width, **where)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.dense(x))


class AttentionPool(nn.Module):
    """Attention of a learned query to a sample's tokens, followed by a perceptron: (B, N, D) → (B, D)."""

    def __init__(self, sizes: Stack, **where: Any) -> None:
        super().__init__()
        layer = sizes.plain_layer
        self.query = nn.Parameter(torch.empty(sizes.width, **where))
        self.attention = CrossAttention(sizes, layer, sizes.width, **where)
        self.norm = make_norm(sizes.norm_kind, sizes.width, **where)
        self.mlp = MLP(sizes, layer, **where)

    def init_weights(self) -> None:
        """Initialise the query like a class token."""
        nn.init.normal_(self.query, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query.expand(x.shape[0], 1, -1)
        tokens = 1 - self.attention.sequence_first  # attention expects tokens in the blocks' order
        if not tokens:
            x, query = x.transpose(0, 1), query.transpose(0, 1)
        pooled = self.attention(query, Context(memory=x))
        return (pooled + self.mlp(self.norm(pooled))).squeeze(tokens)  # type: ignore[no-any-return]


class UnitVectors(nn.Linear):
    """The output of a `VectorHead` for a sample's vector (B, D): (B, E) in fp32, or (B, E + 1) with an offset."""

    MOST = 100.0
    """The largest factor (Radford et al., ICML 2021, section 2.5)."""

    def __init__(self, head: VectorHead, width: int, **where: Any) -> None:
        super().__init__(width, head.features, bias=False, **where)
        self.scale, self.offset = head.scale, head.offset
        self.learned: nn.Parameter | None = None
        """The logarithm of the factor, and the offset if any."""
        if self.scale is not None:
            self.learned = nn.Parameter(torch.empty(1 if self.offset is None else 2, **where))

    def init_weights(self) -> None:
        """Set factor and offset to their initial values."""
        if self.learned is not None and self.scale is not None:
            values = [math.log(self.scale), *([] if self.offset is None else [self.offset])]
            with torch.no_grad():
                self.learned.copy_(torch.tensor(values))

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.weight)
        x = F.normalize(widened(x), dim=-1)
        last = x.new_ones(1)
        if self.learned is not None:
            learned = self.learned.to(x.dtype)
            x, last = x * learned[0].clamp(max=math.log(self.MOST)).exp(), learned[1:]
        return x if self.offset is None else torch.cat([x, last.expand(len(x), 1)], dim=1)


def parts_of_head(graph: Graph, head: Head, **where: Any) -> dict[str, nn.Module]:
    """The modules of a head, by their names in the model."""
    sizes, parts = graph.run(head.run).stack, dict[str, nn.Module]()
    if isinstance(head, WordHead):
        if head.transform:
            parts[part_of(head, "transform")] = Transform(sizes, **where)
        words = parts[head.name] = Vocabulary(sizes.width, head.vocabulary, bias=head.bias, **where)
        words.cap = head.cap
    elif isinstance(head, ClassHead):
        if head.before == "norm":
            parts[part_of(head, "norm")] = make_norm(sizes.norm_kind, sizes.width, **where)
        elif head.before != "none":
            pooler = Pooler if head.before == "tanh" else Transform
            parts[part_of(head, "pooler")] = pooler(sizes, **where)
        if head.pool == "attention":
            parts[part_of(head, "attention_pool")] = AttentionPool(sizes, **where)
        if head.dropout:
            parts[part_of(head, "dropout")] = Dropout(head.dropout)
        parts |= {name: nn.Linear(head.vectors * sizes.width, head.classes, **where) for name in head.linears}
    elif isinstance(head, PixelHead):
        plain, one = graph.condition is None, graph.input_of(graph.run(head.run))
        assert isinstance(one, PatchInput)
        parts[part_of(head, "norm")] = make_norm(sizes.norm_kind, sizes.width, affine=plain, **where)
        if not plain:
            parts[part_of(head, "modulation")] = ZeroLinear(sizes.width, 2 * sizes.width, **where)
        parts[head.name] = ZeroLinear(sizes.width, one.channels * one.patch_size**2, **where)
    elif isinstance(head, VectorHead):
        parts[head.name] = UnitVectors(head, sizes.width, **where)
    return parts
