"""The sizes of a stack of Transformer blocks, which all families of models share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import count, groupby
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
    """Heads of keys and values, if several queries share them (Ainslie et al., EMNLP 2023); none: as many as
    `heads`."""
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
    """Whether that to keys has one too, where `qkv_bias` is true."""
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
    """`rotary.base` of blocks that attend to their window only; none: that of the others."""
    window_scaled: bool = True
    """Whether rotary positions of blocks that attend to their window only are scaled as those of the others. Those of
    Gemma 3 are not."""
    relative_buckets: Annotated[int, Range(1, 1 << 16)] = 32
    """Distances that relative biases tell apart (Raffel et al., JMLR 2020, section 2.1)."""
    relative_distance: Count = 128
    """Distance from which on relative biases are all the same."""
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
    """Keys and values are made of a latent (DeepSeek-V2); none: of the token itself. In its place `head_features` and
    `kv_heads` say nothing."""
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
    """Whether the softmax of each head of self-attention has the exponential of a learned number in its denominator
    besides those of the scores, so that a token may attend to nothing (OpenAI, 2025, "gpt-oss")."""
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
    """Part that there is for each expert: the MLP, or the whole `block`, of which a sample goes through the one that is
    given (Feng et al., CVPR 2023, "ERNIE-ViLG 2.0", section 2.3)."""
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
    """Whether the weights of a token's experts are divided by their sum; none: if it has several and chose them."""
    router_scale: Positive = 1.0
    """Factor of the weights of a token's experts, beside those that every token visits."""
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
    """Kinds of samples, such as languages, whose visits to experts are counted apart; 0: none. A task whose data name
    such labels sets it. With a router that is given, they are what is given."""
    expert_of: tuple[Experts, ...] = ()
    """The expert of each label, or its group of experts, with a router that is given; none: that of its number."""
    unequal: tuple[LayerSizes, ...] = ()
    """The layers one by one, as a pruned model has them: `depth` of them, of experts in whole blocks one for each
    expert, whose sizes replace those above. None: all follow from the fields above."""

    def __post_init__(self) -> None:
        if not self.experts and self.capacity is not None:
            # Dense stacks were once saved with a capacity, which says nothing about them.
            object.__setattr__(self, "capacity", None)
        checks = getattr(super(), "__post_init__", None)
        if checks is not None:
            checks()

    @property
    def biased(self) -> bool:
        """Whether positions are numbers that are added to the scores of self-attention."""
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
        """The experts and how they are chosen, for those of the layers that have any."""
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
        """The layer of these sizes, which is in all else as this stack says."""
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
        """A dense layer of the heads and the width that are set, whatever sizes its own layers have."""
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

    def problems(self, where: str) -> Iterator[str]:
        """Every reason why such a stack is impossible; `where` is its name, such as `model.encoder`."""
        if self.head_features is None and self.latent is None and self.width % self.heads:
            yield (
                f"{where}.width {self.width} cannot be split over {where}.heads {self.heads}; use a number of heads "
                f"that divides {self.width}, or set {where}.head_features."
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            yield (
                f"{where}.kv_heads is {self.kv_heads}, but must divide {where}.heads {self.heads}, "
                "because each serves as many query heads."
            )
        features = self.layers[0].rotary_width
        turned, rotary = self.rotary.turned(features), self.rotary
        if self.positions == "rotary" and (turned % 2 or not turned):
            widths = (
                f"{where}.latent.rotary_width" if self.latent else f"{where}.heads, {where}.head_features"
            )
            yield (
                f"{where}.positions rotary turns pairs of features, but {turned} of a head's {features} turn; choose "
                f"{widths} or {where}.rotary.share so that it is an even number."
            )
        if self.latent is not None:
            yield from self._latent_problems(where)
        if self.positions == "axial" and (turned % 4 or not turned):
            yield (
                f"{where}.positions axial turns pairs of features by row and by column, but {turned} of a head's "
                f"{features} turn; choose {where}.heads or {where}.head_features so that it is a multiple of 4."
            )
        pairs = turned // 2 if rotary.scaling == "longrope" else 0
        if self.positions == "rotary" and (len(rotary.short), len(rotary.long)) != (pairs, pairs):
            yield (
                f"{where}.rotary.short and long have {len(rotary.short)} and {len(rotary.long)} numbers, but must have "
                f"{pairs} each: one for each pair of features that turns, with {where}.rotary.scaling longrope alone."
            )
        if rotary.low >= rotary.high:
            yield f"{where}.rotary.low is {rotary.low:g}, but must be below {where}.rotary.high {rotary.high:g}."
        if not self.first_norm and not self.norm_first:
            yield (
                f"{where}.first_norm false leaves out the norm before the first block's attention, which only blocks "
                f"with {where}.norm_first true have; leave it out, or set that to true."
            )
        alone = (
            "window_base" if self.window_base is not None else "" if self.window_scaled else "window_scaled"
        )
        if alone and (self.positions != "rotary" or self.window is None):
            yield (
                f"{where}.{alone} is for blocks with rotary positions and a window; set {where}.positions to "
                f"rotary and {where}.window to a number of tokens, or leave it out."
            )
        if self.unturned_every and self.positions != "rotary":
            yield f"{where}.unturned_every is for {where}.positions rotary, and not {self.positions}; leave it out."
        if self.score_cap is not None and self.biased:
            yield f"{where}.score_cap is for scores without biases, and not for {where}.positions {self.positions}."
        if self.global_offset >= max(1, self.global_every):
            yield (
                f"{where}.global_offset is {self.global_offset}, but blocks that attend to all tokens come every "
                f"{self.global_every}; set it below {where}.global_every, from 0 on."
            )
        if self.norm_zero_centred and self.norm != "rms":
            yield f"{where}.norm_zero_centred is for {where}.norm rms, and not {self.norm}; leave it out."
        if self.parallel and not self.norm_first:
            yield (
                f"{where}.parallel blocks read one norm before both branches; set {where}.norm_first to true."
            )
        plain = self.norm_first and self.first_norm and not self.parallel
        if self.sandwich_norms and (not plain or self.branch_norms):
            yield (
                f"{where}.sandwich_norms adds norms to those before each of attention and MLP; set {where}.norm_first "
                f"and {where}.first_norm to true, {where}.parallel and {where}.branch_norms to false, or leave it out."
            )
        elif self.branch_norms and not plain:
            yield (
                f"{where}.branch_norms takes norms from before attention and MLP to behind; set {where}.norm_first "
                f"and {where}.first_norm to true and {where}.parallel to false, or leave it out."
            )
        if self.qk_norm_whole and not (self.qk_norm and self.norm == "rms" and not self.norm_zero_centred):
            yield (
                f"{where}.qk_norm_whole is for {where}.qk_norm true with {where}.norm rms and "
                f"{where}.norm_zero_centred false; set these, or leave it out."
            )
        yield from self._unequal_problems(f"{where}.unequal")
        if self.experts and self.experts_per_token > self.experts:
            yield (
                f"{where}.experts_per_token is {self.experts_per_token}, but there are only "
                f"{self.experts} {where}.experts to send a token to."
            )
        if self.experts:
            yield from self._router_problems(where)
        yield from self._label_problems(where)
        yield from self._routed_problems(where)

    def _latent_problems(self, where: str) -> Iterator[str]:
        """Every reason why keys and values cannot be made of latents."""
        for name, wanted in (
            ("kv_heads", None), ("head_features", None), ("qk_norm", False), ("qkv_bias", False), ("bias", False),
            ("sinks", False), ("window", None), ("norm", "rms"),
        ):  # fmt: skip
            if getattr(self, name) != wanted:
                remedy = "leave it out" if wanted is None else f"set it to {str(wanted).lower()}"
                yield (
                    f"{where}.{name} is {getattr(self, name)}, but {where}.latent makes keys and values of all heads "
                    f"of one latent; {remedy}."
                )
        if self.positions not in ("rotary", "none"):
            yield (
                f"{where}.positions is {self.positions}, but with {where}.latent a part of each key is rotated; set it "
                "to rotary, or to none."
            )

    def _routed_problems(self, where: str) -> Iterator[str]:
        """Every reason why experts cannot be whole blocks."""
        if self.experts_in == "mlp":
            if any(layer.routed for layer in self.unequal):
                yield f"{where}.unequal has layers with routed true, which {where}.experts_in block has alone; set it."
            return
        if not self.experts:
            yield f"{where}.experts_in is block, but {where}.experts is 0; set a number of experts, or leave it out."
        for name, wanted in (
            ("router", "given"), ("router_groups", 1), ("shared_experts", 0), ("capacity", None),
            ("sample_capacity", None), ("window", None),
        ):  # fmt: skip
            if getattr(self, name) != wanted:
                remedy = "leave it out" if name != "router" else "set it to given"
                yield (
                    f"{where}.{name} is {getattr(self, name)}, but with {where}.experts_in block a sample goes as a "
                    f"whole through the one block that is given for it; {remedy}."
                )

    def _router_problems(self, where: str) -> Iterator[str]:
        """Every reason why experts cannot be chosen so."""
        chosen, groups, taken = self.experts_per_token, self.router_groups, self.groups_per_token
        if not self.mixture.learns_routes and chosen > 1:
            yield (
                f"{where}.router given sends each token to the one expert that is given, but {where}.experts_per_token "
                f"is {chosen}; set it to 1, or set {where}.router_groups, of which one is given."
            )
        if self.mixture.learns_routes and self.mixture.router_normalised and chosen == 1:
            yield (
                f"{where}.router_normalised makes the weight of a token's only expert 1, from which the router cannot "
                f"learn; leave it out, or set {where}.experts_per_token to 2 or more."
            )
        if self.expert_dropout and not self.mixture.learns_routes:
            yield (
                f"{where}.expert_dropout masks visits by their weights, which {where}.router given has none of; leave "
                "it out."
            )
        if self.experts % groups:
            yield (
                f"{where}.router_groups is {groups}, but must divide {where}.experts {self.experts}, because groups "
                "are equal."
            )
        elif taken > groups or (self.router == "given" and taken > 1):
            yield (
                f"{where}.groups_per_token is {taken}, but a token can have "
                + (
                    "the group that is given; set it to 1."
                    if self.router == "given"
                    else f"{groups} at most."
                )
            )
        elif chosen > taken * (self.experts // groups):
            yield (
                f"{where}.experts_per_token is {chosen}, but {where}.groups_per_token {taken} has only "
                f"{taken * (self.experts // groups)} experts; raise it, or lower {where}.router_groups."
            )

    def _label_problems(self, where: str) -> Iterator[str]:
        """Every reason why these labels have no experts."""
        if self.labels and not self.experts:
            yield f"{where}.labels is {self.labels}, but the stack has no experts to count the visits of; leave it out."
        if self.expert_of and (self.router != "given" or len(self.expert_of) != self.labels):
            yield (
                f"{where}.expert_of names an expert for {len(self.expert_of)} labels, but {where}.labels is "
                f"{self.labels} and {where}.router {self.router}; name one for each label of a router that is given."
            )
        if self.experts and self.router == "given":
            most = max(self.expert_of, default=self.labels - 1)
            if most >= (self.router_groups if self.mixture.learns_routes else self.experts):
                yield (
                    f"{where}.labels need expert {most}, but there are {self.experts} {where}.experts, from 0 "
                    f"on; use more, or let labels share experts with {where}.expert_of."
                    if not self.mixture.learns_routes
                    else f"{where}.labels need group {most}, but there are {self.router_groups} {where}.router_groups, "
                    f"from 0 on; use more, or let labels share groups with {where}.expert_of."
                )

    def _unequal_problems(self, where: str) -> Iterator[str]:
        """Every reason why these layers cannot be those of this stack."""
        if not self.unequal:
            return
        each = max(1, self.experts)
        for routed, group in groupby(self.unequal, lambda layer: layer.routed):
            layers = tuple(group)
            alike = all(len(set(layers[i : i + each])) == 1 for i in range(0, len(layers), each))
            if routed and (len(layers) % each or not alike):
                yield (
                    f"{where} has {len(layers)} layers with routed true in a row, but for each block there must be "
                    f"{each} alike, one for each expert; list them so."
                )
        routed_layers = sum(layer.routed for layer in self.unequal)
        depth = len(self.unequal) - routed_layers + routed_layers // each
        if depth != self.depth:
            yield f"{where} lists {depth} layers, but the depth is {self.depth}; make them equal."
        for number, layer in enumerate(self.unequal):
            if layer.heads % layer.kv:
                yield (
                    f"{where}[{number}].kv is {layer.kv}, but must divide its heads, {layer.heads}, because each "
                    "serves as many query heads."
                )
            if layer.mixture and not self.experts:
                yield f"{where}[{number}].mixture is true, but the stack has no experts; set experts, or leave it out."
            if layer.window not in (0, self.window):
                yield f"{where}[{number}].window is {layer.window}, but must be 0 or the stack's window, {self.window}."
            if self.biased and layer.heads != self.heads:
                yield (
                    f"{where}[{number}].heads is {layer.heads}, but positions {self.positions} have a bias for each of "
                    f"{self.heads} heads, which all blocks share; keep {self.heads}."
                )
