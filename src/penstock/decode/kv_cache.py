"""Keys and values of earlier tokens in every block, kept so that a token is computed once.

One cache serves all ways of generating. New tokens of a text, N at a time, attend to the columns of the cache, and a
mask says which columns each attends to: a prompt's tokens to earlier ones; beams, which are tokens of one text at the
same position, to their ancestors; speculated tokens to their own branch. So no beam copies keys or values.

Shapes: R rows of the cache, one per text; N new tokens; C columns; G KV heads, H query heads; K features.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.config.plan import AttentionBackend
from penstock.containers import replaced
from penstock.decode.looks import Continuing, grouped_attention
from penstock.kernels.attention import Scores, attention
from penstock.kernels.padding import within
from penstock.models.anatomy import ELSEWHERE

NEVER = 1 << 30
"""The position of a column that no token may attend to."""
_FIRST = 64
"""Initial number of columns of a cache; it doubles when more are needed."""


class Columns:
    """Keys and values of each layer, with one row of columns per text."""

    def __init__(self, rows: int, columns: int) -> None:
        """`columns` is the maximum number of columns."""
        self.rows, self.columns = rows, columns
        self.layers: list[tuple[Tensor, Tensor]] = []

    def keep(self, layer: int, k: Tensor, v: Tensor, past: KVCache) -> tuple[Tensor, Tensor]:
        """Write new keys and values, (r, G, N, K), and return those of the first `width` columns, (r, G, width, K)."""
        if layer == len(self.layers):
            empty = (self.rows, k.shape[1], 0)
            self.layers.append((k.new_zeros(*empty, k.shape[3]), v.new_zeros(*empty, v.shape[3])))
        if self.layers[layer][0].shape[2] < past.width:
            self._grow(layer, past.width)
        in_sight = []
        for store, new in zip(self.layers[layer], (k, v)):
            rows = store if past.all_rows else store[past.rows]
            if isinstance(past.columns, int):
                rows.narrow(2, past.columns, new.shape[2]).copy_(new)
            else:
                rows.scatter_(2, past.columns[:, None, :, None].expand_as(new), new)
            in_sight.append(rows.narrow(2, 0, past.width))
        return in_sight[0], in_sight[1]

    def _grow(self, layer: int, width: int) -> None:
        """Grow to at least `width` columns. Unwritten columns are zero, because 0 times NaN would be NaN."""
        present = self.layers[layer][0].shape[2]
        columns = min(self.columns, max(width, 2 * present, _FIRST))
        k, v = (F.pad(store, (0, 0, 0, columns - present)) for store in self.layers[layer])
        self.layers[layer] = k, v

    @property
    def width(self) -> int:
        """Number of columns that are allocated now."""
        return self.layers[0][0].shape[2] if self.layers else 0

    def fix(self, width: int) -> None:
        """Allocate exactly `width` columns."""
        if self.width != width:
            self.layers = replaced(self.layers, partial(_widened, width=width))

    def only(self, rows: Tensor) -> None:
        """Keep only these rows."""
        self.rows = len(rows)
        self.layers = replaced(self.layers, lambda store: store.index_select(0, rows))

    def gather(self, places: Tensor) -> None:
        """Move the columns at `places` (R, c) of each row to the front, and drop the others."""
        index = places[:, None, :, None]
        self.layers = replaced(
            self.layers, lambda store: store.gather(2, index.expand(-1, store.shape[1], -1, store.shape[3]))
        )


def _widened(store: Tensor, width: int) -> Tensor:
    return F.pad(store, (0, 0, 0, width - store.shape[2]))


class Pages:
    """Keys and values of each layer in blocks of tokens that any text can use: see `penstock.decode.blocks`."""

    def __init__(self, blocks: int, size: int) -> None:
        self.tokens, self.size = blocks * size, size
        self.layers: list[tuple[Tensor, Tensor]] = []
        self.table = torch.zeros(0, 0, dtype=torch.int64)
        """(r, blocks per text), the blocks of the texts in this pass."""
        self._pass: dict[int, tuple[Tensor, Tensor]] = {}
        """The rows that this pass writes and reads, by number of KV heads, which may differ between layers."""

    def look(self, table: Tensor) -> None:
        """Set the blocks of the texts of the next pass."""
        self.table, self._pass = table, {}

    def keep(self, layer: int, k: Tensor, v: Tensor, past: KVCache) -> tuple[Tensor, Tensor]:
        """The same as `Columns.keep`. Columns are gathered, because the kernels need contiguous keys."""
        if layer == len(self.layers):
            rows = k.shape[1] * self.tokens
            self.layers.append((k.new_zeros(rows, k.shape[3]), v.new_zeros(rows, v.shape[3])))
        if k.shape[1] not in self._pass:
            self._pass[k.shape[1]] = self._places(past, k.shape[1], k.shape[2])
        written, read = self._pass[k.shape[1]]
        in_sight = []
        for store, new in zip(self.layers[layer], (k, v)):
            flat = new.flatten(0, 2) if new.is_contiguous() else new.reshape(-1, new.shape[3])
            store.index_copy_(0, written, flat)
            in_sight.append(store.index_select(0, read).view(*new.shape[:2], past.width, new.shape[3]))
        return in_sight[0], in_sight[1]

    def _places(self, past: KVCache, groups: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Rows of the store that the new tokens are written to, and rows to read: (r·G·N,) and (r·G·width,)."""
        device = self.table.device
        columns = past.columns
        if not isinstance(columns, Tensor):
            columns = torch.arange(columns, columns + tokens, device=device).expand(len(self.table), -1)
        every = torch.arange(past.width, device=device).expand(len(self.table), -1)
        heads = torch.arange(groups, device=device)[None, :, None] * self.tokens

        def of(columns_: Tensor) -> Tensor:
            blocks = self.table.gather(1, (columns_ // self.size).clamp(max=self.table.shape[1] - 1))
            return ((blocks * self.size + columns_ % self.size)[:, None] + heads).flatten()

        return of(columns), of(every)


class KVCache(Continuing):
    """A cache, and the positions of the current pass's tokens in it; a model continues texts with it.

    Call `at` before each pass, then `model(…, past=past)`.
    """

    def __init__(
        self, store: Columns | Pages, *, rows: int, columns: int, positions: int | None = None, memory: int = 0,
        device: torch.device,
    ) -> None:  # fmt: skip
        """`rows` and `columns` are the size of the cache. `positions` is the maximum number of positions of a text, for
        caches whose columns are not the tokens' positions. `memory` is the number of tokens of a source, for texts that
        start at different times."""
        self.store, self.positions = store, positions or columns
        self.in_order = positions is None
        places = torch.arange(columns, device=device)[None]
        self.key_places = places if self.in_order else torch.full((rows, columns), NEVER, device=device)
        """(R, C) or (1, C), positions of the tokens in the columns."""
        self.places = self.key_places.new_zeros(0)
        self.rows, self.all_rows, self.width = slice(None), True, 0
        self.columns: int | Tensor = 0
        self.remembers = False
        self.column_places = self.key_places
        self._in_order = self.key_places[:, :0]
        self.memory: list[tuple[Tensor, Tensor]] = []
        self._memory_shape = (rows, memory) if memory else None
        self.memory_mask: Tensor | None = None
        self.tables: dict[str, Any] = {}

    def at(
        self, places: Tensor, *, columns: int | Tensor, width: int, rows: slice = slice(None),
        key_places: Tensor | None = None, seen: Tensor | None = None, first: bool = False, alone: bool = False,
    ) -> None:  # fmt: skip
        """Set the places of the next pass's tokens.

        `places` (N,) or (r, N) are their positions, `columns` where their keys are written: the first of N columns, or
        (r, N). They attend to the first `width` columns, as far as a column's position is not after their own, or as
        `seen` (r, N, width) says. `key_places` (r, N) are their positions as keys, if these are not `places`: padding
        has `NEVER`. `first`: the cache is empty, and columns are the tokens of this pass in order. `alone`: one token
        that attends to all of these columns.
        """
        self.places, self.columns, self.width = places, columns, width
        self.rows, self.all_rows = rows, rows == slice(None)
        if not self.in_order:
            assert isinstance(columns, int)
            key_positions = places if key_places is None else key_places
            self.key_places[:, columns : columns + key_positions.shape[-1]] = key_positions
        self.column_places = self.key_places[:, :width]
        self.seen, self.causal, self.alone = seen, first, alone

    def windows_of(self, stack: Any) -> tuple[int, ...]:
        """The windows of this rank's blocks; other ranks compute the other blocks."""
        on_rank = (not block.__dict__.get(ELSEWHERE) for block in stack.blocks)
        return tuple(itertools.compress(stack.windows, on_rank))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def hold(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See `Continuing.hold`."""
        return self.store.keep(layer, k, v, self)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(
        self, layer: int, mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor, backend: AttentionBackend,
        scores: Scores,
    ) -> Tensor:  # fmt: skip
        """See `Continuing.attend`."""
        keys, values = self.store.keep(layer, k, v, self)
        if self.causal:
            return attention(q, k, v, backend, scores._replace(mask=mask, causal=mask is None, dropout=0.0))
        return grouped_attention(q, keys, values, mask, backend, scores)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend_across(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, backend: AttentionBackend, scores: Scores
    ) -> Tensor:
        """See `Continuing.attend_across`."""
        if k.shape[2]:
            if self._memory_shape is None:
                self.memory.append((k.contiguous(), v.contiguous()))
            else:
                if layer == len(self.memory):
                    rows, columns = self._memory_shape
                    shape = (rows, k.shape[1], columns, k.shape[3])
                    self.memory.append((k.new_zeros(shape), v.new_zeros(shape)))
                for store, new in zip(self.memory[layer], (k, v)):
                    store[self.rows, :, : new.shape[2]] = new
            self.remembers = True
        (keys, values), mask = self.memory[layer], self.memory_mask
        if not self.all_rows:
            keys, values = keys[self.rows], values[self.rows]
            mask = mask if mask is None else mask[self.rows]
        mask = mask if mask is None else mask.to(q.dtype)
        return grouped_attention(q, keys, values, mask, backend, scores)

    def remember(self, lengths: Tensor | None, memory: int) -> None:
        """Set the number of real tokens in each row's source, (R,), of `memory` tokens; None: all."""
        self.memory_mask = None
        if lengths is not None:
            self.see(within(lengths, memory))

    def see(self, seen: Tensor) -> None:
        """Set which tokens of the memory each row attends to, (R, 1, 1, M)."""
        self.memory_mask = torch.zeros((), device=seen.device).masked_fill(~seen, -math.inf)

    def fix(self, width: int) -> Tensor:
        """Allocate exactly `width` columns, for passes whose shapes do not change. Returns their positions (1 or R,
        width), which the pass itself updates if columns are not in order of position."""
        assert isinstance(self.store, Columns)
        self.store.fix(width)
        if self.in_order:
            if self._in_order.shape[1] != width:
                self._in_order = torch.arange(width, device=self.key_places.device)[None]
            return self._in_order
        rows, present = self.key_places.shape
        if present != width or rows != self.store.rows:
            wide = F.pad(self.key_places, (0, width - present), value=NEVER)
            self.key_places = wide.expand(self.store.rows, -1).contiguous()
        return self.key_places

    def fix_memory(self, width: int) -> None:
        """Allocate `width` tokens of a source; no token attends to the added ones."""
        assert self.memory_mask is not None
        more = width - self.memory_mask.shape[3]
        if more:
            self.memory = replaced(self.memory, partial(_widened, width=width))
            self.memory_mask = F.pad(self.memory_mask, (0, more), value=-math.inf)

    def take(self, tensors: Any) -> None:
        """Use the tensors of a `penstock.decode.static.StepTensors`."""
        self.store.layers, self.memory = tensors.layers, tensors.memory
        self.memory_mask, self.tables = tensors.memory_mask, tensors.tables
        if self.in_order:
            self._in_order = tensors.column_places
        else:
            self.key_places = tensors.column_places

    def keep(self, rows: Tensor) -> None:
        """Continue with only these texts of a batch."""
        assert isinstance(self.store, Columns)
        self.store.only(rows)
        self.memory = replaced(self.memory, lambda store: store.index_select(0, rows))
        if self.memory_mask is not None:
            self.memory_mask = self.memory_mask.index_select(0, rows)
        if len(self.key_places) > 1:
            self.key_places = self.key_places.index_select(0, rows)

    def gather(self, places: Tensor) -> None:
        """Move the columns at `places` (R, c) to the front, and drop the others, which no token attends to any more."""
        assert isinstance(self.store, Columns)
        self.store.gather(places)
        positions = self.key_places.expand(len(places), -1)
        left_out = positions.shape[1] - places.shape[1]
        self.key_places = F.pad(positions.gather(1, places), (0, left_out), value=NEVER)


def run_pass(
    model: Any, past: Any, tokens: Tensor, rows: Tensor | None = None, source: Tensor | None = None,
    lengths: Tensor | None = None, routes: Tensor | None = None, values: Mapping[str, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """One pass of a model over tokens (R, N): logits (R·N, V), or (M, V) for the tokens at `rows` (M,). An
    encoder–decoder needs its source (R, S) in the first pass, with the `lengths` (R,) of its texts; a model with
    several sources needs `values` instead, its arguments for those that are used. `routes` (R,) are labels, for a model
    whose experts are chosen by them."""
    graph = model.graph
    arguments: dict[str, Any] = {**(values or {}), **({} if routes is None else {"routes": routes})}
    if graph.remembered and values is None:
        arguments |= {graph.input_of(graph.remembered[0]).name: source, "lengths": lengths}
    arguments[graph.text.name] = tokens
    logits: Tensor = model.logits(**arguments, rows=rows, past=past)
    return logits if rows is not None else logits.flatten(0, 1)
