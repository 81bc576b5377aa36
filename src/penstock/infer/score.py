"""Log-probabilities of the tokens of a given text, by one forward pass over it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from penstock.errors import ConfigError
from penstock.models.model import Model

ROWS = 256
"""Rows of logits that are held at a time."""


class TextScores(NamedTuple):
    """Log-probabilities of a text of N tokens. The first token has none, because nothing precedes it."""

    logs: list[float]
    """(N − 1) natural logarithms of each token's probability, given the tokens before it."""
    likeliest: list[list[tuple[int, float]]]
    """(N − 1) the likeliest tokens at each place with their log-probabilities, in descending order."""


class Scorer:
    """Scores texts with a decoder, without temperature and penalties."""

    def __init__(self, model: Model) -> None:
        """Raises ConfigError for a model that is not a decoder."""
        graph = model.graph
        if graph.form != "causal tokens" or graph.words is None:
            raise ConfigError("Only decoders can score the tokens of a text.")
        self.model, self.head = model, model.get_submodule(graph.words.name)
        self.most: int = graph.written[-1].max_tokens

    @torch.inference_mode()
    def __call__(self, ids: list[int], top: int = 0) -> TextScores:
        """Scores of a text, with the `top` likeliest tokens at each place. Raises ConfigError for a text that is too
        long for the model."""
        scores = TextScores([], [])
        if len(ids) < 2:
            return scores
        if len(ids) > self.most + 1:
            raise ConfigError(f"The text has {len(ids):,} tokens, and the model reads {self.most:,} at most.")
        tokens = torch.tensor([ids], device=next(self.model.parameters()).device)
        features = self.model.written(tokens[:, :-1])[0]  # logits of all tokens are never held at one time
        for begin in range(0, len(features), ROWS):
            logs = torch.log_softmax(self.head(features[begin : begin + ROWS]).float(), dim=-1)
            following = tokens[0, begin + 1 : begin + 1 + len(logs), None]
            scores.logs.extend(logs.gather(1, following)[:, 0].tolist())
            values, numbers = logs.topk(min(top, logs.shape[1]), dim=-1)
            scores.likeliest.extend(
                list(zip(*row, strict=True)) for row in zip(numbers.tolist(), values.tolist(), strict=True)
            )
        return scores
