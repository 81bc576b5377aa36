"""The sizes of a stack of Transformer blocks, which all families of models share."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import count
from typing import Annotated, ClassVar, Literal

from penstock.config.activations import Mlp
from penstock.config.convert import Count, NotNegative, Positive, Probability, Range
from penstock.config.layer import (
    ExpertMixture,
    Features,
    FeedForward,
    Heads,
    Latent,
    Layer,
    LayerSizes,
    Norm,
    NormKind,
    Placement,
    Rotary,
    Router,
    unscaled,
)

Depth = Annotated[int, Range(1, 1 << 14)]
Experts = Annotated[int, Range(0, 1 << 16)]
Positions = Literal["learned", "sinusoidal", "fairseq", "rotary", "axial", "alibi", "relative", "none"]
ExpertsIn = Literal["mlp", "block"]


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A stack of Transformer blocks as users write it (Vaswani et al., NeurIPS 2017): a pattern that makes `layers`.

    Widths count features. `mlp_width` is the MLP's hidden width and not a ratio, because ViT-g/14's ratio
    (6144 / 1408) is not a round number.
    """

    MOVED: ClassVar[dict[str, str]] = {"latent.interleaved": "rotary.interleaved"}
    """Old dotted names of settings, mapped to their present names."""
    width: Features = 768
    """Features of a token between blocks."""
    depth: Depth = 12
    """Number of blocks that a sample goes through."""
    heads: Heads = 12
    """Attention heads of each block."""
    kv_heads: Heads | None = None
    """KV heads of each block, where several query heads share one (Ainslie et al., EMNLP 2023). None: `heads`."""
    head_features: Features | None = None
    """Features of one head; none: `width / heads`."""
    mlp_width: Features = 3072
    """Hidden width of the MLP."""
    mlp: Mlp = "gelu"
    """Activation of the MLP; `_tanh` is GELU's tanh approximation, `gelu_quick` x·σ(1.702·x), as in CLIP, and `relu2`
    ReLU squared (So et al., NeurIPS 2021). `swiglu` and `geglu` have a third weight matrix, the gate (Shazeer,
    2020); `swiglu_clamped` is min(g, 7)·σ(1.702·min(g, 7)) · (1 + x), x between −7 and 7 (OpenAI, 2025, "gpt-oss")."""
    norm: Norm = "layer"
    """Kind of norm: LayerNorm, or `rms`, without mean and bias (Zhang & Sennrich, NeurIPS 2019)."""
    norm_eps: Positive = 1e-5
    """Added to the variance before a norm divides by its square root."""
    norm_first: bool = True
    """Whether a norm comes before attention and MLP, and after the last block (pre-norm), or after each residual
    sum, as in Vaswani et al."""
    sandwich_norms: bool = False
    """Whether each of attention and MLP has a norm after it too, before its residual sum (Ding et al., 2021, "CogView",
    section 2.4; Gemma 2 and 3)."""
    branch_norms: bool = False
    """Whether only what attention and MLP return has a norm, before its residual sum, and nothing that they read (Liu
    et al., CVPR 2022, "Swin Transformer V2", section 3.2; OLMo 2)."""
    first_norm: bool = True
    """Whether the first block of a pre-norm stack normalises what its attention reads. ModernBERT's does not, because a
    norm follows its embeddings (Warner et al., 2024, section 2.1)."""
    norm_bias: bool = True
    """Whether layer norms have a shift; RMS norms have none."""
    norm_zero_centred: bool = False
    """Whether RMS norms multiply by 1 + their weight, which begins at 0 (Gemma), instead of by their weight."""
    bias: bool = True
    """Whether linear layers have biases, except the projections to queries, keys and values."""
    qkv_bias: bool = True
    """Whether the projections to queries, keys and values have biases."""
    key_bias: bool = True
    """Whether the projection to keys has a bias too, where `qkv_bias` is true."""
    positions: Positions = "learned"
    """How tokens know their place. `fairseq` are sinusoidal positions as fairseq's translators count them: from 2 on,
    and with the slowest feature at 1 / 10000. `axial` are rotary positions of patches: half of the pairs of features
    turn with the row and half with the column, counted from −1 to 1 across the image (Siméoni et al., 2025, "DINOv3",
    section 3.2)."""
    rotary: Rotary = field(default_factory=Rotary)
    unturned_every: Annotated[int, Range(0, 1 << 14)] = 0
    """Every n-th block, the last of n, has no rotary positions (Yang et al., 2025, "Rope to Nope and Back Again"); 0:
    all have them."""
    window_base: Positive | None = None
    """`rotary.base` of blocks that attend to their window only. None: `rotary.base` as in all other blocks."""
    window_scaled: bool = True
    """Whether blocks that attend to their window only scale rotary positions as all other blocks do. Gemma 3's do
    not."""
    relative_buckets: Annotated[int, Range(1, 1 << 16)] = 32
    """Number of distances that have a relative bias of their own (Raffel et al., JMLR 2020, section 2.1)."""
    relative_distance: Count = 128
    """Distance beyond which all relative biases are equal."""
    attention_scale: Positive | None = None
    """Factor of the scores; none: 1 / √(features of a head)."""
    score_cap: Positive | None = None
    """Scores s of self-attention become c·tanh(s / c) before they are masked (Gemma Team, 2024, "Gemma 2", section 2);
    none: they stay as they are."""
    qk_norm: bool = False
    """Whether queries and keys are normalised per head."""
    qk_norm_whole: bool = False
    """Whether these norms are over the features of all heads at once (OLMo 2)."""
    latent: Latent | None = None
    """Keys and values are made of a latent (DeepSeek-V2); none: of the token itself. With it,
    `head_features` and `kv_heads` have no effect."""
    parallel: bool = False
    """Whether attention and MLP read the same norm and run in parallel (GPT-J), instead of one after the
    other."""
    window: Count | None = None
    """Tokens that a token attends to (sliding window), itself counted; without a causal mask, half of them on each
    side. None: all."""
    global_every: Annotated[int, Range(0, 1 << 14)] = 0
    """Every n-th block attends to all tokens in spite of `window`; 0: none does."""
    global_offset: Annotated[int, Range(0, 1 << 14)] = 0
    """The first of these blocks, counted from 0."""
    sinks: bool = False
    """Whether the softmax of each head of self-attention adds the exponential of a parameter to its denominator, so
    that a token may attend to nothing (OpenAI, 2025, "gpt-oss")."""
    dropout: Probability = 0.0
    """Dropout probability of the embeddings and of both residual branches."""
    attention_dropout: Probability | None = None
    """Dropout probability of attention weights; none: `dropout`."""
    mlp_dropout: Probability | None = 0.0
    """Dropout probability of the MLP's activations; none: `dropout`."""
    layer_scale: NotNegative | None = None
    """Initial value of LayerScale (Touvron et al., ICCV 2021); none: no LayerScale."""
    drop_path: Probability = 0.0
    """Stochastic depth at the last block; rises linearly from 0 at the first."""
    experts: Experts = 0
    """Number of experts in a mixture's MLP; 0 is dense (Shazeer et al., ICLR 2017)."""
    experts_in: ExpertsIn = "mlp"
    """The part of which each expert is one: the MLP, or the whole `block`, chosen by a number given with each sample
    (Feng et al., CVPR 2023, "ERNIE-ViLG 2.0", section 2.3)."""
    experts_per_token: Annotated[int, Range(1, 1 << 16)] = 1
    """Number of experts that the router chooses for a token."""
    shared_experts: Experts = 0
    """Number of experts that every token visits."""
    expert_width: Features | None = None
    """Hidden width of one expert; none: `mlp_width`."""
    expert_every: Depth = 1
    """Every n-th block is a mixture; the others are dense."""
    dense_layers: Annotated[int, Range(0, 1 << 14)] = 0
    """Blocks at the beginning that are dense."""
    router: Router = "softmax"
    """How experts are chosen. `softmax`: those with the highest softmax (Fedus et al., JMLR 2022). `sigmoid`: those
    with the highest sigmoid plus a bias that balances them (Wang et al., 2024, "Auxiliary-Loss-Free Load Balancing").
    `given`: by a number that comes with each sample, such as that of its language."""
    router_bias: bool = False
    """Whether the linear layer of a router has a bias."""
    router_groups: Annotated[int, Range(1, 1 << 16)] = 1
    """Equal groups of consecutive experts. A token's experts are among those of the `groups_per_token` groups whose two
    best experts have the highest sum of scores (DeepSeek-AI, 2024, "DeepSeek-V3", section 2.1.2); with router `given`
    they are in the group that is given."""
    group_best: Annotated[int, Range(1, 2)] = 2
    """Best experts of a group whose scores are added up to compare groups: DeepSeek-V2 takes one."""
    groups_per_token: Annotated[int, Range(1, 1 << 16)] = 1
    """Number of groups from which a token's experts come."""
    router_normalised: bool | None = None
    """Whether the weights of a token's experts are divided by their sum. None: where a token has several experts."""
    router_scale: Positive = 1.0
    """Factor of the weights of a token's experts, except for the `shared_experts`."""
    router_jitter: Probability = 0.0
    """In training routers read each feature times a random number between one minus and one plus this (Fedus et al.,
    JMLR 2022, appendix C)."""
    expert_dropout: Probability = 0.0
    """Share of visits whose outputs are masked in training; at evaluation all outputs are times one minus it (NLLB
    Team, 2022, section 6.2, expert output masking)."""
    balance: NotNegative = 0.01
    """Coefficient of the balance loss of each mixture whose router takes a softmax (Fedus et al., JMLR 2022,
    section 2.2): see `penstock.models.balance_loss`."""
    z_loss: NotNegative = 0.0
    """Coefficient of the mean square of the routers' log-sum-exp (Zoph et al., 2022, "ST-MoE", equation 5)."""
    bias_rate: NotNegative = 0.001
    """Amount by which a step moves the bias of each expert of a sigmoid router, up for those with few tokens."""
    capacity: Positive | None = None
    """Visits that an expert has room for in training, as a multiple of an even share of a micro-batch; those beyond it
    are dropped, the last tokens first. None: all visits are computed."""
    sample_capacity: Count | None = None
    """Visits of one sample that an expert has room for, at evaluation too, as transformers' Switch Transformers count
    them; those beyond it are dropped, the last tokens first. None: all visits are computed."""
    labels: Experts = 0
    """Number of labels of samples, such as languages, by which visits to experts are counted; 0: none. Tasks whose data
    have labels set it. With `router` given, a sample's label chooses its expert."""
    expert_of: tuple[Experts, ...] = ()
    """The expert of each label, or its group of experts, with `router` given. Empty: label i has expert i."""
    unequal: tuple[LayerSizes, ...] = ()
    """The sizes of each layer, as a pruned model has them, in place of the fields above: `depth` layers, or where
    experts are whole blocks, one for each expert at a depth. Empty: all layers follow from the fields above."""

    def __post_init__(self) -> None:
        if not self.experts and self.capacity is not None:
            # Dense stacks were once saved with a capacity, which says nothing about them.
            object.__setattr__(self, "capacity", None)
        checks = getattr(super(), "__post_init__", None)
        if checks is not None:
            checks()

    @property
    def biased(self) -> bool:
        """Whether positions are biases that are added to the scores of self-attention."""
        return self.positions in ("relative", "alibi")

    @property
    def weights_dropout(self) -> float:
        """Dropout probability of attention weights."""
        return self.dropout if self.attention_dropout is None else self.attention_dropout

    @property
    def hidden_dropout(self) -> float:
        """Dropout probability of the MLP's activations."""
        return self.dropout if self.mlp_dropout is None else self.mlp_dropout

    @property
    def chooses_by_sample(self) -> bool:
        """Whether the choice of a token's experts depends on the other tokens of its sample."""
        return self.experts > 0 and self.sample_capacity is not None

    @property
    def chooses_by_chance(self) -> bool:
        """Whether in training experts are chosen or masked by random numbers."""
        return self.experts > 0 and (self.router_jitter > 0 or self.expert_dropout > 0)

    @property
    def placement(self) -> Placement:
        """Where the norms of its blocks are."""
        inside: Placement = "branch" if self.branch_norms else "both" if self.sandwich_norms else "before"
        return inside if self.norm_first else "after"

    @cached_property
    def norm_kind(self) -> NormKind:
        """The kind of its norms."""
        return NormKind(
            kind=self.norm, eps=self.norm_eps, bias=self.norm_bias and self.norm == "layer",
            zero_centred=self.norm_zero_centred,
        )  # fmt: skip

    @cached_property
    def mixture(self) -> ExpertMixture:
        """The experts of the layers that have some, and how they are chosen."""
        own = {one.name: getattr(self, one.name) for one in fields(ExpertMixture) if one.name != "expert"}
        if self.router_normalised is None:
            own["router_normalised"] = self.experts_per_token > 1
        width = self.expert_width or self.mlp_width
        return ExpertMixture(expert=FeedForward(width=width, activation=self.mlp), **own)

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The layer of each block, in the order in which they run; blocks of different experts one after the other."""
        every = self.unequal or tuple(one for block in range(self.depth) for one in self._sizes(block))
        made = {one: self._layer(one) for one in dict.fromkeys(every)}
        return tuple(made[one] for one in every)

    def _sizes(self, block: int) -> tuple[LayerSizes, ...]:
        """The sizes of the layer that all samples go through at a depth, or of one for each expert."""
        sparse = block >= self.dense_layers and block % self.expert_every == self.expert_every - 1
        mixture = self.experts > 0 and sparse
        routed = mixture and self.experts_in == "block"
        sees_all = self.window is None or (
            self.global_every and block % self.global_every == self.global_offset
        )
        sizes = LayerSizes(
            heads=self.heads, kv=self.kv_heads or self.heads,
            hidden=(self.expert_width if mixture else None) or self.mlp_width, mixture=mixture and not routed,
            window=0 if sees_all else self.window or 0, normed=self.first_norm or block > 0, routed=routed,
            turned=not self.unturned_every or (block + 1) % self.unturned_every > 0,
        )  # fmt: skip
        return (sizes,) * (self.experts if routed else 1)

    def _layer(self, sizes: LayerSizes) -> Layer:
        """The layer of these sizes, with everything else from this stack."""
        turns = self.positions in ("rotary", "axial") and sizes.turned
        rotary = self.rotary if turns else None
        if rotary is not None and sizes.window:
            base = self.window_base or rotary.base
            rotary = replace(rotary, base=base) if self.window_scaled else unscaled(rotary, base)
        perceptron = FeedForward(width=sizes.hidden, activation=self.mlp)
        names = (
            "qk_norm", "qk_norm_whole", "score_cap", "sinks", "latent", "parallel", "bias", "qkv_bias", "key_bias",
            "layer_scale",
        )  # fmt: skip
        width = self.latent.head_width if self.latent else self.head_features or self.width // self.heads
        scale = self.attention_scale
        if rotary is not None and rotary.mscale_all:
            scale = (scale or width**-0.5) * rotary.growth(rotary.mscale_all) ** 2
        return Layer(
            heads=sizes.heads, kv_heads=sizes.kv, head_width=width, attention_scale=scale,
            feed=replace(self.mixture, expert=perceptron) if sizes.mixture else perceptron,
            norm=self.norm_kind, placement=self.placement,
            rotary=rotary, window=sizes.window, normed=sizes.normed, turned=sizes.turned, routed=sizes.routed,
            **{name: getattr(self, name) for name in names},
        )  # fmt: skip

    @cached_property
    def plain_layer(self) -> Layer:
        """A dense layer with the stack's `heads` and `mlp_width`, even if `unequal` sets other sizes."""
        sizes = LayerSizes(heads=self.heads, kv=self.heads, hidden=self.mlp_width)
        return replace(self._layer(sizes), qk_norm=False)

    @cached_property
    def experts_of_blocks(self) -> tuple[int | None, ...]:
        """The expert that each block in `layers` belongs to; None where all samples go through it."""
        numbers = count()
        return tuple(next(numbers) % self.experts if layer.routed else None for layer in self.layers)

    @property
    def mixes(self) -> bool:
        """Whether MLPs are mixtures of experts."""
        return self.experts > 0 and self.experts_in == "mlp"

    @cached_property
    def kinds(self) -> dict[Layer, int]:
        """The different layers in the order in which each first runs, and the number of blocks that have each."""
        return Counter(self.layers)
