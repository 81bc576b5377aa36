"""The sizes of a stack of Transformer blocks, which all families of models share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from penstock.config.convert import Count, Natural, Positive, Probability, Range

Mlp = Literal["gelu", "gelu_tanh", "relu", "swiglu", "geglu"]
Norm = Literal["layer", "rms"]
Positions = Literal["learned", "sinusoidal", "rotary", "alibi", "relative", "none"]


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Sizes of a stack of equal Transformer blocks (Vaswani et al., NeurIPS 2017).

    Widths count features. `mlp_width` is the MLP's hidden width and not a ratio, because ViT-g/14's ratio
    (6144 / 1408) is not a round number.
    """

    width: Count = 768
    depth: Count = 12
    """Number of blocks."""
    heads: Count = 12
    kv_heads: Count | None = None
    """Heads of keys and values, if several queries share them (Ainslie et al., EMNLP 2023); none: as many as
    `heads`."""
    head_features: Count | None = None
    """Features of one head; none: `width / heads`."""
    mlp_width: Count = 3072
    mlp: Mlp = "gelu"
    """Activation of the MLP; `swiglu` and `geglu` have a third weight matrix, the gate (Shazeer, 2020)."""
    norm: Norm = "layer"
    norm_eps: Positive = 1e-5
    bias: bool = True
    """Whether linear layers have biases, except the projections to queries, keys and values."""
    qkv_bias: bool = True
    """Whether the projections to queries, keys and values have biases."""
    positions: Positions = "learned"
    qk_norm: bool = False
    """Whether queries and keys are normalised per head."""
    parallel: bool = False
    """Whether attention and MLP read the same norm and run in parallel (GPT-J), instead of one after the
    other."""
    window: Count | None = None
    """Tokens that a token attends to (sliding window); none: all."""
    dropout: Probability = 0.0
    """Dropout probability of attention scores and of both residual branches."""
    experts: Natural = 0
    """Number of experts in a mixture's MLP; 0 is dense (Shazeer et al., ICLR 2017)."""
    experts_per_token: Count = 1
    shared_experts: Natural = 0
    """Number of experts that every token visits."""
    expert_width: Count | None = None
    """Hidden width of one expert; none: `mlp_width`."""
    expert_every: Count = 1
    """Every n-th block is a mixture; the others are dense."""
    capacity: Annotated[float, Range(1)] = 1.0
    """Tokens that an expert has room for, as a multiple of an even share; 1 if no tokens are dropped or
    padded."""

    @property
    def head_width(self) -> int:
        """Features of one attention head."""
        return self.head_features or self.width // self.heads

    @property
    def kv(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate."""
        return self.mlp in ("swiglu", "geglu")

    def problems(self, where: str) -> Iterator[str]:
        """Every reason why such a stack is impossible; `where` is its name, such as `model.encoder`."""
        if self.head_features is None and self.width % self.heads:
            yield (
                f"{where}.width {self.width} cannot be split over {where}.heads {self.heads}; use a number of heads "
                f"that divides {self.width}, or set {where}.head_features."
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            yield (
                f"{where}.kv_heads is {self.kv_heads}, but must divide {where}.heads {self.heads}, "
                "because each serves as many query heads."
            )
        if self.experts and self.experts_per_token > self.experts:
            yield (
                f"{where}.experts_per_token is {self.experts_per_token}, but there are only "
                f"{self.experts} {where}.experts to send a token to."
            )
