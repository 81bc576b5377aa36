"""The parts of a model's heads: the output over a vocabulary, and what comes before it or before classes; and the
condition that modulates norms.

Shapes: B samples, N tokens, D width, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.config.activations import UNGATED
from penstock.config.graph import Condition, VectorHead
from penstock.config.stack import Stack
from penstock.dtypes import widened
from penstock.kernels.attention import autocasts
from penstock.kernels.choices import loss_budget
from penstock.kernels.cross_entropy import capped
from penstock.kernels.distil import Taught
from penstock.kernels.linear_cross_entropy import linear_cross_entropy
from penstock.kernels.sample_losses import sample_losses
from penstock.kernels.split_linear import linear_apart
from penstock.kernels.vocabulary import Share
from penstock.models.attention import CrossAttention, make_norm
from penstock.models.inputs import Context
from penstock.models.perceptron import MLP, activate

TIME_STEPS = 1000.0
"""A time of 1 is embedded as DDPM's last of 1,000 steps."""


class Vocabulary(nn.Linear):
    """Features (…, D) to logits over the vocabulary (…, V); given targets (…), to the sum of their losses, 0-d, or with
    `by_sample` to that of each sample, (B, N, D) and (B, N) to (B,), which is made in chunks whatever `chunked` is."""

    chunked = False
    """Whether logits of which only the loss is asked for are made for some rows at a time."""
    tied = False
    """Whether the weight is the table that embeds tokens, too."""
    share: Share | None = None
    """The entries of the vocabulary whose weights lie here, where ranks share them out."""
    taught: Taught | None = None
    """A teacher's side of the loss of the next targets. It is made in chunks whatever `chunked` is, so that the logits
    of both are never held."""
    cap = 0.0
    """Logits z become c·tanh(z / c); 0: they stay as they are."""
    passes = False
    """Whether it gives back the features that it gets: a teacher's, whose logits its student's head makes."""

    def forward(
        self, x: Tensor, targets: Tensor | None = None, smoothing: float = 0.0, by_sample: bool = False
    ) -> Tensor:
        if self.passes:
            return x
        # Of a table that embeds tokens too, two gradients are added.
        added = self.tied and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        linear = linear_apart if added and not autocasts(x) else F.linear
        if targets is None:
            return capped(linear(x, self.weight, self.bias), self.cap)
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
            linear=linear, taught=taught, cap=self.cap,
        )  # fmt: skip


class Transform(nn.Module):
    """A dense layer, its activation and a norm before the output of masked words or classes, (…, D) → (…, D)."""

    def __init__(self, sizes: Stack, **where: Any) -> None:
        super().__init__()
        self.activation = UNGATED.get(sizes.mlp, sizes.mlp)
        self.dense = nn.Linear(sizes.width, sizes.width, bias=sizes.bias, **where)
        self.norm = make_norm(sizes.norm_kind, sizes.width, **where)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(activate(self.dense(x), self.activation))  # type: ignore[no-any-return]


class Conditioner(nn.Module):
    """Times and classes to the vectors that modulate norms (Peebles & Xie, ICCV 2023, "DiT", section 3.2)."""

    def __init__(self, condition: Condition, width: int, **where: Any) -> None:
        super().__init__()
        self.waves, self.none = condition.frequencies // 2, condition.classes
        self.up = nn.Linear(2 * self.waves, width, **where)
        self.down = nn.Linear(width, width, **where)
        self.classes = nn.Embedding(condition.classes + 1, width, **where) if condition.classes else None

    def forward(self, times: Tensor, classes: Tensor | None = None) -> Tensor:
        """times (B,) in [0, 1], in fp64 if the model may round what it is given to half precision; classes (B,) int64,
        None: no sample has one. Gives (B, D)."""
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
    """Attention of a learned query to a sample's tokens, and a perceptron over that: (B, N, D) → (B, D)."""

    def __init__(self, sizes: Stack, **where: Any) -> None:
        super().__init__()
        layer = sizes.plain_layer
        self.query = nn.Parameter(torch.empty(sizes.width, **where))
        self.attention = CrossAttention(sizes, layer, sizes.width, **where)
        self.norm = make_norm(sizes.norm_kind, sizes.width, **where)
        self.mlp = MLP(sizes, layer, **where)

    def init_weights(self) -> None:
        """The query as class tokens are drawn."""
        nn.init.normal_(self.query, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query.expand(x.shape[0], 1, -1)
        tokens = 1 - self.attention.sequence_first  # attention takes its tokens in the order of the blocks
        if not tokens:
            x, query = x.transpose(0, 1), query.transpose(0, 1)
        pooled = self.attention(query, Context(memory=x))
        return (pooled + self.mlp(self.norm(pooled))).squeeze(tokens)  # type: ignore[no-any-return]


class UnitVectors(nn.Linear):
    """A sample's vector (B, D) to what a `VectorHead` gives, (B, E) in fp32, or (B, E + 1) with an offset."""

    MOST = 100.0
    """The greatest factor (Radford et al., ICML 2021, section 2.5)."""

    def __init__(self, head: VectorHead, width: int, **where: Any) -> None:
        super().__init__(width, head.features, bias=False, **where)
        self.scale, self.offset = head.scale, head.offset
        self.learned: nn.Parameter | None = None
        """The logarithm of the factor, and the offset if there is one."""
        if self.scale is not None:
            self.learned = nn.Parameter(torch.empty(1 if self.offset is None else 2, **where))

    def init_weights(self) -> None:
        """Factor and offset to their first values."""
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
