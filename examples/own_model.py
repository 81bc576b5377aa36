"""A model of your own: measure what makes it fast here, then train it with the Plan that was found.

    python examples/own_model.py
    python examples/own_model.py --plan "precision=O1 optimizer=fused"     # without measuring

The same factory works on the command line: `cd examples; penstock ladder --model own_model:factory`.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import Plan, Recipe
from penstock.build import build
from penstock.ladder import ladder

WORDS, LENGTH = 64, 32


class Copier(nn.Module):
    """A small decoder that learns to say again what it read half a sequence ago."""

    def __init__(self, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """(B, T) words to (B, T, WORDS) logits of the next word."""
        x = self.words(words) + self.places[: words.shape[1]]
        later = torch.ones(words.shape[1], words.shape[1], dtype=torch.bool, device=words.device).triu(1)
        for block in self.blocks:
            x = block(x, src_mask=later)
        return self.head(self.norm(x))


def sequences(count: int) -> Tensor:
    """(count, LENGTH) words whose second half repeats the first."""
    half = torch.randint(0, WORDS, (count, LENGTH // 2))
    return torch.cat([half, half], dim=1)


def loss(model: nn.Module, words: Tensor) -> Tensor:
    """Of the second half, which can be known."""
    logits = model(words[:, :-1]).float()[:, LENGTH // 2 - 1 :]
    return F.cross_entropy(logits.flatten(0, 1), words[:, LENGTH // 2 :].flatten())


def factory() -> tuple[nn.Module, Any, Any]:
    """What the ladder asks for: the model, one batch, and the loss of both."""
    return Copier(), sequences(32), loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--plan", help="one line; without it the ladder measures which is fastest")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--budget", type=float, default=120.0, help="seconds for the ladder")
    given = parser.parse_args()

    line = given.plan
    if line is None:
        report = ladder(factory=factory, quick=True, budget=given.budget)
        line = report.plan
        print(f"{report.speedup:.2f}× the plain loop's speed with {line!r}")

    torch.manual_seed(0)
    built = build(Copier(), Plan.parse(line), recipe=Recipe(lr=1e-3), loss=loss)
    for step in range(1, given.steps + 1):
        result = built.step([sequences(32)])
        if step % 50 == 0 or step in (1, given.steps):
            print(f"step {step}/{given.steps}  loss {result.loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
