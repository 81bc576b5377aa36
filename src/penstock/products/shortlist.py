"""A shortlist of the vocabulary: the output layer computes logits only for some tokens.

With a large vocabulary the output layer reads more weights than the rest of a step: in Marian 30 of 52 million. If the
possible words of a translation are known, or no others are wanted, most of this is saved. Tokens that are not on the
list have logits of −∞, so that log-probabilities are over the list.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from penstock.boundary.files import quoted, read_text
from penstock.errors import ConfigError
from penstock.kernels.cross_entropy import capped

_MOST = 1 << 26
"""Most bytes of a file of numbers."""


class Shortlist(nn.Module):
    """A replacement for a linear layer that computes logits: (…, D) to (…, V), −∞ for tokens off the list."""

    numbers: Tensor

    def __init__(self, head: nn.Linear, numbers: Sequence[int]) -> None:
        super().__init__()
        self.out_features, self.in_features = head.weight.shape
        device = head.weight.device
        self.register_buffer("numbers", torch.tensor(sorted(set(numbers)), device=device), persistent=False)
        rows = nn.Linear(
            self.in_features, len(self.numbers), bias=head.bias is not None, device=device,
            dtype=head.weight.dtype,
        )  # fmt: skip
        with torch.no_grad():
            rows.weight.copy_(head.weight[self.numbers])
            if head.bias is not None:
                rows.bias.copy_(head.bias[self.numbers])
        self.rows: nn.Module = rows
        self.cap: float = getattr(head, "cap", 0.0)

    def forward(self, x: Tensor) -> Tensor:
        listed = capped(self.rows(x), self.cap)
        every = listed.new_full((*listed.shape[:-1], self.out_features), -math.inf)
        logits: Tensor = every.index_copy_(-1, self.numbers, listed)
        return logits


def shorten(model: nn.Module, numbers: Iterable[int]) -> None:
    """Let a model of ours compute logits for these tokens only, in place. Raises ConfigError for an empty list, and for
    numbers outside the vocabulary."""
    head = model.head
    if isinstance(head, Shortlist):
        raise ConfigError(
            "The model has a shortlist already; give the model again, as the path of its folder."
        )
    assert isinstance(head, nn.Linear)
    listed, size = sorted(set(numbers)), len(head.weight)
    if not listed:
        raise ConfigError("The shortlist has no tokens; give some, or leave it out.")
    if listed[0] < 0 or listed[-1] >= size:
        wrong = listed[0] if listed[0] < 0 else listed[-1]
        raise ConfigError(
            f"The shortlist has token {wrong:,}, outside of the model's vocabulary of {size:,}."
        )
    model.head = Shortlist(head, listed)


def read_shortlist(file: str | Path) -> tuple[int, ...]:
    """Token numbers in a file, with white space between them. Raises ConfigError for anything else."""
    words = read_text(file, "The shortlist", limit=_MOST, error=ConfigError).split()
    for number, word in enumerate(words, 1):
        if not (word.isascii() and word.isdigit() and len(word) <= 9):
            raise ConfigError(
                f"The shortlist {quoted(str(file))} has {quoted(word)} as its entry {number:,}; give the numbers of "
                "tokens, with spaces or line breaks between them."
            )
    if not words:
        raise ConfigError(f"The shortlist {quoted(str(file))} is empty; list tokens in it, or leave it out.")
    return tuple(map(int, words))
