"""A block of a Transformer as data: `Layer` says everything about it.

Whoever builds, splits, prices or prunes a block asks its layer alone. A `Stack` is what users write; it makes layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from penstock.config.activations import UNGATED, Mlp
from penstock.config.convert import NotNegative, Positive, PositiveShare, Range

Norm = Literal["layer", "rms"]
Placement = Literal["before", "after", "both", "branch"]
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
    """Factors in longer samples, and in texts that may become longer as they are continued."""
    interleaved: bool = False
    """Whether features 2 i and 2 i + 1 turn together, as in DeepSeek's attention with latents, and not i and i + half
    of those that turn."""
    share: PositiveShare = 1.0
    """Share of a head's features that turn, the first ones; the others stay as they are."""
    mscale: NotNegative = 0.0
    """With `yarn`, cosine and sine grow with the logarithm of `factor` as this says, and shrink as `mscale_all` says
    (DeepSeek-V2); 0 for either: they grow as in the paper."""
    mscale_all: NotNegative = 0.0
    """With `yarn`, scores grow by the square of what this makes of the logarithm of `factor`; 0: not at all."""

    def turned(self, features: int) -> int:
        """How many of a head's features turn."""
        return int(features * self.share)

    def growth(self, mscale: float = 1.0) -> float:
        """A factor that grows with the logarithm of how much longer texts became."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.scaling == "yarn" else 1.0


def unscaled(rotary: Rotary, base: float) -> Rotary:
    """The same positions with another base, for texts of the length of training."""
    return Rotary(base=base, share=rotary.share, interleaved=rotary.interleaved)


@dataclass(frozen=True, kw_only=True)
class Latent:
    """A short vector of each token of which attention makes keys and values: all that generation keeps of the token,
    with a rotated part of the keys that all heads share (DeepSeek-AI, 2024, "DeepSeek-V2", section 2.1)."""

    kv_rank: Features = 512
    """Features of the latent of keys and values."""
    query_rank: Features | None = 1536
    """Features of the latent of queries; none: queries are made of the token itself."""
    plain_width: Features = 128
    """Features of a head's queries and keys that know no position."""
    rotary_width: Features = 64
    """Rotated features of a head, which are the same for the keys of all heads."""
    value_width: Features = 128
    """Features of a head's values."""
    norm_eps: Positive = 1e-6
    """`norm_eps` of the norms of latents."""

    @property
    def head_width(self) -> int:
        """Features of a head's queries and keys."""
        return self.plain_width + self.rotary_width

    @property
    def kept(self) -> int:
        """Elements that generation keeps of a token."""
        return self.kv_rank + self.rotary_width


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
    group_best: int
    router_normalised: bool
    router_scale: float
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
    turned: bool = True
    """Whether it has the rotary positions of its stack, if that has any."""
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
    """Where norms are: `before` attention and feed-forward, `after` each residual sum, on what each of these parts
    returns (`branch`), before the sum, or `both`: before each part and on what it returns."""
    normed: bool = True
    """Whether attention has such a norm."""
    turned: bool = True
    """Whether it has the rotary positions of its stack, if that has any."""
    qk_norm: bool = False
    qk_norm_whole: bool = False
    attention_scale: float | None = None
    score_cap: float | None = None
    rotary: Rotary | None = None
    """How queries and keys are turned; none: they are not."""
    latent: Latent | None = None
    window: int = 0
    """Tokens that a token attends to; 0 is all."""
    sinks: bool = False
    parallel: bool = False
    bias: bool = True
    qkv_bias: bool = True
    key_bias: bool = True
    layer_scale: float | None = None
    routed: bool = False
    """Whether it computes the samples of one expert alone."""

    @property
    def norms_branches(self) -> bool:
        """Whether what attention and feed-forward return is normalised before the sum."""
        return self.placement in ("both", "branch")

    @property
    def shifted(self) -> bool:
        """Whether its projection to queries, keys and values has a bias of all but the keys."""
        return self.qkv_bias and not self.key_bias and self.latent is None

    @property
    def mixture(self) -> ExpertMixture | None:
        """The experts, if the feed-forward is a mixture."""
        return self.feed if isinstance(self.feed, ExpertMixture) else None

    @property
    def perceptron(self) -> FeedForward:
        """The perceptron, or that of one of the experts."""
        return self.feed.expert if isinstance(self.feed, ExpertMixture) else self.feed

    @property
    def rotary_width(self) -> int:
        """Features of a head that are rotated."""
        return self.latent.rotary_width if self.latent else self.head_width

    @property
    def value_width(self) -> int:
        """Features of a head's values."""
        return self.latent.value_width if self.latent else self.head_width

    @property
    def head_rows(self) -> dict[str, int]:
        """Outputs of each projection of self-attention for a KV head and its queries."""
        if self.latent:
            plain = self.head_width - self.rotary_width
            return {"q_up": self.head_width, "kv_up": plain + self.value_width}
        return {"qkv": (self.queries_per_key + 2) * self.head_width}

    def kept_of_token(self, tp: int = 1) -> float:
        """Elements that generation keeps of a token on one of `tp` devices: keys and values of its heads, of which it
        has one at least, or the whole latent."""
        return self.latent.kept if self.latent else 2 * max(1.0, self.kv_heads / tp) * self.head_width

    @property
    def queries_per_key(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def sizes(self) -> LayerSizes:
        """The sizes in which it may differ from other layers of its stack."""
        return LayerSizes(
            heads=self.heads, kv=self.kv_heads, hidden=self.perceptron.width, mixture=self.mixture is not None,
            window=self.window, normed=self.normed, turned=self.turned, routed=self.routed,
        )  # fmt: skip

    def resized(self, *, kv_heads: int | None = None, hidden: int | None = None) -> Layer:
        """The layer with another number of KV heads, each with as many queries as before, or hidden features."""
        groups = kv_heads or self.kv_heads
        perceptron = replace(self.perceptron, width=hidden or self.perceptron.width)
        feed = perceptron if self.mixture is None else replace(self.mixture, expert=perceptron)
        return replace(self, kv_heads=groups, heads=groups * self.queries_per_key, feed=feed)
