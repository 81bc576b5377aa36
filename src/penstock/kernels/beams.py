"""The settings of a beam search, and the state of its beams: see `penstock.kernels.beam_step`.

Shapes: B texts, b beams.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

OUT = -1e9
"""Score of what must not be chosen; transformers' own, for sums of it are compared."""
NOTHING = -1
"""Number in the place of a token where there is none."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The settings of a search; the same in all its steps."""

    size: int
    """Beams of a text."""
    steps: int
    """Most tokens of a text."""
    stops: tuple[int, ...] = ()
    """Tokens that end a text."""
    length_penalty: float = 1.0
    stopping: Literal["never", "heuristic", "full"] = "heuristic"
    """As `Decoding.early_stopping`."""

    @property
    def kept(self) -> int:
        """Candidates of a text: so many that, whichever end, `size` of them go on."""
        return (max(2, 1 + len(self.stops)) if self.stops else 1) * self.size

    def divisors(self, step: int) -> tuple[float, float]:
        """Divisors of the scores of texts that end in a step, and of those of beams that may still become longer."""
        longest = self.stopping == "never" and self.length_penalty > 0
        ahead = self.steps if longest else step + 1
        return (step + 1) ** self.length_penalty, ahead**self.length_penalty


class Beams(NamedTuple):
    """The state of the beams of texts."""

    scores: Tensor
    """(B, b), sums of log-probabilities."""
    done_scores: Tensor
    """(B, b), of the best texts that have ended."""
    done: Tensor
    """(B, b), their codes."""
    finished: Tensor
    """(B, b), which of these there are."""
    hopeful: Tensor
    """(B, 1), whether a beam can still become better than one that has ended."""
    fresh: bool
    """Whether no text can have ended yet, as far as the host knows without waiting."""

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
    """(B, b), the beam that each new one continues."""
    chosen: Tensor
    """(B, b), the token that it continues it with."""
