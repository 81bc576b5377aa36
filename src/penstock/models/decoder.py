"""The decoder: a causal language model (Radford et al., 2019; Touvron et al., 2023)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from penstock.models.block import Past
from penstock.models.stack import TextModel, TokenStack


class Decoder(TextModel):
    """Token numbers (B, N) to logits of each next token (B, N, V); weights are drawn from torch's global generator."""

    def _build(self, **where: Any) -> None:
        config = self.config
        self.tokens = nn.Embedding(config.vocabulary, self._width, **where)
        self.decoder = TokenStack(config, config, causal=True, **where)  # type: ignore[arg-type]
        self.head = self._make_head(**where)

    def forward(
        self,
        tokens: Tensor,
        documents: Tensor | None = None,
        targets: Tensor | None = None,
        rows: Tensor | None = None,
        smoothing: float = 0.0,
        past: Past | None = None,
    ) -> Tensor:
        """Padding comes last in a sample, where no token before it sees it. `documents` (B, N) are numbers that change
        where another document begins: attention does not cross from one to the next, and positions start again. With
        `targets` (B, N), or of `rows` (M,), the summed loss: see `TextModel`. With a `past`, the tokens follow those
        that it keeps.
        """
        x = self.decoder(self.embed(tokens), documents=documents, past=past)
        return self.words(self.chosen(x, rows), targets, smoothing)
