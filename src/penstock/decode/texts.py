"""The texts of one batch during generation: their cache, and the model's passes over their next tokens.

Shapes: B texts, P tokens of the longest prompt, M of the longest source, N new tokens of each text, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.config.decoding import bucket
from penstock.decode.choose import history_of
from penstock.decode.kv_cache import NEVER, Columns, KVCache, run_pass, run_pass_with
from penstock.decode.static import Compiled
from penstock.models.model import Model
from penstock.shards import TENSOR

Generating = Model
_FEW = 0.75
"""Share of unfinished texts below which finished ones are removed from the batch."""
ASK = 16
"""Steps on a GPU between two checks whether all texts have ended; each check waits for the GPU."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """The beginnings of texts. Padding comes last."""

    tokens: Tensor
    """(B, P) int64, of the decoder."""
    lengths: Tensor
    """(B,)"""
    source: Tensor | None = None
    """(B, M), of an encoder–decoder."""
    source_lengths: Tensor | None = None
    values: Mapping[str, Tensor] | None = None
    """Arguments of a model with several sources, in place of `source`: the sources that are used, their lengths, and
    which source each text attends to."""
    even: bool = False
    """Whether all prompts have the same length."""
    routes: Tensor | None = None
    """(B,) int64, the label of each text, for a model whose experts are chosen by it."""

    @classmethod
    def of(
        cls, ids: Sequence[Sequence[int]], *, start: int | None, device: torch.device,
        routes: Sequence[int | None] = (),
    ) -> Prompts:  # fmt: skip
        """Prompts of a decoder; or with `start`, the decoder's first token, sources of an encoder–decoder. `routes` has
        the labels of all texts, or is empty."""
        labels = None if not routes or None in routes else torch.tensor(routes, device=device)
        lengths = torch.tensor([len(row) for row in ids], device=device)
        longest = max(map(len, ids))
        tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in ids], device=device)
        if start is None:
            return cls(tokens, lengths, even=len({len(row) for row in ids}) == 1, routes=labels)
        return cls.translating(tokens, lengths, start, routes=labels)

    @classmethod
    def translating(
        cls, source: Tensor, lengths: Tensor, start: int, *, routes: Tensor | None = None
    ) -> Prompts:
        """Prompts from sources (B, M) with `lengths` (B,), for an encoder–decoder whose decoder begins with `start`."""
        tokens = torch.full((len(source), 1), start, device=source.device)
        return cls(tokens, torch.ones_like(lengths), source, lengths, even=True, routes=routes)

    def __len__(self) -> int:
        return len(self.tokens)

    def history(self) -> Tensor:
        """The decoder's first tokens, (B, P), right-aligned."""
        return history_of(self.tokens, self.lengths[:, None])

    def rows(self) -> list[list[int]]:
        """Token numbers of each prompt, or source, without padding."""
        tokens, lengths = self.tokens, self.lengths
        if self.source is not None:
            tokens, lengths = self.source, torch.full_like(lengths, self.source.shape[1])
            lengths = lengths if self.source_lengths is None else self.source_lengths
        return [row[:length] for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)]


class Texts:
    """Texts of a batch. Each call of `following` adds tokens (beams) at the next position of each text."""

    def __init__(
        self, model: Any, prompts: Prompts, *, steps: int, side_by_side: int, compiled: Compiled | None = None
    ) -> None:
        """The cache has space for `steps` calls of `following`, each with `side_by_side` tokens; `compiled` can run
        them."""
        self.model, self.prompts, self.compiled = model, prompts, compiled
        self.routes = prompts.routes if model.graph.routed else None
        """(B,), the label of each text."""
        rows, longest = prompts.tokens.shape
        columns = longest + steps * side_by_side
        columns = columns if compiled is None else bucket(columns)
        self.past = KVCache(
            Columns(rows, columns), rows=1 if prompts.even else rows, columns=columns, positions=columns,
            device=prompts.tokens.device,
        )  # fmt: skip
        self.filled = longest
        self.lengths = prompts.lengths[:1, None] if prompts.even else prompts.lengths[:, None]
        """(B, 1) or (1, 1), positions of the next tokens."""

    def first(self) -> Tensor:
        """Read the prompts: logits (B, V) after the last token of each."""
        prompts = self.prompts
        rows, longest = prompts.tokens.shape
        self._begin()
        last = torch.arange(rows, device=prompts.tokens.device) * longest + prompts.lengths - 1
        with nullcontext() if self.compiled is None else eagerly():
            return self._run(prompts.tokens, last, prompts.source, prompts.values or {})

    def _begin(self) -> None:
        prompts, past = self.prompts, self.past
        longest = prompts.tokens.shape[1]
        places = torch.arange(longest, device=prompts.tokens.device)
        key_places = None
        if not prompts.even:
            key_places = torch.where(places < prompts.lengths[:, None], places, NEVER)
        past.at(places, columns=0, width=longest, key_places=key_places, first=True, alone=longest == 1)
        if prompts.source is not None:
            past.remember(prompts.source_lengths, prompts.source.shape[1])

    def following(self, tokens: Tensor, seen: Tensor) -> Tensor:
        """Read the next tokens, (B, N), all at one position; return logits (B·N, V). `seen` (B, N, columns or more)
        says which columns each attends to."""
        if self.compiled is not None:
            return self._fixed(self.compiled, tokens, seen)
        self._follow(tokens.shape[1], seen)
        return self._run(tokens, None)

    def _fixed(self, compiled: Compiled, tokens: Tensor, seen: Tensor) -> Tensor:
        begin, self.filled = self.filled, self.filled + tokens.shape[1]
        assert isinstance(self.past.store, Columns)
        width = bucket(max(self.filled, self.past.store.width))
        if len(self.lengths) != len(tokens):
            self.lengths = self.lengths.expand(len(tokens), -1).contiguous()
        columns = torch.arange(begin, self.filled, device=tokens.device)[None]
        logits = compiled(self.past, tokens, self.lengths, columns, width, seen[:, :, :width].contiguous())
        self.lengths = self.lengths + 1
        return logits

    def _follow(self, count: int, seen: Tensor) -> None:
        begin, self.filled = self.filled, self.filled + count
        places = self.lengths.expand(-1, count)
        places = places[0] if len(places) == 1 else places
        self.past.at(places, columns=begin, width=self.filled, seen=seen[:, :, : self.filled])
        self.lengths = self.lengths + 1

    def _run(
        self, tokens: Tensor, rows: Tensor | None, source: Tensor | None = None,
        values: Mapping[str, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        lengths = None if source is None else self.prompts.source_lengths
        if self.prompts.values is not None:
            return run_pass_with(self.model, self.past, tokens, rows, values or {})
        return run_pass(self.model, self.past, tokens, rows, source, lengths, self.routes)

    def keep(self, rows: Tensor) -> None:
        """Continue with only the texts in `rows`."""
        self.past.keep(rows)
        self.routes = None if self.routes is None else self.routes[rows]
        if len(self.lengths) > 1:
            self.lengths = self.lengths[rows]


def remaining(going: Tensor, compiled: Compiled | None) -> Tensor | None:
    """Rows of the texts to continue with: all unfinished, and perhaps some finished ones; None: all rows."""
    count = int(going.sum())
    if compiled is not None and compiled.rounds:
        count = (
            1 << (count - 1).bit_length()
        )  # keeps some finished texts, so that few different numbers of texts occur
        if count > len(going) // 2:
            return None
        return (~going).to(torch.uint8).argsort(stable=True)[:count].sort().values
    return going.nonzero().squeeze(1) if count < _FEW * len(going) else None


def eagerly() -> AbstractContextManager[Any]:
    """Within this context, compiled parts of models run eagerly: shapes change from step to step, and each would be
    compiled again."""
    if "torch._dynamo" not in sys.modules:  # nothing has been compiled, and the import takes a second
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def sharded(model: torch.nn.Module) -> bool:
    """Whether ranks with different texts hold parts of the model's weights, so that all must take the same number of
    steps. Ranks that split each layer have the same texts, which end at the same step."""
    meshes = (each.device_mesh for each in model.parameters() if hasattr(each, "device_mesh"))
    return any(mesh.mesh_dim_names != (TENSOR,) for mesh in meshes)
