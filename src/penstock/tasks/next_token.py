"""The next token: the training task of language models (Radford et al., 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock.config.decoding import Decoding
from penstock.config.graph import TokenInput
from penstock.config.model import ModelConfig
from penstock.config.run import Augment, DataConfig
from penstock.data.hashing import PREFIX, uniforms
from penstock.data.loader import HostBatch
from penstock.data.source import PADDING, Source, Split
from penstock.data.text.tokenizers import Tokenizer
from penstock.data.text.tokens import open_tokens
from penstock.decode.sample import sample
from penstock.decode.texts import Prompts
from penstock.kernels.cross_entropy import IGNORED
from penstock.tasks.task import Prepare
from penstock.tasks.text import (
    TextBatch,
    WordTask,
    documents_of,
    first_samples,
    on_device,
    rounded,
    tokenizer_of,
)

SHOWN = 48
"""Number of generated tokens in a printed sample."""
WARMTH = 0.8
"""Temperature of a printed sample: always choosing the likeliest token soon repeats (Holtzman et al., ICLR 2020)."""


class NextToken(WordTask):
    """Mean cross entropy of each token, given the tokens before it in its document.

    A sample is a window of the text one token longer than the model's `sequence`. Windows overlap by that token, so
    that each token is a target once. Attention does not cross the ends of documents, and positions restart there.
    Documents that are not packed are padded, and padding is ignored. If the model's input has a share of prefixes, this
    share of training samples begins with a prefix of random length, whose tokens all attend to each other and are not
    targets."""

    def read(self, data: DataConfig, model: ModelConfig, tokenizer: Tokenizer, split: Split) -> Source:
        (length,) = (token_input.length for token_input in model.graph.inputs)
        return open_tokens(data, tokenizer, split, length=length + 1, stride=length)

    def prepare(
        self, source: Source, model: ModelConfig, *, augment: Augment | None = None, seed: int = 0
    ) -> Prepare:
        size = float(getattr(source, "bytes_per_token", 0.0))
        share = 0.0 if augment is None else model.graph.inputs_of(TokenInput)[0].prefix
        return PrepareNextToken(
            tokenizer_of(source).end, size, packed=source.lengths is None, prefix=share, seed=seed
        )

    def sample(self, model: nn.Module, source: Source, device: torch.device) -> str:
        """How the model continues the first half of the split's first sample. The same weights give the same text."""
        tokenizer = tokenizer_of(source)
        host = first_samples(source, 1).samples.numpy()
        host = host[:, host[0] != PADDING]
        prompt = host[:, : max(1, (host.shape[1] - 1) // 2)]
        tokens = on_device(prompt, device)
        prompts = Prompts(tokens, torch.full((1,), tokens.shape[1], device=device), even=True)
        most = min(SHOWN, host.shape[1] - prompt.shape[1])
        continued = sample(model, prompts, Decoding(max_tokens=most, temperature=WARMTH), ends=(), seeds=(0,))
        begun, more = (tokenizer.decode(part.tolist()) for part in (prompt[0][-SHOWN:], continued[0]))
        return f"…{begun}│{more}"


@dataclass(frozen=True, slots=True)
class PrepareNextToken:
    """Makes batches of windows of tokens (B, N + 1), cut to the longest in the batch."""

    end: int | None
    """The token that ends documents."""
    bytes_per_token: float
    packed: bool = True
    prefix: float = 0.0
    """Share of samples that begin with a prefix."""
    seed: int = 0

    def __call__(self, host: HostBatch, device: torch.device) -> TextBatch:
        windows = host.samples.numpy()
        documents, real = None, windows.size - len(windows)
        if self.packed:
            documents = documents_of(windows[:, :-1], self.end)
        else:
            lengths = (windows != PADDING).sum(axis=1) - 1
            real = int(lengths.sum())
            windows = windows[:, : rounded(int(lengths.max()), windows.shape[1] - 1) + 1]
        # No target depends on padding, which comes last, so that padding may be any token.
        tokens = np.maximum(windows[:, :-1], 0)
        targets = np.where(windows[:, 1:] == PADDING, IGNORED, windows[:, 1:])
        more: tuple[Any, ...] = ()
        if self.prefix:
            # (B,) lengths, 0 without a prefix, that leave at least one target.
            chance = uniforms(self.seed, PREFIX, counters=host.positions, columns=2)
            lengths = 1 + (chance[:, 1] * (tokens.shape[1] - 1)).astype(np.int64)
            prefixes = np.where(chance[:, 0] < self.prefix, lengths, 0)
            # Of a prefix only the last token does not attend to the next token.
            is_seen = np.arange(tokens.shape[1]) < prefixes[:, None] - 1
            targets, more = np.where(is_seen, IGNORED, targets), (None, prefixes)
        return TextBatch.of(
            host, device, (tokens, documents, targets, *more), targets=targets, tokens=real,
            bytes=real * self.bytes_per_token,
        )  # fmt: skip
