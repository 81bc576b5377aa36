"""The next token: what language models are trained for (Radford et al., 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from penstock.config.decoding import Decoding
from penstock.config.model import DecoderConfig, ModelConfig
from penstock.config.run import Augment, DataConfig
from penstock.data.loader import HostBatch
from penstock.data.source import Source, Split
from penstock.infer.sample import sample
from penstock.infer.texts import Prompts
from penstock.tasks.task import Prepare
from penstock.tasks.text import (
    TextBatch,
    WordTask,
    counted,
    documents_of,
    first_samples,
    on_device,
    tokenizer_of,
)

if TYPE_CHECKING:
    from penstock.data.text.tokenizers import Tokenizer

SHOWN = 48
"""Tokens that a printed sample goes on for."""
WARMTH = 0.8
"""Its temperature: the likeliest tokens alone soon repeat themselves (Holtzman et al., ICLR 2020)."""


class NextToken(WordTask):
    """Mean cross entropy of each token given those before it in its document.

    A sample is a window of the text one token longer than the model's `sequence`. Windows overlap by that token, so
    that each token is a target once. Attention does not cross the ends of documents, and positions start again there.
    """

    def read(self, data: DataConfig, model: ModelConfig, tokenizer: Tokenizer, split: Split) -> Source:
        from penstock.data.text.tokens import open_tokens

        assert isinstance(model, DecoderConfig)
        source: Source = open_tokens(data, tokenizer, split, length=model.sequence + 1, stride=model.sequence)
        return source

    def prepare(
        self, source: Source, model: ModelConfig, *, augment: Augment | None = None, seed: int = 0
    ) -> Prepare:
        size = float(getattr(source, "bytes_per_token", 0.0))
        return PrepareNextToken(tokenizer_of(source).end, size)

    def sample(self, model: nn.Module, source: Source, device: torch.device) -> str:
        """How the model goes on after the first half of the split's first sample. The same weights go on alike."""
        tokenizer = tokenizer_of(source)
        host = first_samples(source, 1).samples.numpy()
        prompt = host[:, : max(1, (host.shape[1] - 1) // 2)]
        tokens = on_device(prompt, device)
        prompts = Prompts(tokens, torch.full((1,), tokens.shape[1], device=device), even=True)
        most = min(SHOWN, host.shape[1] - prompt.shape[1])
        found = sample(model, prompts, Decoding(max_tokens=most, temperature=WARMTH), ends=(), seeds=(0,))
        begun, more = (tokenizer.decode(part.tolist()) for part in (prompt[0][-SHOWN:], found[0]))
        return f"…{begun}│{more}"


@dataclass(frozen=True, slots=True)
class PrepareNextToken:
    """Makes batches of windows of tokens (B, N + 1)."""

    end: int | None
    """The token that ends documents."""
    bytes_per_token: float

    def __call__(self, host: HostBatch, device: torch.device) -> TextBatch:
        windows = host.samples.numpy()
        tokens, targets = windows[:, :-1], windows[:, 1:]
        documents = documents_of(tokens, self.end)
        return TextBatch(
            inputs=(
                on_device(tokens, device),
                None if documents is None else on_device(documents, device),
                on_device(targets, device),
            ),
            ids=host.ids,
            tokens=tokens.size,
            count=counted(targets, device),
            bytes=targets.size * self.bytes_per_token,
        )
