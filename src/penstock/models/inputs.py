"""The inputs of blocks besides tokens, and the cache of a text that is continued."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from penstock.kernels.attention import AttentionMask
from penstock.kernels.padding import Real


class Context(NamedTuple):
    """The inputs of all blocks of a stack besides the tokens, in one pass. Masks are as `attention` takes them."""

    mask: Tensor | AttentionMask | None = None
    near: Tensor | AttentionMask | None = None
    """The mask of blocks with a sliding window."""
    rotation: tuple[Tensor, Tensor] | None = None
    """Cosine and sine of rotary positions, broadcast to the first half of each head's features."""
    near_rotation: tuple[Tensor, Tensor] | None = None
    """Cosine and sine for blocks with a sliding window."""
    memory: Tensor | None = None
    """Features that cross attention reads, in the order of the tokens."""
    memory_mask: Tensor | AttentionMask | None = None
    real: Real | None = None
    """Which tokens are computed, if padding is left out but attention sees it: see `penstock.kernels.padding`."""
    shares: Tensor | None = None
    """The share of each token in the balance of experts, in the order of the tokens, fp64: 0 of padding; the others of
    a sample have alike shares, and all samples together 1. None: alike ones of all."""
    routes: Tensor | None = None
    """The expert of each token, or its group of experts, in the order of the tokens, where they are given."""
    samples: Tensor | None = None
    """The number of each token's sample, in the order of the tokens, where experts are chosen by sample."""
    places: Tensor | None = None
    """The place of each token among all of the samples, sample by sample, in the order of the tokens, where experts
    have room for the first ones alone."""
    condition: Tensor | None = None
    """The vector of each sample that modulates norms, with a dimension of 1 for the tokens."""
    samples_of: tuple[Tensor, ...] = ()
    """The numbers of the samples of each expert, where experts are whole blocks."""
    causal: bool | None = None
    """Whether a token sees itself and those before it only, where no mask says so. None: as the blocks are made."""

    def take(self, samples: Tensor, along: int) -> Context:
        """The inputs of these samples alone, which are dimension `along` of the tokens."""
        mask = self.memory_mask
        if mask is not None:
            assert isinstance(mask, Tensor)
            mask = mask.index_select(0, samples)
        memory, condition = (
            None if one is None else one.index_select(along, samples) for one in (self.memory, self.condition)
        )
        return self._replace(memory=memory, memory_mask=mask, condition=condition)


ALONE = Context()


class TokenCache(Protocol):
    """The keys and values of earlier tokens, with which a model continues them: see `penstock.decode.kv_cache`."""

    places: Tensor
    """Positions of the tokens of this pass, (N,) or (B, N)."""
    remembers: bool
    """Whether it keeps the keys and values of the memory too, so that no source need be encoded."""

    def context(self, stack: Any, x: Tensor, memory: Tensor | None) -> Context:
        """The `Context` for the blocks of a `TokenStack` in this pass."""
        ...

    def see(self, seen: Tensor) -> None:
        """Note which tokens of several memories each text sees, (B, 1, 1, M)."""
        ...


class Continued(AttentionMask):
    """An `AttentionMask` of tokens and of those before them, whose keys and values are kept."""

    first: bool
    """Whether nothing is kept yet."""

    def keep(self, k: Tensor, v: Tensor) -> Tensor | None:
        """Keep keys and values of the first tokens, (B, G, N, K), and return the mask of their scores; None: causal.
        Values without features are those of the keys."""
        raise NotImplementedError
