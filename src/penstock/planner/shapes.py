"""A model as the planner sees it: stacks of equal blocks between an entrance and an exit, sizes only.

Every family (ViT, decoder, encoder, encoder–decoder, mixture of experts) is told in these few words, so that time,
memory and layouts are computed in one way for all. Counts are exact; tests hold them to real modules.

Shapes: T tokens of a sample, C tokens it attends to, D width, H heads, K heads of keys, F features of a head,
M hidden width, E experts, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from penstock.config.model import (
    DecoderConfig,
    EncoderConfig,
    ModelConfig,
    Seq2SeqConfig,
    Stack,
    ViTConfig,
    stacks,
)
from penstock.planner import counts
from penstock.planner.states import newton_schulz_flops

RELATIVE_BUCKETS = 32
"""Distances that relative position biases tell apart (Raffel et al., JMLR 2020, section 2.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block of one stack. `count` such blocks follow each other in a stack."""

    count: int
    tokens: int
    width: int
    heads: int
    kv_heads: int
    features: int
    hidden: int
    gated: bool = False
    rms: bool = False
    bias: bool = True
    qkv_bias: bool = True
    rotary: bool = False
    linear_bias: bool = False
    """Whether scores get a bias that grows with distance (ALiBi; Press et al., ICLR 2022)."""
    causal: bool = False
    dropout: bool = False
    cross: int = 0
    """Tokens of another stack that the block attends to besides; 0 is none."""
    experts: int = 0
    routed: int = 0
    """Experts that each token visits by routing."""
    shared: int = 0
    capacity: float = 1.0
    extra_parameters: int = 0
    """Of small things: QK norms, LayerScale."""

    @property
    def attention_width(self) -> int:
        """Features of all query heads."""
        return self.heads * self.features

    @property
    def norms(self) -> int:
        """Norms in the block."""
        return 3 if self.cross else 2

    @property
    def attention_parameters(self) -> int:
        """Learned numbers of attention (self and cross)."""
        d, a, kv = self.width, self.heads * self.features, self.kv_heads * self.features
        one = d * a + 2 * d * kv + a * d
        one += (a + 2 * kv) * self.qkv_bias + d * self.bias
        return one * (2 if self.cross else 1)

    @property
    def expert_parameters(self) -> int:
        """Learned numbers of one MLP: of one expert, in a mixture."""
        matrices = 3 if self.gated else 2
        return matrices * self.width * self.hidden + self.bias * (self.hidden * (matrices - 1) + self.width)

    @property
    def norm_parameters(self) -> int:
        """Learned numbers of the norms and the small things."""
        return self.norms * self.width * (1 if self.rms else 2) + self.extra_parameters

    @property
    def tensors(self) -> int:
        """Tensors that the learned numbers are in, queries, keys and values packed and experts stacked."""
        mlps = 1 + (self.experts > 0 and self.shared > 0)
        matrices = 2 + (3 if self.cross else 0) + (3 if self.gated else 2) * mlps
        biases = matrices - (not self.qkv_bias) if self.bias else 0
        return matrices + biases + self.norms * (1 if self.rms else 2) + (self.experts > 0)

    def newton_schulz_flops(self, experts: float) -> float:
        """FLOPs of Muon's orthogonalisation of its matrices, so many experts' among them (`states`)."""
        d, a, kv = self.width, self.heads * self.features, self.kv_heads * self.features
        attend = 2 * newton_schulz_flops(d, a) + 2 * newton_schulz_flops(d, kv)
        mlp = (3 if self.gated else 2) * newton_schulz_flops(d, self.hidden)
        return attend * (2 if self.cross else 1) + mlp * (experts + self.shared if self.experts else 1)

    @property
    def router_parameters(self) -> int:
        """Learned numbers that choose experts."""
        return self.width * self.experts

    @property
    def parameters(self) -> int:
        """Learned numbers of the block."""
        mlp = self.expert_parameters * ((self.experts + self.shared) if self.experts else 1)
        return self.attention_parameters + self.norm_parameters + self.router_parameters + mlp

    @property
    def active_parameters(self) -> int:
        """Learned numbers that one token meets."""
        mlp = self.expert_parameters * ((self.routed + self.shared) if self.experts else 1)
        return self.attention_parameters + self.norm_parameters + self.router_parameters + mlp

    @property
    def linear_flops(self) -> int:
        """Forward FLOPs of linear layers for one sample."""
        d, a, kv = self.width, self.heads * self.features, self.kv_heads * self.features
        attend = 2 * self.tokens * (2 * d * a + 2 * d * kv)
        if self.cross:
            attend += 2 * (self.tokens * 2 * d * a + self.cross * 2 * d * kv)
        visits = (self.routed + self.shared) if self.experts else 1
        mlp = 2 * self.tokens * (3 if self.gated else 2) * d * self.hidden * visits
        return attend + mlp + 2 * self.tokens * self.router_parameters

    @property
    def attention_flops(self) -> int:
        """Forward FLOPs of scores and values for one sample, in full: a causal mask does not halve them."""
        return 4 * self.tokens * (self.tokens + self.cross) * self.heads * self.features

    @property
    def flops(self) -> int:
        """Forward FLOPs for one sample."""
        return self.linear_flops + self.attention_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A whole model. `entrance` is before the blocks, `exit` after them."""

    blocks: tuple[Block, ...]
    """Kinds of blocks, in order; a mixture's dense and sparse blocks alternate but are listed once each."""
    entrance_parameters: int
    exit_parameters: int
    """Without what is shared with the entrance."""
    tied: bool
    """Whether the exit's matrix is the entrance's: then the first and the last stage both keep it."""
    output: int
    """Vocabulary or classes."""
    output_tokens: int
    """Tokens of a sample at which the output is computed."""
    entrance_flops: int
    """Forward FLOPs of the entrance for one sample (patches; looking up tokens is none)."""
    exit_flops: int
    samples_are_tokens: int
    """Tokens that one sample counts for in tokens per second."""
    width: int
    depth: int
    """Blocks of all stacks."""
    parameters: int
    """Learned numbers of the model."""
    forward_flops: int
    """Forward FLOPs of one sample."""

    @classmethod
    def of(
        cls, *, blocks: tuple[Block, ...], entrance: tuple[int, int], exit_: tuple[int, int], **rest: int
    ) -> Shape:
        """A shape with its sums; `entrance` and `exit_` are parameters and forward FLOPs of one sample."""
        tied = bool(rest.pop("tied", 0))
        return cls(
            blocks=blocks,
            entrance_parameters=entrance[0],
            exit_parameters=exit_[0],
            entrance_flops=entrance[1],
            exit_flops=exit_[1],
            tied=tied,
            depth=sum(block.count for block in blocks),
            parameters=sum(block.count * block.parameters for block in blocks) + entrance[0] + exit_[0],
            forward_flops=sum(block.count * block.flops for block in blocks) + entrance[1] + exit_[1],
            **rest,
        )

    @property
    def active_parameters(self) -> int:
        """Learned numbers that one token meets: fewer than all in a mixture of experts."""
        inside = sum(block.count * block.active_parameters for block in self.blocks)
        return inside + self.entrance_parameters + self.exit_parameters

    @property
    def model_flops(self) -> int:
        """Forward and backward FLOPs of one sample: the numerator of MFU."""
        return 3 * self.forward_flops


@lru_cache(maxsize=256)
def shape_of(model: ModelConfig) -> Shape:
    """The shape of a configuration."""
    return _vit(model) if isinstance(model, ViTConfig) else _text(model)


def _vit(model: ViTConfig) -> Shape:
    parts = counts.parameter_parts(model)
    extra = 4 * model.head_width * model.qk_norm + 2 * model.width * (model.layer_scale is not None)
    block = Block(
        count=model.depth,
        tokens=model.tokens,
        width=model.width,
        heads=model.heads,
        kv_heads=model.heads,
        features=model.head_width,
        hidden=model.mlp_width,
        dropout=model.dropout > 0,
        qkv_bias=model.qkv_bias,
        extra_parameters=extra,
    )
    exit_flops = 2 * model.width * model.classes
    stem_flops = counts.forward_flops(model) - model.depth * block.flops - exit_flops
    return Shape.of(
        blocks=(block,),
        entrance=(parts["stem"] + parts["embeddings"], stem_flops),
        exit_=(parts["head"], exit_flops),
        output=model.classes,
        output_tokens=1,
        samples_are_tokens=model.tokens,
        width=model.width,
    )


def _text(model: DecoderConfig | EncoderConfig | Seq2SeqConfig) -> Shape:
    first = stacks(model)[0]
    width = first.width
    norm = width * (1 if first.norm == "rms" else 2)
    entrance = model.vocabulary * width + norm * model.embedding_norm
    if isinstance(model, EncoderConfig):
        entrance += model.token_types * width
    if first.positions == "learned":
        entrance += (model.max_positions or model.sequence) * width
    entrance += sum(
        RELATIVE_BUCKETS * stack.heads for stack in stacks(model) if stack.positions == "relative"
    )
    ends = 0 if model.tied else model.vocabulary * width
    tokens = model.decoder_sequence if isinstance(model, Seq2SeqConfig) else model.sequence
    exit_flops = 2 * tokens * width * model.vocabulary
    if isinstance(model, EncoderConfig):
        # The head of masked language models: a dense layer, a norm, and a bias of the output.
        ends += width * width + width + norm + model.vocabulary
        exit_flops += 2 * tokens * width * width
    else:
        ends += len(stacks(model)) * norm
    return Shape.of(
        blocks=_blocks(model),
        entrance=(entrance, 0),
        exit_=(ends, exit_flops),
        tied=model.tied,
        output=model.vocabulary,
        output_tokens=tokens,
        samples_are_tokens=tokens,
        width=width,
    )


def _blocks(model: DecoderConfig | EncoderConfig | Seq2SeqConfig) -> tuple[Block, ...]:
    if isinstance(model, Seq2SeqConfig):
        return (
            *_of_stack(model.encoder, model.sequence),
            *_of_stack(model.decoder, model.decoder_sequence, causal=True, cross=model.sequence),
        )
    return _of_stack(model, model.sequence, causal=isinstance(model, DecoderConfig))


def _of_stack(stack: Stack, tokens: int, *, causal: bool = False, cross: int = 0) -> tuple[Block, ...]:
    """The dense blocks of a stack, then its mixtures."""
    mixtures = stack.depth // stack.expert_every if stack.experts else 0
    kinds = ((stack.depth - mixtures, False), (mixtures, True))
    return tuple(
        _block(stack, count, tokens, causal=causal, cross=cross, mixture=mixture)
        for count, mixture in kinds
        if count
    )


def _block(stack: Stack, count: int, tokens: int, *, causal: bool, cross: int, mixture: bool) -> Block:
    hidden = stack.mlp_width
    if mixture and stack.expert_width is not None:
        hidden = stack.expert_width
    return Block(
        count=count,
        tokens=tokens,
        width=stack.width,
        heads=stack.heads,
        kv_heads=stack.kv,
        features=stack.head_width,
        hidden=hidden,
        gated=stack.gated,
        rms=stack.norm == "rms",
        bias=stack.bias,
        qkv_bias=stack.qkv_bias,
        rotary=stack.positions == "rotary",
        linear_bias=stack.positions == "alibi",
        causal=causal,
        dropout=stack.dropout > 0,
        cross=cross,
        experts=stack.experts if mixture else 0,
        routed=stack.experts_per_token if mixture else 0,
        shared=stack.shared_experts if mixture else 0,
        capacity=stack.capacity,
    )
