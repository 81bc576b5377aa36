"""A block of a Transformer as data: `Layer` says everything about it.

Whoever builds, splits, prices or prunes a block asks its layer alone. A `Stack` is what users write; it makes layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from penstock.config.activations import UNGATED, Mlp
from penstock.config.convert import Positive, PositiveShare, Range

Norm = Literal["layer", "rms"]
Placement = Literal["before", "after", "both"]
Features = Annotated[int, Range(1, 1 << 20)]
Heads = Annotated[int, Range(1, 1 << 16)]
Scaling = Literal["none", "linear", "llama3", "yarn", "longrope"]
Router = Literal["softmax", "sigmoid", "given"]


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotary positions: pairs of features turn, each at its own rate (Su et al., 2021, "RoFormer", section 3.2)."""

    base: Positive = 10000.0
    """The slowest pair turns once in about 2π times so many positions."""
    scaling: Scaling = "none"
    """How longer texts than those of training are fitted in: `linear` slows all pairs down (Chen et al., 2023);
    `llama3` (Grattafiori et al., 2024) and `yarn` (Peng et al., ICLR 2024) the slow ones only; `longrope` (Ding et al.,
    ICML 2024) each pair as `short` and `long` say."""
    factor: Annotated[float, Range(1, 1 << 20)] = 1.0
    """How many times longer texts become."""
    trained: Annotated[int, Range(2, 1 << 31)] = 8192
    """Positions of training, for `llama3`, `yarn` and `longrope`."""
    low: Positive = 1.0
    """Pairs that turn fewer times within `trained` positions are slowed down by the whole factor."""
    high: Positive = 4.0
    """Pairs that turn more often are left as they are; those between are slowed down in part."""
    truncate: bool = True
    """Whether `yarn` rounds the numbers of the first and the last of these outwards to whole ones."""
    short: tuple[Positive, ...] = ()
    """How many times each pair is slowed down in samples of at most `trained` tokens, for `longrope`."""
    long: tuple[Positive, ...] = ()
    """The same in longer samples, and in texts that may become longer as they are continued."""
    share: PositiveShare = 1.0
    """Share of a head's features that turn, the first ones; the others stay as they are."""

    def turned(self, features: int) -> int:
        """How many of a head's features turn."""
        return int(features * self.share)


def unscaled(rotary: Rotary, base: float) -> Rotary:
    """The same positions with another base, for texts of the length of training."""
    return Rotary(base=base, share=rotary.share)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormKind:
    """A kind of norm. Fields are as those of `Stack` that begin with `norm`."""

    kind: Norm
    eps: float
    bias: bool
    """Whether it has a shift."""
    zero_centred: bool = False

    @property
    def tensors(self) -> int:
        """Parameters that it has, each with as many elements as features."""
        return 1 + self.bias


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """The perceptron of a block, or of one expert."""

    width: int
    """Hidden features."""
    activation: Mlp

    @property
    def gated(self) -> bool:
        """Whether a third matrix makes a gate."""
        return self.activation in UNGATED


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMixture:
    """Experts, and how those of a token are chosen. Fields are as those of `Stack` of the same names."""

    expert: FeedForward
    experts: int
    experts_per_token: int
    shared_experts: int
    router: Router
    router_bias: bool
    router_groups: int
    groups_per_token: int
    router_normalised: bool
    router_jitter: float
    expert_dropout: float
    balance: float
    z_loss: float
    bias_rate: float
    capacity: float | None
    sample_capacity: int | None
    labels: int
    expert_of: tuple[int, ...]

    @property
    def learns_routes(self) -> bool:
        """Whether a router chooses experts, or some of the given group."""
        return self.router != "given" or self.router_groups > 1

    @property
    def balances(self) -> bool:
        """Whether routers have a balance loss."""
        return self.balance > 0 and self.learns_routes and self.router != "sigmoid"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """The sizes in which the blocks of a stack may differ, as a pruned model saves them."""

    heads: Heads
    """Attention heads."""
    kv: Heads
    """KV heads."""
    hidden: Features
    """Width of the MLP, or of one expert."""
    mixture: bool = False
    """Whether the MLP is a mixture of experts."""
    window: Annotated[int, Range(0, 1 << 28)] = 0
    """Tokens that a token attends to; 0 is all."""
    normed: bool = True
    """Whether a norm comes before its attention, or after it."""
    routed: bool = False
    """Whether it computes the samples of one expert alone. Such layers come one for each expert, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One block, whole. Blocks of equal layers are of one kind. Fields are as those of `Stack` of the same names, of
    this block alone."""

    heads: int
    kv_heads: int
    head_width: int
    """Features of one head."""
    feed: FeedForward | ExpertMixture
    norm: NormKind
    placement: Placement
    """Where norms are: `before` attention and feed-forward, `after` each residual sum, or `both`: before each of these
    parts, and on what it returns, before the sum."""
    normed: bool = True
    """Whether attention has such a norm."""
    qk_norm: bool = False
    attention_scale: float | None = None
    score_cap: float | None = None
    rotary: Rotary | None = None
    """How queries and keys are turned; none: they are not."""
    window: int = 0
    """Tokens that a token attends to; 0 is all."""
    sinks: bool = False
    parallel: bool = False
    bias: bool = True
    qkv_bias: bool = True
    layer_scale: float | None = None
    routed: bool = False
    """Whether it computes the samples of one expert alone."""

    @property
    def mixture(self) -> ExpertMixture | None:
        """Its experts, if its feed-forward is a mixture."""
        return self.feed if isinstance(self.feed, ExpertMixture) else None

    @property
    def perceptron(self) -> FeedForward:
        """Its perceptron, or that of one of its experts."""
        return self.feed.expert if isinstance(self.feed, ExpertMixture) else self.feed

    @property
    def queries_per_key(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def sizes(self) -> LayerSizes:
        """The sizes in which it may differ from other layers of its stack."""
        return LayerSizes(
            heads=self.heads, kv=self.kv_heads, hidden=self.perceptron.width, mixture=self.mixture is not None,
            window=self.window, normed=self.normed, routed=self.routed,
        )  # fmt: skip

    def resized(self, *, kv_heads: int | None = None, hidden: int | None = None) -> Layer:
        """The layer with another number of KV heads, each with as many queries as before, or hidden features."""
        groups = kv_heads or self.kv_heads
        perceptron = replace(self.perceptron, width=hidden or self.perceptron.width)
        feed = perceptron if self.mixture is None else replace(self.mixture, expert=perceptron)
        return replace(self, kv_heads=groups, heads=groups * self.queries_per_key, feed=feed)
