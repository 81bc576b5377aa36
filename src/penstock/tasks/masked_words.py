"""Masked words: the training task of encoders (Devlin et al., NAACL 2019, section 3.1), whole words at a time."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from penstock.config.model import ModelConfig
from penstock.config.run import Augment, DataConfig
from penstock.data.hashing import MASK, uniforms
from penstock.data.loader import HostBatch
from penstock.data.source import PADDING, Source, Split
from penstock.data.text.tokenizers import Tokenizer
from penstock.data.text.tokens import open_tokens
from penstock.errors import ConfigError
from penstock.kernels.cross_entropy import IGNORED
from penstock.tasks.task import Prepare
from penstock.tasks.text import (
    TextBatch,
    Tokens,
    WordTask,
    documents_of,
    first_samples,
    rounded,
    tokenizer_of,
)

SHARE = 0.15
"""Share of a sample's tokens that are hidden, at most."""
MASKED, SWAPPED = 0.8, 0.1
"""Shares of hidden tokens that become the mask, and a random token; the rest do not change."""


class MaskedWords(WordTask):
    """Mean cross entropy of hidden tokens: 15 % of each sample, as whole words. They become the mask (80 %), a random
    token (10 %) or do not change (10 %). The hidden words change from epoch to epoch: they are a pure function of the
    seed and the sample's position in the stream.

    A sample is a window of the text between the tokenizer's `classify` and `separator`. Only hidden tokens reach the
    head. Documents that are not packed are padded after the separator.
    """

    asked_words = SHARE

    def read(self, data: DataConfig, model: ModelConfig, tokenizer: Tokenizer, split: Split) -> Source:
        around = sum(token is not None for token in (tokenizer.classify, tokenizer.separator))
        length = max(1, model.graph.lengths[0] - around)
        return open_tokens(data, tokenizer, split, length=length, around=around)

    def fit(self, model: ModelConfig, source: Source) -> ModelConfig:
        tokenizer = tokenizer_of(source)
        if tokenizer.mask is None:
            raise ConfigError(
                f"The tokenizer {tokenizer.name} has no mask token. Name one as mask_token in its "
                "tokenizer_config.json, choose another with data.tokenizer, or another task."
            )
        if model.graph.words is None:
            raise ConfigError(
                f"model.head is {getattr(model, 'head', 'none')}, but masked words need logits over words; set "
                "model.head to words."
            )
        return super().fit(model, source)

    def prepare(
        self, source: Source, model: ModelConfig, *, augment: Augment | None = None, seed: int = 0
    ) -> Prepare:
        return PrepareMasked(tokenizer_of(source), seed, packed=source.lengths is None)

    def sample(self, model: nn.Module, source: Source, device: torch.device) -> str:
        """The first sample with its hidden tokens filled in, each in brackets with the original."""
        tokenizer = tokenizer_of(source)
        prepare = PrepareMasked(tokenizer, 0, packed=source.lengths is None)
        batch = prepare(first_samples(source, 1), device)
        tokens, lengths, _, documents, targets, rows = batch.inputs
        filled = model(tokens, lengths, None, documents, None, rows).argmax(-1).tolist()
        texts = [tokenizer.decode([number]) for number in tokens[0, : batch.tokens].tolist()]
        for row, target, guess in zip(rows.tolist(), targets.tolist(), filled, strict=True):
            if target != IGNORED:
                texts[row] = f"[{tokenizer.decode([target])}→{tokenizer.decode([guess])}]"
        return "".join(texts)


class PrepareMasked:
    """Makes batches of windows of tokens (B, L): hides words and adds the tokenizer's special tokens. If not `packed`,
    batches are cut to the longest sample."""

    def __init__(self, tokenizer: Tokenizer, seed: int, *, packed: bool = True) -> None:
        assert tokenizer.mask is not None  # `fit` checks this
        self.packed, self.pad = packed, tokenizer.pad
        self.seed, self.mask, self.size = seed, tokenizer.mask, tokenizer.size
        self.end, self.classify, self.separator = tokenizer.end, tokenizer.classify, tokenizer.separator
        self._starts = np.asarray(tokenizer.word_starts(), bool)
        self._special = np.zeros(tokenizer.size, bool)
        self._special[list(tokenizer.specials)] = True

    def __call__(self, host: HostBatch, device: torch.device) -> TextBatch:
        tokens = host.samples.numpy()
        real = tokens != PADDING
        seen, columns, targets = self.hide(tokens, host.positions)
        samples, before = np.arange(len(tokens)), int(self.classify is not None)
        around = before + int(self.separator is not None)
        lengths = real.sum(axis=1)
        inputs = np.full((len(tokens), tokens.shape[1] + around), self.pad)
        inputs[:, before : before + tokens.shape[1]] = np.where(real, seen, self.pad)
        if self.classify is not None:
            inputs[:, 0] = self.classify
        if self.separator is not None:
            inputs[samples, before + lengths] = self.separator
        lengths += around
        documents = None
        if self.packed:
            # From the original tokens: a mask may hide the end of a document.
            documents = documents_of(tokens, self.end)
        else:
            inputs = inputs[:, : rounded(int(lengths.max()), inputs.shape[1])]
        if documents is not None:
            documents = np.pad(documents, ((0, 0), (before, around - before)), mode="edge")
        rows = columns + before + samples[:, None] * inputs.shape[1]
        given = None if self.packed else lengths
        arguments = (inputs, given, None, documents, targets.reshape(-1), rows.reshape(-1))
        return TextBatch.of(host, device, arguments, targets=targets, tokens=int(lengths.sum()))

    def hide(
        self, tokens: Tokens, positions: NDArray[np.int64]
    ) -> tuple[Tokens, NDArray[np.int64], NDArray[np.int64]]:
        """Tokens (B, L) with hidden words, the places of hidden tokens, (B, K), and the original tokens, (B, K), −100
        for places without a hidden token."""
        samples, length = tokens.shape
        real = tokens != PADDING
        most = np.maximum(1, np.rint(SHARE * real.sum(axis=1, keepdims=True)).astype(np.int64))  # (B, 1)
        special = self._special[tokens] | ~real
        starts = self._starts[tokens] | special
        starts[:, 1:] |= special[:, :-1]
        starts[:, 0] = True
        word = starts.cumsum(axis=1) - 1  # (B, L): which word of the sample a token belongs to
        place = word + np.arange(samples)[:, None] * length
        size = np.bincount(place.ravel(), minlength=samples * length)
        size[place[special]] = 0
        size = size.reshape(samples, length)
        # Words in random order, the first ones as long as they fit.
        chance = uniforms(self.seed, MASK, counters=positions, columns=3 * length)
        can = (size > 0) & (size <= most)
        order = np.argsort(np.where(can, chance[:, :length], 2.0), axis=1, kind="stable")
        room = np.take_along_axis(np.where(can, size, 0), order, 1).cumsum(axis=1) <= most
        taken = np.zeros_like(can)
        np.put_along_axis(taken, order, room, 1)
        hidden = np.take_along_axis(taken & can, word, 1)
        how, which = chance[:, length : 2 * length], chance[:, 2 * length :]
        any_token = (which * self.size).astype(tokens.dtype)
        seen = np.where(how < MASKED, self.mask, np.where(how < MASKED + SWAPPED, any_token, tokens))
        columns = np.argsort(~hidden, axis=1, kind="stable")[:, : int(most.max())]
        is_hidden = np.take_along_axis(hidden, columns, 1)
        targets = np.where(is_hidden, np.take_along_axis(tokens, columns, 1), IGNORED)
        return np.where(hidden, seen, tokens), columns, np.asarray(targets, np.int64)
