"""A model as the planner sees it: kinds of equal blocks between an entrance and an exit, in sizes only.

Every family (ViT, decoder, encoder, encoder–decoder, mixture of experts) is described by these few fields, so that
`describe` lists the operators of all in one way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from penstock.config.layer import Layer
from penstock.config.model import ModelConfig
from penstock.config.stack import Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKind:
    """One kind of block, of which the model has `count`, with the sizes of `stack`."""

    stack: Stack
    layer: Layer
    count: int
    tokens: int
    causal: bool = False
    cross: int = 0
    """Tokens of another stack that the block also attends to; 0 is none."""
    cross_width: int = 0
    """Features of each token of the other stack."""
    modulated: bool = False
    """Whether the block is shifted, scaled and gated by each sample's condition."""
    run: int = 0
    """Index of the block's run in the model's graph."""
    samples: float = 1.0
    """Samples that the block computes per sample of a micro-batch."""
    inputs: int = 1
    """Number of inputs that these samples come from, each with its own mask."""

    @property
    def share(self) -> float:
        """Share of its run's samples that the block computes."""
        return 1 / self.stack.experts if self.layer.routed else 1.0


@lru_cache(maxsize=256)
def blocks_of(model: ModelConfig) -> tuple[BlockKind, ...]:
    """The kinds of blocks of a model, run by run, each kind once, at the position of its first block."""
    graph = model.graph
    return tuple(
        BlockKind(
            stack=run.stack, layer=layer, count=count, tokens=graph.length(run), run=number,
            causal=all(graph.hides_later(run, source) for source in graph.inputs_through(run)),
            samples=graph.samples(run), inputs=len(graph.inputs_through(run)), modulated=run.modulated,
            cross=sum(graph.length(graph.run(name)) for name in run.memories), cross_width=graph.memory_width(run),
        )
        for number, run in enumerate(graph.runs)
        for layer, count in run.stack.kinds.items()
    )  # fmt: skip


def counted_tokens(model: ModelConfig) -> int:
    """Tokens of one sample that tokens per second count: those that the last head reads."""
    return model.graph.length(model.graph.main)
