"""Shared parts of tasks on text: batches, the tokenizer, sizes for reuse of compiled code, and metrics of a loss.

Shapes: B samples, N tokens, V vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.boundary.hub import local_weights
from penstock.config.model import ModelConfig, vocabulary_of
from penstock.config.run import DataConfig
from penstock.data.loader import HostBatch
from penstock.data.resample import to_device
from penstock.data.sampler import Stream
from penstock.data.source import Source, Split
from penstock.data.text.open import open_tokenizer
from penstock.data.text.tokenizers import Tokenizer
from penstock.errors import ConfigError
from penstock.kernels.cross_entropy import IGNORED
from penstock.models.convert.files import first_token, settings_in
from penstock.tasks.task import Fullness, Task, read_samples

_log = logging.getLogger(__name__)

Tokens = NDArray[np.integer[Any]]
SIZES = 8
"""Number of lengths that batches are cut to, so that compiled code is reused."""
VOCABULARY_MULTIPLE = 8
"""Vocabularies are multiples of this: rows of half-precision logits then start at multiples of 16 bytes, as matrix
units need."""
MOST_NATS = 80.0
"""Largest loss in the computation of perplexity: e⁸⁰ still fits fp32."""
DRAWN = 64
"""Number of batches that are drawn to estimate their length."""


@dataclass(frozen=True, slots=True)
class TextBatch:
    """A batch of text for a training step."""

    inputs: tuple[Any, ...]
    """The model's arguments."""
    ids: NDArray[np.int64]
    """(B,) sample numbers, on the host."""
    tokens: int
    """Tokens that are not padding."""
    labels: Tensor | None = None
    """Labels to compare with the outputs, if the model does not do so itself."""
    count: int | None = None
    """Number of targets over which the loss averages; None if it averages over samples."""
    bytes: float = 0.0
    """Bytes of text in the targets; 0 if unknown."""
    places: Tensor | None = None
    """(B,) positions of the samples in the stream; in an evaluation, in the split."""
    most: int = 0
    """Number of samples whose results an evaluation stores, by `places`; for translations, the maximum length."""

    @classmethod
    def of(
        cls, host: HostBatch, device: torch.device, inputs: Iterable[Any], *, targets: Tokens | None = None,
        **more: Any,
    ) -> Self:  # fmt: skip
        """A batch on the device: copies arrays among the inputs there, and counts the `targets`."""
        moved = tuple(on_device(each, device) if isinstance(each, np.ndarray) else each for each in inputs)
        count = None if targets is None else int((targets != IGNORED).sum())
        return cls(inputs=moved, ids=host.ids, count=count, **more)

    def __len__(self) -> int:
        return len(self.ids)


class TextTask(Task):
    """A task on token numbers. `init_from` are the weights that the model starts from, whose tokenizer is used."""

    unit = "sequences"
    size_setting = "model.sequence"
    asked_words = 1.0
    """Share of tokens that are targets of the loss."""
    counts_all_inputs = False
    """Whether the length of a sample is the total of all its inputs, not the first input's."""

    def __init__(self, init_from: str | None = None) -> None:
        self.init_from = init_from

    def tokenizer(self, data: DataConfig) -> Tokenizer:
        """The tokenizer of a run. Its decoder texts begin with the start token of the weights in `init_from`."""
        weights = None if self.init_from is None else str(local_weights(self.init_from))
        tokenizer = open_tokenizer(data, weights)
        if self.init_from is not None:
            tokenizer.told_start = first_token(settings_in(local_weights(self.init_from)))
        return tokenizer

    def open(self, data: DataConfig, model: ModelConfig, split: Split) -> Source:
        return self.read(data, model, self.tokenizer(data), split)

    def read(self, data: DataConfig, model: ModelConfig, tokenizer: Tokenizer, split: Split) -> Source:
        """The samples of a split as token numbers."""
        raise NotImplementedError

    def fit(self, model: ModelConfig, source: Source) -> ModelConfig:
        """The model with a vocabulary as large as the tokenizer's; loaded weights keep their own."""
        return self.fit_vocabulary(model, tokenizer_of(source))

    def fit_vocabulary(self, model: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
        """The model with room for all tokens of a tokenizer. Raises ConfigError if loaded weights have too few."""
        wanted = -(-tokenizer.size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        has = vocabulary_of(model)
        if self.init_from is not None:
            if has < tokenizer.size:
                raise ConfigError(
                    f"model.vocabulary is {has}, but the tokenizer {tokenizer.name} has {tokenizer.size} "
                    "entries; use the tokenizer that belongs to the weights of init_from or recipe.teacher, or leave "
                    "these out."
                )
            return model
        if has != wanted:
            _log.warning(
                "model.vocabulary is set to %d, which the tokenizer %s needs.", wanted, tokenizer.name
            )
        fitted: ModelConfig = replace(cast(Any, model), vocabulary=wanted)
        return fitted

    def fullness(self, source: Source, model: ModelConfig, batch: int) -> Fullness:
        """Batches are cut to their longest sample: the average over randomly drawn batches."""
        if source.lengths is None:
            return Fullness(model, words=self.asked_words)
        by_length = source.lengths if source.group_by_length else None
        ids = Stream(len(source), 0, by_length, batch).ids(0, DRAWN * batch)
        most, *others = (entry.length for entry in model.graph.inputs)
        drawn = source.lengths[ids].reshape(DRAWN, batch)
        if self.counts_all_inputs:
            drawn = drawn * most // (most + sum(others))
        sequence = max(1, round(padded_length(drawn, most)))
        sized: Any = model.with_lengths(sequence, *(max(1, round(each * sequence / most)) for each in others))
        sized = replace(sized, max_positions=model.graph.runs[0].rows)
        return Fullness(sized, real=min(1.0, float(drawn.mean()) / sequence), words=self.asked_words)

    def blank(self, model: ModelConfig, device: torch.device) -> tuple[Any, ...]:
        return (torch.zeros(1, 1, dtype=torch.int64, device=device),)

    def tokens(self, batch: TextBatch) -> int:
        return batch.tokens

    def describe_model(self, model: ModelConfig) -> str:
        return f"{model.graph.lengths[0]} tokens of {vocabulary_of(model):,} words"


class WordTask(TextTask):
    """A task whose model sums the loss of target tokens itself.

    Metrics: `loss` is the mean in nats, `perplexity` its exponential, and `bits_per_byte` the summed loss in bits
    divided by the bytes of text in the targets, so that tokenizers can be compared.
    """

    shown: tuple[str, ...] = (
        "loss {loss:.4f}",
        "perplexity {perplexity:.2f}",
        "{bits_per_byte:.3f} bits per byte",
    )

    def loss(self, outputs: Tensor, batch: TextBatch) -> Tensor:
        return outputs / max(1, self.targets(batch))

    def targets(self, batch: TextBatch) -> int:
        assert batch.count is not None
        return batch.count

    def tally(self, outputs: Tensor, batch: TextBatch) -> Tensor:
        counts = torch.tensor([self.targets(batch), batch.bytes], dtype=torch.float64)
        return torch.cat([outputs.double()[None], counts.to(outputs.device)])

    def metrics(self, samples: int, sums: Sequence[float]) -> dict[str, float]:
        total, targets, size = sums[:3]
        loss = total / max(targets, 1.0)
        values = {"loss": loss, "perplexity": math.exp(min(loss, MOST_NATS)) if math.isfinite(loss) else loss}
        if size:
            values["bits_per_byte"] = total / math.log(2) / size
        return values


def tokenizer_of(source: Source) -> Tokenizer:
    """The tokenizer that made a source's token numbers."""
    tokenizer: Tokenizer = cast(Any, source).tokenizer
    return tokenizer


def padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of tokens padded with `pad` to the longest, (B, N), and the length of each, (B,)."""
    lengths = np.array([len(row) for row in rows], np.int64)
    table = np.full((len(rows), int(lengths.max())), pad, np.int64)
    for place, row in enumerate(rows):
        table[place, : len(row)] = row
    return table, lengths


def shifted(targets: Tokens, start: int) -> Tokens:
    """A decoder's inputs for the targets (B, N): shifted by one place, beginning with `start`."""
    before = np.full((len(targets), 1), start, targets.dtype)
    return np.concatenate([before, targets[:, :-1]], axis=1)


def first_samples(source: Source, count: int) -> HostBatch:
    """The first samples of a split, as a Loader would read them."""
    return read_samples(source, np.arange(min(count, len(source))))


def rounded(length: int, most: int) -> int:
    """The smallest of at most eight sizes up to `most` that is at least `length`."""
    step = -(-most // SIZES)
    return min(most, -(-max(length, 1) // step) * step)


def padded_length(drawn: Tokens, most: int) -> float:
    """Average length, at most `most`, to which batches with samples of these lengths, (batches, B), are cut."""
    return float(np.mean([rounded(int(longest), most) for longest in drawn.max(axis=1)]))


def on_device(array: Tokens, device: torch.device) -> Tensor:
    """Copy numbers as int64 to the device, without waiting for it."""
    return to_device(np.asarray(array, np.int64), device)


def documents_of(tokens: Tokens, end: int | None) -> Tokens | None:
    """Numbers of the documents that tokens (B, N) belong to, each ended by `end`; None if each sample has only one."""
    if end is None:
        return None
    ends = tokens == end
    if not ends[:, :-1].any():
        return None
    return cast(Tokens, ends.cumsum(axis=1) - ends)
