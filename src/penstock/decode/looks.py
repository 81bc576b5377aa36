"""Attention over cached columns, for eager and compiled passes: the context of the blocks, masks by position, rotary
angles, and attention of query heads that share KV heads.

Shapes: R texts, or 1 if all are equal; N new tokens; W columns; G KV heads, H query heads; K features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.config.plan import AttentionBackend
from penstock.kernels.attention import Scores, attention, type_of_scores
from penstock.models.embeddings import Rotation, alibi, rotations
from penstock.models.inputs import Context, Continued


class Continuing:
    """The base of a pass over tokens that continue cached ones: a `penstock.models.inputs.TokenCache`. Each stack of a
    model has its own tables and cached keys and values."""

    places: Tensor
    """(N,) or (R, N), positions of the tokens."""
    positions: float
    """Maximum number of positions of a text; windows may be wider."""
    column_places: Tensor
    """(R or 1, W), positions of the tokens in the columns."""
    seen: Tensor | None = None
    """(R, N, W), which columns each token attends to; None: those whose positions are not after its own."""
    causal = False
    """Whether the cache is empty, and columns are the tokens of this pass in order."""
    alone = False
    """Whether the pass has one token, which attends to all columns."""
    remembers = False
    """Whether the keys and values of the memory are cached too."""
    tables: dict[str, Any]
    """Rotations and biases of each stack, over all positions."""
    run = layer = across = 0
    """Numbers of stacks, blocks and cross-attentions that this pass has computed so far."""

    def context(self, stack: Any, x: Tensor, memory: Tensor | None) -> Context:
        """The `Context` for the blocks of a `TokenStack` in this pass."""
        if stack.begins:  # a pipeline stage also computes the shapes that it receives, in an extra pass
            self.run = self.layer = self.across = 0
        windows, dtype, crosses = self.windows_of(stack), type_of_scores(x), stack.crosses
        masks = {window: self._mask(stack, window, dtype) for window in dict.fromkeys(windows)}
        look, across = _Look(self.attend, self.layer, [(masks[window],) for window in windows]), None
        look.first, look.store = self.causal, self.hold
        turns: dict[str, Any] = self._turns(stack)
        if crosses and (memory is not None or self.remembers):
            # Blocks compute keys and values of the memory in the first pass; later passes get an empty memory.
            memory = x.new_zeros(1, 0, x.shape[2]) if memory is None else memory
            memory = memory.transpose(0, 1) if stack.sequence_first else memory
            across = _Look(self.attend_across, self.across, [()] * len(windows))
        self.run += 1
        self.layer += len(windows)
        self.across += len(windows) * crosses
        return Context(mask=look, near=look, memory=memory if across else None, memory_mask=across, **turns)

    def windows_of(self, stack: Any) -> tuple[int, ...]:
        """The window of each block that is computed here; 0: no window."""
        windows: tuple[int, ...] = stack.windows
        return windows

    def attend(self, layer: int, mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *how: Any) -> Tensor:
        """Cache k and v of a block's new tokens, and attend to all columns; `how` is the backend and `Scores`."""
        raise NotImplementedError

    def hold(self, layer: int, k: Tensor, v: Tensor) -> Any:
        """Cache k and v of a block's new tokens, (r, G, N, K)."""
        raise NotImplementedError

    def attend_across(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *how: Any) -> Tensor:
        """Attend to the memory; k and v are empty once they are cached."""
        raise NotImplementedError

    @property
    def _rows(self) -> Tensor:
        return self.places if self.places.dim() == 2 else self.places[None]

    def _turns(self, stack: Any) -> dict[str, Rotation]:
        if (name := f"turns {self.run}") not in self.tables:
            every = torch.arange(int(self.positions), device=self.places.device)
            self.tables[name] = rotations(stack.turns, every, sequence_first=False)
        places, tables = self._rows, self.tables[name]

        def chosen(table: Tensor) -> Tensor:
            turns = table[0].index_select(0, places.flatten()).view(*places.shape, 1, table.shape[-1])
            return turns.transpose(0, 1) if stack.sequence_first else turns

        return {name: (chosen(cosine), chosen(sine)) for name, (cosine, sine) in tables.items()}

    def _mask(self, stack: Any, window: int, dtype: torch.dtype) -> Tensor | None:
        """Values to add to scores, (R or 1, H or 1, N, W): −∞ for columns that a token does not attend to, and biases
        by how far a column is before it; None if nothing is masked, or a causal mask is enough."""
        narrow, seen = 0 < window < self.positions, self.seen
        if not narrow and not stack.biased and (self.causal or self.alone):
            return None
        if not narrow and not stack.biased and seen is not None:
            return torch.where(seen, 0.0, -math.inf).to(dtype).unsqueeze(1)
        distance = self._rows[:, :, None] - self.column_places[:, None]  # (R, N, W)
        near = distance >= 0
        near = near & (distance < window) if narrow else near
        near = near if seen is None else near & seen
        if self.causal:  # each token attends to itself, because a row of only −∞ would be NaN
            near = near | torch.eye(near.shape[2], dtype=torch.bool, device=near.device)[: near.shape[1]]
        if not stack.biased:
            return torch.where(near, 0.0, -math.inf).to(dtype).unsqueeze(1)
        biases = self._by_distance(stack)
        bias = biases[:, distance.clamp(0, biases.shape[1] - 1)].transpose(0, 1)
        return bias.masked_fill(~near.unsqueeze(1), -math.inf).to(dtype)

    def _by_distance(self, stack: Any) -> Tensor:
        """Biases (H, positions) by how far a key is before its query."""
        if (name := f"bias {self.run}") not in self.tables:
            count = int(self.positions)
            if stack.relative is not None:
                table = stack.relative(count, 1)
            else:
                table = alibi(stack.sizes.heads, count, 1, self.places.device)[:, stack.heads]
            self.tables[name] = table[0, :, :, 0]
        biases: Tensor = self.tables[name]
        return biases


class _Look(Continued):
    """An `AttentionMask` over the columns, or over a memory whose keys and values are computed in the first pass and
    cached. Each call serves the next block, because blocks run in order."""

    def __init__(self, attend: Callable[..., Tensor], layer: int, more: Sequence[tuple[Any, ...]]) -> None:
        """`more` holds the arguments of `attend` for each block, after its number."""
        self._attend, self._more, self._first, self._layer = attend, more, layer, layer
        self.first, self.store = False, attend

    def keep(self, k: Tensor, v: Tensor) -> Tensor | None:
        layer, self._layer = self._layer, self._layer + 1
        self.store(layer, k, v)
        mask: Tensor | None = self._more[layer - self._first][0]
        return mask

    def attend(self, q: Tensor, k: Tensor, v: Tensor, backend: AttentionBackend, scores: Scores) -> Tensor:
        """The same as `penstock.kernels.attention.attention`, for the next block."""
        layer, self._layer = self._layer, self._layer + 1
        return self._attend(layer, *self._more[layer - self._first], q, k, v, backend, scores)


def grouped_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, backend: AttentionBackend, scores: Scores
) -> Tensor:
    """Attention in which query heads that share a KV head become tokens of one head, so that keys are read once.
    `scores` holds options other than the mask. Values without features mean that the keys serve as values."""
    texts, heads, tokens, features = q.shape
    v = v if v.shape[-1] else k
    if torch.compiler.is_exporting():  # the code below would export for one number of tokens only
        k, v = (each.repeat_interleave(heads // each.shape[1], dim=1) for each in (k, v))
    groups = k.shape[1]
    if groups == heads:
        return attention(q, k, v, backend, scores._replace(mask=mask, causal=False, dropout=0.0))
    queries_per_group = heads // groups
    if mask is not None:
        if mask.shape[1] == 1:
            mask = mask.repeat(1, 1, queries_per_group, 1)
        else:
            mask = torch.unflatten(mask, 1, (groups, queries_per_group)).flatten(2, 3)
    together, sinks = q.reshape(texts, groups, queries_per_group * tokens, features), scores.sinks
    if sinks is not None:
        sinks = sinks.expand(-1, tokens).reshape(groups, -1)
    options = scores._replace(mask=mask, causal=False, dropout=0.0, sinks=sinks)
    outputs = attention(together, k, v, backend, options)
    return outputs.reshape(texts, heads, tokens, features)
