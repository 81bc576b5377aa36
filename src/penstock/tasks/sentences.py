"""Classification or rating of sentences and of pairs of sentences (Devlin et al., NAACL 2019, section 4.1)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.config.graph import TokenInput
from penstock.config.model import ModelConfig
from penstock.config.run import Augment, DataConfig
from penstock.data.loader import HostBatch
from penstock.data.source import Source, Split
from penstock.data.text.rows import open_rows
from penstock.data.text.tokenizers import Tokenizer
from penstock.errors import DataError
from penstock.tasks import scores
from penstock.tasks.class_counts import ClassCounts, count_sums, read_counts
from penstock.tasks.task import Prepare
from penstock.tasks.text import TextBatch, TextTask, first_samples, on_device, rounded, tokenizer_of

_log = logging.getLogger(__name__)


class Sentences(TextTask):
    """Mean cross entropy of classes, or mean squared error if labels are numbers.

    Metrics for classes: `accuracy`; `f1`, of class 1 if there are two, else the mean over classes; `matthews`
    correlation. For numbers: `pearson` and `spearman` correlation over the whole split. For both: `loss`.
    """

    unit = "sentences"
    ranked_by = ("accuracy", "pearson", "loss")
    shown = (
        "accuracy {accuracy:.2%}", "F1 {f1:.3f}", "Matthews {matthews:.3f}", "Pearson {pearson:.3f}",
        "Spearman {spearman:.3f}", "loss {loss:.4f}",
    )  # fmt: skip
    form: Literal["single", "pair"] = "single"

    def read(self, data: DataConfig, model: ModelConfig, tokenizer: Tokenizer, split: Split) -> Source:
        return open_rows(data, tokenizer, split, form=self.form, length=model.graph.lengths[0])

    def fit(self, model: ModelConfig, source: Source) -> ModelConfig:
        """The model with a head for the data's number of classes, or for one number; a change is logged."""
        if "label" not in (source.sample.names or ()):
            raise DataError(
                f"{source.name} has no labels, but the task needs them. Name their column in data.columns."
            )
        classes = _classes(source)
        count = 1 if classes is None else len(classes)
        head = model.graph.classes
        if head is None or head.classes != count:
            description = "numbers" if classes is None else f"{count} classes"
            _log.warning("model.head is set to classes, and model.classes to %d, for %s.", count, description)
        fitted: ModelConfig = cast(Any, model).with_classes(count)
        return self.fit_vocabulary(fitted, tokenizer_of(source))

    def prepare(
        self, source: Source, model: ModelConfig, *, augment: Augment | None = None, seed: int = 0
    ) -> Prepare:
        return PrepareSentences(len(source), segments=model.graph.inputs_of(TokenInput)[0].segments > 1)

    def loss(self, outputs: Tensor, batch: TextBatch) -> Tensor:
        return self._loss(outputs, batch, "mean")

    def _loss(self, outputs: Tensor, batch: TextBatch, reduction: str) -> Tensor:
        assert batch.labels is not None
        if batch.labels.is_floating_point():
            return F.mse_loss(outputs.float().squeeze(1), batch.labels, reduction=reduction)
        return F.cross_entropy(outputs.float(), batch.labels, reduction=reduction)

    def tally(self, outputs: Tensor, batch: TextBatch) -> Tensor:
        """The number of samples with numeric labels, and the loss. Then counts by class; or each sample's prediction
        and label, at its place in the split."""
        labels = batch.labels
        assert labels is not None
        loss = self._loss(outputs, batch, "sum").double()
        if labels.is_floating_point():
            assert batch.places is not None
            table = loss.new_zeros(2, batch.most)
            table[0, batch.places], table[1, batch.places] = outputs.squeeze(1).double(), labels.double()
            return torch.cat([loss.new_tensor([len(batch)]), loss[None], table.flatten()])
        return torch.cat(
            [loss.new_zeros(1), loss[None], count_sums(outputs.argmax(1), labels, outputs.shape[1])]
        )

    def metrics(self, samples: int, sums: Sequence[float]) -> dict[str, float]:
        numbers, loss, *rest = sums
        if numbers:
            results = scores.number_scores(*np.array(rest).reshape(2, -1))
        else:
            counts = read_counts(rest)
            results = scores.class_scores(counts.right, counts.predicted, counts.true)
        return {**results, "loss": loss / samples}

    def class_counts(self, sums: Sequence[float]) -> ClassCounts | None:
        return None if sums[0] else read_counts(sums[2:])

    def describe_model(self, model: ModelConfig) -> str:
        classes = 0 if model.graph.classes is None else model.graph.classes.classes
        return f"{super().describe_model(model)}, {'one number' if classes == 1 else f'{classes} classes'}"

    def sample(self, model: nn.Module, source: Source, device: torch.device) -> str:
        """The first texts, each with the model's answer and the true one."""
        tokenizer, classes = tokenizer_of(source), _classes(source)
        host = first_samples(source, 3)
        segments = getattr(getattr(model, "config", None), "token_types", 0) > 1
        batch = PrepareSentences(len(source), segments=segments)(host, device)
        assert batch.labels is not None
        outputs = model(*batch.inputs)
        lines = []
        rows = batch.inputs[0].tolist()
        splits = host.samples["segment"].tolist() if self.form == "pair" else [0] * len(rows)
        for row, split, output, true in zip(rows, splits, outputs, batch.labels.tolist(), strict=True):
            text = " | ".join(tokenizer.decode(part) for part in (row[:split], row[split:]) if part)
            answer = f"{output.item():.2f}" if classes is None else classes[int(output.argmax())]
            meant = f"{true:.2f}" if classes is None else classes[true]
            lines.append(f"{text} → {answer} (is {meant})")
        return "\n".join(lines)


class Pairs(Sentences):
    """`Sentences` for pairs of sentences: inference, paraphrase, similarity."""

    unit = "pairs"
    form = "pair"


def _classes(source: Source) -> tuple[str, ...] | None:
    classes: tuple[str, ...] | None = getattr(source, "classes", None)
    return classes


class PrepareSentences:
    """Makes batches of labelled rows, cut to the longest in the batch. `samples` is the size of the split; `segments`
    says whether the model distinguishes the second text from the first."""

    def __init__(self, samples: int, *, segments: bool) -> None:
        self.samples, self.segments = samples, segments

    def __call__(self, host: HostBatch, device: torch.device) -> TextBatch:
        fields: dict[str, Any] = {name: value.numpy() for name, value in host.samples.items()}
        lengths = fields["length"]
        tokens = fields["tokens"]
        tokens = tokens[:, : rounded(int(lengths.max()), tokens.shape[1])]
        segments = None
        if self.segments and "segment" in fields:
            places = np.arange(tokens.shape[1])
            second = (places >= fields["segment"][:, None]) & (places < lengths[:, None])
            segments = second.astype(np.int64)
        return TextBatch.of(
            host, device, (tokens, lengths, segments), tokens=int(lengths.sum()),
            labels=host.samples["label"].to(device, non_blocking=True),
            places=on_device(host.positions, device), most=self.samples,
        )  # fmt: skip
