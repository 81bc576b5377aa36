"""The settings of a beam search, and the state of its beams: see `penstock.kernels.beam_step`.

Shapes: B texts, b beams.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

OUT = -1e9
"""Score of candidates that must not be chosen; the value is transformers', because sums of it are compared."""
NOTHING = -1
"""Token id that stands for "no token"."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The settings of a search; the same in all its steps."""

    size: int
    """Beams per text."""
    steps: int
    """Most tokens per text."""
    stops: tuple[int, ...] = ()
    """Tokens that end a text."""
    length_penalty: float = 1.0
    stopping: Literal["never", "heuristic", "full"] = "heuristic"
    """See `Decoding.early_stopping`."""

    @property
    def kept(self) -> int:
        """Candidates per text: enough that `size` of them continue, whichever end."""
        return (max(2, 1 + len(self.stops)) if self.stops else 1) * self.size

    def divisors(self, step: int) -> tuple[float, float]:
        """Divisors of scores: for texts that end in this step, and for beams that may still grow."""
        longest = self.stopping == "never" and self.length_penalty > 0
        ahead = self.steps if longest else step + 1
        return (step + 1) ** self.length_penalty, ahead**self.length_penalty


class Beams(NamedTuple):
    """The state of the beams of texts."""

    scores: Tensor
    """(B, b), sums of log-probabilities."""
    done_scores: Tensor
    """(B, b), scores of the best finished texts."""
    done: Tensor
    """(B, b), codes of the finished texts."""
    finished: Tensor
    """(B, b), which of these places hold a finished text."""
    hopeful: Tensor
    """(B, 1), whether a beam can still beat a finished text."""
    fresh: bool
    """Whether no text can have ended yet, as far as the host knows without waiting for the device."""

    @classmethod
    def first(cls, rows: int, size: int, dtype: torch.dtype, device: torch.device) -> Beams:
        """The beams before the first step."""
        scores = torch.full((rows, size), OUT, dtype=dtype, device=device)
        done = torch.zeros(rows, size, dtype=torch.int64, device=device)
        begin = scores.clone()
        begin[:, 0] = 0.0  # at first all beams are the same
        hopeful = torch.ones(rows, 1, dtype=torch.bool, device=device)
        return cls(begin, scores, done, done.bool(), hopeful, device.type == "cpu")

    def only(self, rows: Tensor) -> Beams:
        """The beams of some texts."""
        scores, done_scores, done, finished, hopeful = (each[rows] for each in self[:5])
        return Beams(scores, done_scores, done, finished, hopeful, self.fresh)


class Step(NamedTuple):
    """The result of a step."""

    beams: Beams
    parents: Tensor
    """(B, b), the parent of each new beam."""
    chosen: Tensor
    """(B, b), the token that each new beam appends."""
