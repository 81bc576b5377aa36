"""Span corruption: the training task of encoder–decoders (Raffel et al., JMLR 2020, section 3.1.4)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from penstock.config.decoding import Decoding
from penstock.config.model import ModelConfig
from penstock.config.run import Augment, DataConfig
from penstock.data.hashing import MASK, uniforms
from penstock.data.loader import HostBatch
from penstock.data.source import Source, Split
from penstock.data.text.tokenizers import Tokenizer
from penstock.data.text.tokens import open_tokens
from penstock.decode.sample import sample
from penstock.decode.texts import Prompts
from penstock.errors import ConfigError
from penstock.tasks.task import Prepare
from penstock.tasks.text import (
    TextBatch,
    Tokens,
    WordTask,
    first_samples,
    on_device,
    shifted,
    tokenizer_of,
)

SHARE = 0.15
"""Share of a text's tokens that are removed."""
SPAN = 3.0
"""Average tokens per span."""


class Sizes(NamedTuple):
    """Sizes of one sample; they are the same for all samples, so nothing is padded."""

    text: int
    """Tokens of the text."""
    noise: int
    """Tokens that are removed from it."""
    spans: int

    @classmethod
    def of(cls, text: int) -> Sizes:
        """Sizes for a text of `text` tokens."""
        noise = min(max(1, round(text * SHARE)), text - 1)
        return cls(text, noise, max(1, round(noise / SPAN)))


class SpanCorruption(WordTask):
    """Mean cross entropy of spans that were removed from a text: 15 % of it, 3 tokens per span on average. In the
    source a sentinel replaces each span; the target has each sentinel, followed by its span. The choice of spans is a
    pure function of the seed and the sample's position in the stream.

    A text is as long as fits: its source into the model's `sequence` and its target into `decoder_sequence`. It may
    contain ends of documents, and attention crosses them: T5's pre-training joins and cuts documents in the same way.
    """

    def read(self, data: DataConfig, model: ModelConfig, tokenizer: Tokenizer, split: Split) -> Source:
        if not data.packed:
            raise ConfigError(
                "data.packed is false, but span corruption needs texts of one length, and so packed documents; leave "
                "it out."
            )
        return open_tokens(data, tokenizer, split, length=sizes_of(model, tokenizer).text)

    def prepare(
        self, source: Source, model: ModelConfig, *, augment: Augment | None = None, seed: int = 0
    ) -> Prepare:
        return PrepareSpans(tokenizer_of(source), seed)

    def blank(self, model: ModelConfig, device: torch.device) -> tuple[torch.Tensor, ...]:
        return (torch.zeros(1, 1, dtype=torch.int64, device=device),) * 2

    def sample(self, model: nn.Module, source: Source, device: torch.device) -> str:
        """The first sample: the text with its gaps, the model's text for them, and the original."""
        tokenizer = tokenizer_of(source)
        prepare = PrepareSpans(tokenizer, 0)
        host = first_samples(source, 1)
        text, target = prepare.corrupt(host.samples.numpy(), host.positions)
        lengths = torch.full((1,), text.shape[1], device=device)
        prompts = Prompts.translating(on_device(text, device), lengths, prepare.start)
        filled = sample(model, prompts, Decoding(max_tokens=target.shape[1]), ends=())
        names = {number: f"<{i}>" for i, number in enumerate(tokenizer.sentinels)}
        texts = [
            "".join(names.get(number) or tokenizer.decode([number]) for number in numbers)
            for numbers in (text[0].tolist(), filled[0].tolist(), target[0].tolist())
        ]
        return f"{texts[0]}\nfilled in: {texts[1]}\nwas:       {texts[2]}"


def sizes_of(model: ModelConfig, tokenizer: Tokenizer) -> Sizes:
    """Sizes of the longest text that fits a model. Raises ConfigError if there is none, or too few sentinels."""
    most, most_target = (token_input.length for token_input in model.graph.inputs)
    ended = int(tokenizer.end is not None)
    for text in range(2 * most, 1, -1):
        sizes = Sizes.of(text)
        source, target = text - sizes.noise + sizes.spans, sizes.noise + sizes.spans
        if source + ended <= most and target + ended <= most_target:
            break
    else:
        raise ConfigError(
            f"model.sequence {most} and model.decoder_sequence {most_target} have no room for a "
            "text with a gap; make them larger."
        )
    if sizes.spans > len(tokenizer.sentinels):
        raise ConfigError(
            f"Samples of model.sequence {most} have {sizes.spans} gaps, but the tokenizer {tokenizer.name} "
            f"has {len(tokenizer.sentinels)} sentinels; choose another with data.tokenizer, a shorter sequence, or "
            "another task."
        )
    return sizes


class PrepareSpans:
    """Makes batches of texts (B, L)."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.seed, self.start, self.end = seed, tokenizer.start, tokenizer.end
        self._sentinels = np.array(tokenizer.sentinels, np.int64)

    def __call__(self, host: HostBatch, device: torch.device) -> TextBatch:
        source, target = self.corrupt(host.samples.numpy(), host.positions)
        inputs = (source, shifted(target, self.start), None, target)
        return TextBatch.of(host, device, inputs, targets=target, tokens=source.size + target.size)

    def corrupt(self, texts: Tokens, positions: NDArray[np.int64]) -> tuple[Tokens, Tokens]:
        """Sources and targets of texts (B, L); all sources have one length, and so do all targets."""
        samples, length = texts.shape
        sizes = Sizes.of(length)
        chance = uniforms(self.seed, MASK, counters=positions, columns=length)
        kept_lengths = _parts(length - sizes.noise, sizes.spans, chance[:, : length - sizes.noise])
        removed_lengths = _parts(sizes.noise, sizes.spans, chance[:, length - sizes.noise :])
        # Kept and removed spans alternate; a text begins with a kept span.
        turns = np.stack([kept_lengths, removed_lengths], axis=2).reshape(samples, -1)
        begins = np.concatenate([np.zeros((samples, 1), np.int64), turns.cumsum(axis=1)[:, :-1]], axis=1)
        first = np.zeros((samples, length), bool)
        np.put_along_axis(first, begins, True, 1)
        turn = first.cumsum(axis=1) - 1  # (B, L)
        noise = turn % 2 == 1
        sentinels = self._sentinels[turn // 2]
        return self._without(noise, first, sentinels, texts), self._without(~noise, first, sentinels, texts)

    def _without(
        self, removed: NDArray[np.bool_], first: NDArray[np.bool_], sentinels: Tokens, texts: Tokens
    ) -> Tokens:
        """Texts (B, L) with a sentinel for each removed span, and with their end token."""
        tokens = np.where(removed, sentinels, texts)[~removed | first].reshape(len(texts), -1)
        if self.end is None:
            return tokens
        return np.concatenate([tokens, np.full((len(texts), 1), self.end, tokens.dtype)], axis=1)


def _parts(total: int, count: int, chance: NDArray[np.float32]) -> NDArray[np.int64]:
    """`total` split randomly into `count` parts of at least 1, by random numbers (B, total): (B, count)."""
    cuts = np.sort(np.argsort(chance[:, : total - 1], axis=1, kind="stable")[:, : count - 1], axis=1) + 1
    edges = np.concatenate(
        [np.zeros((len(chance), 1), np.int64), cuts, np.full((len(chance), 1), total)], axis=1
    )
    return np.diff(edges, axis=1)
