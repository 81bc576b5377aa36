"""A model as the planner sees it: kinds of equal blocks between an entrance and an exit, in sizes only.

Every family (ViT, decoder, encoder, encoder–decoder, mixture of experts) is told in these few words, so that
`describe` lists the operators of all in one way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from penstock.config.model import ModelConfig, Seq2SeqConfig, Stack, ViTConfig, stacks

NEWTON_SCHULZ_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One kind of block; `count` such blocks are in the model."""

    count: int
    tokens: int
    width: int
    heads: int
    kv_heads: int
    features: int
    """Of one head."""
    hidden: int
    """Width of the MLP, or of one expert."""
    gated: bool = False
    rms: bool = False
    bias: bool = True
    qkv_bias: bool = True
    rotary: bool = False
    linear_bias: bool = False
    """Whether scores get a bias that grows with distance (ALiBi; Press et al., ICLR 2022)."""
    causal: bool = False
    window: int = 0
    """Keys that a query sees at the most; 0 is all."""
    parallel: bool = False
    """Whether attention and MLP read the same norm and run side by side."""
    dropout: bool = False
    """Of both branches."""
    score_dropout: bool = False
    hidden_dropout: bool = False
    """After the activation."""
    qk_norm: bool = False
    layer_scale: bool = False
    drop_path: bool = False
    cross: int = 0
    """Tokens of another stack that the block attends to besides; 0 is none."""
    experts: int = 0
    routed: int = 0
    """Experts that each token visits by routing."""
    shared: int = 0
    """Experts that every token visits."""
    capacity: float = 1.0

    def newton_schulz_flops(self, experts: float) -> float:
        """FLOPs of Muon's orthogonalisation of the block's matrices, those of so many experts among them."""
        d, a, kv = self.width, self.heads * self.features, self.kv_heads * self.features
        attend = 2 * newton_schulz_flops(d, a) + 2 * newton_schulz_flops(d, kv)
        mlp = (3 if self.gated else 2) * newton_schulz_flops(d, self.hidden)
        return attend * (2 if self.cross else 1) + mlp * (experts + self.shared if self.experts else 1)


def newton_schulz_flops(rows: int, columns: int) -> float:
    """FLOPs of Muon's orthogonalisation of one (rows, columns) matrix: five steps of three products each, of the
    shorter side n and the longer one m: 4 n² m + 2 n³ (Jordan et al. 2024, "Muon")."""
    n, m = min(rows, columns), max(rows, columns)
    return NEWTON_SCHULZ_STEPS * (4.0 * n * n * m + 2.0 * n * n * n)


@lru_cache(maxsize=256)
def blocks_of(model: ModelConfig) -> tuple[Block, ...]:
    """The kinds of blocks of a model, in the order in which they run."""
    if isinstance(model, Seq2SeqConfig):
        encoder, decoder = stacks(model)
        return (
            *_kinds(encoder, model.sequence),
            *_kinds(decoder, model.decoder_sequence, causal=True, cross=model.sequence),
        )
    (stack,) = stacks(model)
    if isinstance(model, ViTConfig):
        return _kinds(
            stack, model.tokens, image=True, layer_scale=model.layer_scale is not None, drop_path=model.drop_path > 0
        )  # fmt: skip
    return _kinds(stack, model.tokens, causal=model.family == "decoder")


def _kinds(
    stack: Stack,
    tokens: int,
    *,
    causal: bool = False,
    cross: int = 0,
    image: bool = False,
    layer_scale: bool = False,
    drop_path: bool = False,
) -> tuple[Block, ...]:
    """Dense blocks, and those with experts; where both alternate, each kind is listed once."""
    sparse = stack.depth // stack.expert_every if stack.experts else 0
    drops = stack.dropout > 0
    found = []
    for mixture, count in ((False, stack.depth - sparse), (True, sparse)):
        if not count:
            continue
        found.append(Block(
            count=count, tokens=tokens, width=stack.width, heads=stack.heads, kv_heads=stack.kv,
            features=stack.head_width, hidden=(stack.expert_width if mixture else None) or stack.mlp_width,
            gated=stack.gated, rms=stack.norm == "rms", bias=stack.bias, qkv_bias=stack.qkv_bias,
            rotary=stack.positions == "rotary", linear_bias=stack.positions == "alibi", causal=causal,
            window=stack.window or 0, parallel=stack.parallel, dropout=drops, score_dropout=drops and not image,
            hidden_dropout=drops and image, qk_norm=stack.qk_norm, layer_scale=layer_scale, drop_path=drop_path,
            cross=cross, experts=stack.experts if mixture else 0, routed=stack.experts_per_token if mixture else 0,
            shared=stack.shared_experts if mixture else 0, capacity=stack.capacity,
        ))  # fmt: skip
    return tuple(found)


def counted_tokens(model: ModelConfig) -> int:
    """Tokens that one sample counts for in tokens per second: an encoder–decoder's those of its decoder."""
    return model.decoder_sequence if isinstance(model, Seq2SeqConfig) else model.tokens


def output_of(model: ModelConfig) -> tuple[int, int]:
    """Tokens of a sample at which there is an output, and how wide it is: classes or vocabulary."""
    if isinstance(model, ViTConfig):
        return 1, model.classes
    return counted_tokens(model), model.vocabulary
