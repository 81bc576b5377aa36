"""The prompts of one batch of texts, and which of its texts continue.

Shapes: B texts, P tokens of the longest prompt, M of the longest source.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.decode.static import Compiled
from penstock.shards import TENSOR

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

    def rows(self) -> list[list[int]]:
        """Token numbers of each prompt, or source, without padding."""
        tokens, lengths = self.tokens, self.lengths
        if self.source is not None:
            tokens, lengths = self.source, torch.full_like(lengths, self.source.shape[1])
            lengths = lengths if self.source_lengths is None else self.source_lengths
        return [row[:length] for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)]


def remaining(going: Tensor, compiled: Compiled | None) -> Tensor | None:
    """Rows of the texts to continue with: all unfinished, and perhaps some finished ones; None: all rows."""
    count = int(going.sum())
    if compiled is not None and compiled.rounds:
        count = 1 << (count - 1).bit_length()  # so that few different numbers of texts occur
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
