"""The encoder: every token sees all others (Devlin et al., NAACL 2019, "BERT")."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from penstock.config.model import EncoderConfig
from penstock.kernels.dropout import Dropout
from penstock.models.block import activate, make_norm
from penstock.models.stack import TextModel, TokenStack


class Transform(nn.Module):
    """The layers before the output of masked words: dense, the activation and a norm, (…, D) → (…, D)."""

    def __init__(self, config: EncoderConfig, **where: Any) -> None:
        super().__init__()
        self.activation = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}.get(
            config.mlp, config.mlp
        )
        self.dense = nn.Linear(config.width, config.width, bias=config.bias, **where)
        self.norm = make_norm(config, config.width, **where)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(activate(self.dense(x), self.activation))  # type: ignore[no-any-return, arg-type]


class Pooler(nn.Module):
    """A dense layer and tanh over the first token: (B, N, D) → (B, D)."""

    def __init__(self, config: EncoderConfig, **where: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(config.width, config.width, **where)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.dense(x[:, 0]))


class NormPooler(Transform):
    """The transform of the first token: (B, N, D) → (B, D)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, 0])


class Encoder(TextModel):
    """Token numbers (B, N) to what `config.head` says: logits of each token (B, N, V), logits of each sample
    (B, classes), or each token's features (B, N, D). Weights are drawn from torch's global generator.
    """

    config: EncoderConfig

    def _build(self, **where: Any) -> None:
        config = self.config
        self.tokens = nn.Embedding(config.vocabulary, config.width, **where)
        self.types = nn.Embedding(config.token_types, config.width, **where) if config.token_types else None
        self.encoder = TokenStack(config, config, causal=False, **where)
        self.transform = self.pooler = self.dropout = self.head = None
        if config.head == "words":
            self.transform = Transform(config, **where)
            self.head = self._make_head(**where)
        elif config.head == "classes":
            self.pooler = (Pooler if config.pooler == "tanh" else NormPooler)(config, **where)
            self.dropout = Dropout(config.dropout) if config.dropout else None
            self.head = nn.Linear(config.width, config.classes, **where)

    @property
    def _gives_words(self) -> bool:  # type: ignore[override]
        return self.config.head == "words"

    def forward(
        self,
        tokens: Tensor,
        lengths: Tensor | None = None,
        segments: Tensor | None = None,
        documents: Tensor | None = None,
        targets: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """`lengths` (B,) are how many tokens of each sample are no padding, which comes last. `segments` (B, N) are
        kinds of segments, none: all 0. `documents` (B, N) are as a decoder takes them. With `targets` (B, N), or of
        `rows` (M,), the summed loss of a head for words: see `TextModel`.
        """
        x = self.features(tokens, lengths, segments, documents)
        if self.transform is not None:
            return self.words(self.transform(self.chosen(x, rows)), targets, 0.0)
        if self.pooler is None or self.head is None:
            return x
        pooled = self.pooler(x)
        return self.head(pooled if self.dropout is None else self.dropout(pooled))  # type: ignore[no-any-return]

    def features(
        self,
        tokens: Tensor,
        lengths: Tensor | None = None,
        segments: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Each token's features (B, N, D), whatever the head is; arguments as of `forward`."""
        x = self.embed(tokens)
        if self.types is not None:
            x = x + self.types(torch.zeros_like(tokens) if segments is None else segments)
        return self.encoder(x, lengths, documents)  # type: ignore[no-any-return]
