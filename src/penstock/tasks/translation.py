"""Translation: a text to the same text in another language or form (Vaswani et al., NeurIPS 2017, section 5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.config.decoding import Decoding
from penstock.config.model import ModelConfig
from penstock.config.run import Augment, DataConfig
from penstock.data.loader import HostBatch
from penstock.data.source import Source, Split
from penstock.data.text.rows import open_rows
from penstock.data.text.tokenizers import Tokenizer
from penstock.decode.choose import NOTHING
from penstock.decode.sample import sample
from penstock.decode.texts import Prompts, sharded
from penstock.errors import ConfigError
from penstock.kernels.cross_entropy import IGNORED
from penstock.kernels.padding import is_real
from penstock.tasks import scores
from penstock.tasks.task import Prepare
from penstock.tasks.text import TextBatch, WordTask, first_samples, rounded, shifted, tokenizer_of

SHOWN = 3


class Translation(WordTask):
    """Mean cross entropy of the target's tokens, with `recipe.augment.label_smoothing` in training.

    In an evaluation each source is also translated, token by token without a search. Metrics, in addition to the
    loss's: `exact_match` is the share of translations that equal the reference; `chrf` and, with the package sacrebleu,
    `bleu` are of the whole split, in [0, 100].
    """

    unit = "sentences"
    augments = frozenset({"label_smoothing"})
    counts_all_inputs = True
    ranked_by = ("chrf", "loss")
    shown = ("exact {exact_match:.2%}", "chrF {chrf:.1f}", "BLEU {bleu:.1f}", *WordTask.shown)

    _tokenizer: Tokenizer
    """Set by `prepare`."""

    def read(self, data: DataConfig, model: ModelConfig, tokenizer: Tokenizer, split: Split) -> Source:
        source, target = (token_input.length for token_input in model.graph.inputs)
        return open_rows(data, tokenizer, split, form="translation", length=source, target_length=target)

    def fit(self, model: ModelConfig, source: Source) -> ModelConfig:
        """The model with a vocabulary as large as the tokenizer's, and with the labels of the source, by which its
        mixtures count loads or choose experts. Raises ConfigError if these contradict the model."""
        model, names = super().fit(model, source), source.label_names
        if model.graph.routed and not names:
            raise ConfigError(
                f"The model's router needs the label of each sample, but {source.title} has none; use "
                "data.source=names, or router softmax."
            )
        return model.with_labels(len(names)) if names else model

    def prepare(
        self, source: Source, model: ModelConfig, *, augment: Augment | None = None, seed: int = 0
    ) -> Prepare:
        self._tokenizer = tokenizer_of(source)
        smoothing = 0.0 if augment is None else augment.label_smoothing
        return PrepareTranslation(self._tokenizer, smoothing, labelled=model.graph.labelled)

    def blank(self, model: ModelConfig, device: torch.device) -> tuple[Any, ...]:
        """One source, and a target of maximum length, which sets the number of steps of other ranks."""
        source = torch.zeros(1, 1, dtype=torch.int64, device=device)
        target, ones = source.expand(1, model.graph.inputs[1].length), torch.ones_like(source[0])
        routed = (None, None, 0.0, None, ones - 1) if model.graph.routed else ()
        return source, target, ones, *routed

    def assess(self, model: nn.Module, batch: TextBatch) -> Tensor:
        sums = self.tally(model(*batch.inputs), batch)
        written = self._texts(self._translated(model, batch))
        references = self._texts(batch.inputs[3])
        more = np.zeros(len(self._more("", "")))
        for text, reference in zip(written, references, strict=True):
            more += self._more(text, reference)
        return torch.cat([sums, torch.from_numpy(more).to(sums)])

    def accompany(self, model: nn.Module, blank: tuple[Any, ...]) -> None:
        model(*blank)
        if sharded(model):
            source, target, lengths = blank[:3]
            prompts = Prompts.translating(source, lengths, 0, routes=blank[-1] if len(blank) > 3 else None)
            sample(model, prompts, Decoding(max_tokens=target.shape[1]), ends=())

    def _translated(self, model: nn.Module, batch: TextBatch) -> Tensor:
        """Translations, each up to 1.5 times as long as its reference; ranks that share weights step together."""
        source, _, lengths, targets = batch.inputs[:4]
        limits = (targets != IGNORED).sum(1) * 3 // 2 + 1
        steps = batch.most if sharded(model) else min(batch.most, int(limits.max()))
        end = self._tokenizer.end
        routes = batch.inputs[7] if len(batch.inputs) > 7 else None
        prompts = Prompts.translating(source, lengths, self._tokenizer.start, routes=routes)
        tokens = sample(model, prompts, Decoding(max_tokens=steps), ends=() if end is None else (end,))
        return tokens.where((tokens != NOTHING) & is_real(limits, steps), IGNORED)

    def _texts(self, tokens: Tensor) -> list[str]:
        """Texts of tokens (B, N) up to their end token."""
        return [self._tokenizer.decode(_until(row, self._tokenizer.end)) for row in tokens.tolist()]

    def _more(self, written: str, reference: str) -> list[int]:
        counts = [int(written == reference), *scores.chrf_sums(written, reference)]
        return [*counts, *scores.bleu_sums(written, reference)] if scores.has_bleu() else counts

    def metrics(self, samples: int, sums: Sequence[float]) -> dict[str, float]:
        results = super().metrics(samples, sums)
        exact, *rest = sums[3:]
        results |= {"exact_match": exact / samples, "chrf": scores.chrf(rest[: scores.CHRF_SUMS])}
        if len(rest) > scores.CHRF_SUMS:
            results["bleu"] = scores.bleu(rest[scores.CHRF_SUMS :])
        return results

    def sample(self, model: nn.Module, source: Source, device: torch.device) -> str:
        """The first sources with their translations, each with its reference."""
        self._tokenizer = tokenizer_of(source)
        graph: Any = model.graph
        labelled = bool(source.label_names) and bool(graph.labelled)
        prepare = PrepareTranslation(self._tokenizer, 0.0, labelled=labelled)
        batch = prepare(first_samples(source, SHOWN), device)
        columns = (batch.inputs[0], self._translated(model, batch), batch.inputs[3])
        lines = zip(*map(self._texts, columns), strict=True)
        return "\n".join(f"{one} → {two} (reference: {three})" for one, two, three in lines)


def _until(row: list[int], end: int | None) -> list[int]:
    """Tokens before the first `end`, or before padding in targets."""
    stops = [row.index(stop) for stop in (end, IGNORED) if stop in row]
    return row[: min(stops)] if stops else row


class PrepareTranslation:
    """Makes batches of sources and targets, each cut to the longest in the batch. `labelled` models get labels."""

    def __init__(self, tokenizer: Tokenizer, smoothing: float, *, labelled: bool = False) -> None:
        self.start, self.smoothing, self.labelled = tokenizer.start, smoothing, labelled

    def __call__(self, host: HostBatch, device: torch.device) -> TextBatch:
        fields = {name: value.numpy() for name, value in host.samples.items()}
        source, target = fields["source"], fields["target"]
        lengths, ends = fields["source_length"], fields["target_length"]
        most = target.shape[1]
        source = source[:, : rounded(int(lengths.max()), source.shape[1])]
        target = target[:, : rounded(int(ends.max()), most)]
        targets = np.where(np.arange(target.shape[1]) < ends[:, None], target, IGNORED)
        inputs = [source, shifted(target, self.start), lengths, targets, None, self.smoothing]
        inputs += [None, fields["label"]] if self.labelled else []
        return TextBatch.of(
            host, device, inputs, targets=targets, tokens=int(lengths.sum() + ends.sum()), most=most
        )
