"""The encoder–decoder (Vaswani et al., NeurIPS 2017; Raffel et al., JMLR 2020; Lewis et al., ACL 2020)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from penstock.config.model import Seq2SeqConfig
from penstock.models.block import Past
from penstock.models.stack import TextModel, TokenStack


class Seq2Seq(TextModel):
    """Token numbers of a source (B, M) and of a target (B, N) to logits of each next target token (B, N, V); both share
    one table of embeddings. Weights are drawn from torch's global generator.
    """

    config: Seq2SeqConfig

    def _build(self, **where: Any) -> None:
        config = self.config
        self.tokens = nn.Embedding(config.vocabulary, self._width, **where)
        self.encoder = TokenStack(config, config.encoder, causal=False, **where)
        self.decoder = TokenStack(config, config.decoder, causal=True, cross=True, **where)
        self.head = self._make_head(**where)

    def forward(
        self,
        source: Tensor | None,
        target: Tensor,
        lengths: Tensor | None = None,
        targets: Tensor | None = None,
        rows: Tensor | None = None,
        smoothing: float = 0.0,
        past: Past | None = None,
    ) -> Tensor:
        """`lengths` (B,) are how many tokens of each source are no padding, which comes last. With `targets` (B, N) of
        the target's tokens, or of `rows` (M,), the summed loss: see `TextModel`. With a `past`, the target's tokens
        follow those that it keeps; once it remembers a source, none is given.
        """
        memory = None if source is None else self.encode(source, lengths)
        x = self.decoder(self.embed(target), memory=memory, memory_lengths=lengths, past=past)
        return self.words(self.chosen(x, rows), targets, smoothing)

    def encode(self, source: Tensor, lengths: Tensor | None = None) -> Tensor:
        """The encoder's features of a source, (B, M, D)."""
        return self.encoder(self.embed(source), lengths)  # type: ignore[no-any-return]
