"""A block of a Transformer as data: `Layer` describes it completely. Code that builds, splits, prices or prunes a block
reads only its layer. Users write a `Stack`, which produces the layers.
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
    """Rotary positions: pairs of features are rotated, each at its own rate (Su et al., 2021, "RoFormer", section
    3.2)."""

    base: Positive = 10000.0
    """The slowest pair makes one rotation in about 2π times this number of positions."""
    scaling: Scaling = "none"
    """How rotations are adapted to texts longer than those of training: `linear` slows all pairs down (Chen et al.,
    2023); `llama3` (Grattafiori et al., 2024) and `yarn` (Peng et al., ICLR 2024) the slow ones only; `longrope` (Ding
    et al., ICML 2024) each pair as `short` and `long` say."""
    factor: Annotated[float, Range(1, 1 << 20)] = 1.0
    """Factor by which texts become longer."""
    trained: Annotated[int, Range(2, 1 << 31)] = 8192
    """Number of positions in training, for `llama3`, `yarn` and `longrope`."""
    low: Positive = 1.0
    """Pairs with fewer rotations than this within `trained` positions are slowed down by the whole factor."""
    high: Positive = 4.0
    """Pairs with more rotations than this are not changed; those between the two are slowed down in part."""
    truncate: bool = True
    """Whether `yarn` rounds the indices of the first and the last of these pairs outwards to integers."""
    short: tuple[Positive, ...] = ()
    """Factor by which each pair is slowed down in samples of at most `trained` tokens, for `longrope`."""
    long: tuple[Positive, ...] = ()
    """The same factors for longer samples, and for generated texts that may become longer."""
    interleaved: bool = False
    """Whether features 2 i and 2 i + 1 form a pair, as in DeepSeek's attention with latents, instead of i and i + half
    of the rotated features."""
    share: PositiveShare = 1.0
    """Share of a head's features that are rotated, the first ones; the rest are not changed."""
    mscale: NotNegative = 0.0
    """With `yarn`, coefficient by which cosine and sine grow with the logarithm of `factor`; `mscale_all` shrinks them
    in the same way (DeepSeek-V2). If either is 0, they grow as in the paper."""
    mscale_all: NotNegative = 0.0
    """With `yarn`, coefficient of the logarithm of `factor` in a growth whose square multiplies scores; 0: none."""

    def turned(self, features: int) -> int:
        """Number of a head's features that are rotated."""
        return int(features * self.share)

    def growth(self, mscale: float = 1.0) -> float:
        """A factor that grows with the logarithm of `factor`."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.scaling == "yarn" else 1.0


def unscaled(rotary: Rotary, base: float) -> Rotary:
    """The same positions with another base and without scaling for longer texts."""
    return Rotary(base=base, share=rotary.share, interleaved=rotary.interleaved)


@dataclass(frozen=True, kw_only=True)
class Latent:
    """A short vector per token from which attention computes keys and values: generation caches only this vector, and a
    rotated part of the keys that all heads share (DeepSeek-AI, 2024, "DeepSeek-V2", section 2.1)."""

    kv_rank: Features = 512
    """Features of the latent of keys and values."""
    query_rank: Features | None = 1536
    """Features of the latent of queries; none: queries are computed from the token itself."""
    plain_width: Features = 128
    """Features of a head's queries and keys without positions."""
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
        """Elements that generation caches per token."""
        return self.kv_rank + self.rotary_width


@dataclass(frozen=True, slots=True, kw_only=True)
class NormKind:
    """A kind of norm. Fields are those of `Stack` that begin with `norm`."""

    kind: Norm
    eps: float
    bias: bool
    """Whether it has a shift."""
    zero_centred: bool = False

    @property
    def tensors(self) -> int:
        """Number of its parameter tensors, each with one element per feature."""
        return 1 + self.bias


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """The perceptron of a block, or of one expert."""

    width: int
    """Hidden features."""
    activation: Mlp

    @property
    def gated(self) -> bool:
        """Whether a third matrix computes a gate."""
        return self.activation in UNGATED


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMixture:
    """Experts, and how a token's experts are chosen. Fields are those of the same names in `Stack`."""

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
        """Whether a learned router chooses experts, among all or within the given group."""
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
    """Whether it computes the samples of one expert only. Such layers come one per expert, in the experts' order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The complete description of one block. Blocks with equal layers are of one kind. Fields are those of the same
    names in `Stack`, for this block only."""

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
    """Whether attention has the norm that `placement` says."""
    turned: bool = True
    """Whether it has the rotary positions of its stack, if that has any."""
    qk_norm: bool = False
    qk_norm_whole: bool = False
    attention_scale: float | None = None
    score_cap: float | None = None
    rotary: Rotary | None = None
    """How queries and keys are rotated; none: they are not."""
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
    """Whether it computes the samples of one expert only."""

    @property
    def norms_branches(self) -> bool:
        """Whether the outputs of attention and feed-forward are normalised before the sum."""
        return self.placement in ("both", "branch")

    @property
    def shifted(self) -> bool:
        """Whether its projection to queries, keys and values has a bias for all but the keys."""
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
        """Outputs of each projection of self-attention per KV head and its query heads."""
        if self.latent:
            plain = self.head_width - self.rotary_width
            return {"q_up": self.head_width, "kv_up": plain + self.value_width}
        return {"qkv": (self.queries_per_key + 2) * self.head_width}

    def kept_of_token(self, tp: int = 1) -> float:
        """Elements that generation caches per token on one of `tp` devices: keys and values of its heads, at least one,
        or the whole latent."""
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
        """The layer with another number of KV heads (with as many query heads for each), or of hidden features."""
        groups = kv_heads or self.kv_heads
        perceptron = replace(self.perceptron, width=hidden or self.perceptron.width)
        feed = perceptron if self.mixture is None else replace(self.mixture, expert=perceptron)
        return replace(self, kv_heads=groups, heads=groups * self.queries_per_key, feed=feed)
