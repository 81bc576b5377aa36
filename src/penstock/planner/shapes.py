"""A model as the planner sees it: kinds of equal blocks between an entrance and an exit, in sizes only.

Every family (ViT, decoder, encoder, encoder–decoder, mixture of experts) is described in these few words, so that
`describe` lists the operators of all in one way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from penstock.config.model import ModelConfig, Seq2SeqConfig, ViTConfig, sequences, stacks
from penstock.config.stack import Layer, Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One kind of block; `count` such blocks are in the model, with the sizes of `stack`."""

    stack: Stack
    layer: Layer
    count: int
    tokens: int
    causal: bool = False
    cross: int = 0
    """Tokens of another stack that the block also attends to; 0 is none."""

    @property
    def layer_scale(self) -> bool:
        """Whether branches are scaled by learned factors."""
        return isinstance(self.stack, ViTConfig) and self.stack.layer_scale is not None

    @property
    def drop_path(self) -> bool:
        """Whether whole branches are left out at random."""
        return isinstance(self.stack, ViTConfig) and self.stack.drop_path > 0


@lru_cache(maxsize=256)
def blocks_of(model: ModelConfig) -> tuple[Block, ...]:
    """The kinds of blocks of a model, stack by stack, each kind once and where its first block runs."""
    found = []
    for i, (stack, tokens) in enumerate(zip(stacks(model), sequences(model))):
        causal, cross = i > 0 or model.family == "decoder", model.tokens if i > 0 else 0
        found += [
            Block(stack=stack, layer=layer, count=count, tokens=tokens, causal=causal, cross=cross)
            for layer, count in stack.kinds.items()
        ]
    return tuple(found)


def counted_tokens(model: ModelConfig) -> int:
    """Tokens that one sample counts for in tokens per second: an encoder–decoder's those of its decoder."""
    return model.decoder_sequence if isinstance(model, Seq2SeqConfig) else model.tokens
