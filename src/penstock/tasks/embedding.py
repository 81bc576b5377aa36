"""Contrastive embeddings: two texts of a pair are near each other, and far from all others in the batch (van den Oord
et al., 2018; Karpukhin et al., EMNLP 2020, section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.config.model import ModelConfig
from penstock.config.run import Augment, DataConfig
from penstock.data.loader import HostBatch
from penstock.data.source import Source, Split
from penstock.data.text.rows import open_rows
from penstock.data.text.tokenizers import Tokenizer
from penstock.models.inputs import mean_of
from penstock.tasks import scores
from penstock.tasks.task import Prepare
from penstock.tasks.text import TextBatch, TextTask, first_samples, on_device, rounded, tokenizer_of

TEMPERATURE = 0.05
"""Divisor of similarities (Gao et al., EMNLP 2021, section 3)."""
MOST = 1 << 22
"""Most elements of the vectors that an evaluation stores: in larger splits, only the first pairs are searched."""
SHOWN = 16


class Embedding(TextTask):
    """Mean cross entropy of choosing each first text's partner among all second texts of the batch, and the other way
    round. A text's vector is the mean of its tokens' features, scaled to length 1; similarity is the cosine divided by
    0.05. With several ranks, the batch covers all ranks, and gradients flow back to each. The loss is not a sum over
    samples: pairs are compared only within their micro-batch, so the loss of a step, the mean over its pairs, depends
    on the number of pairs per micro-batch.

    Metrics: `recall_at_1`, `_5` and `_10` are the shares of first texts whose partner is among the 1, 5 or 10 nearest
    of the whole split (of the first pairs in very large splits), and `loss` is the loss of choosing it from these."""

    unit = "pairs"
    compares = True
    ranked_by = ("recall_at_1", "loss")
    shown = (*(f"recall@{rank} {{recall_at_{rank}:.2%}}" for rank in scores.RANKS), "loss {loss:.4f}")

    def read(self, data: DataConfig, model: ModelConfig, tokenizer: Tokenizer, split: Split) -> Source:
        return open_rows(data, tokenizer, split, form="two", length=model.graph.lengths[0])

    def fit(self, model: ModelConfig, source: Source) -> ModelConfig:
        fitted: ModelConfig = replace(cast(Any, model), head="none")
        return self.fit_vocabulary(fitted, tokenizer_of(source))

    def prepare(
        self, source: Source, model: ModelConfig, *, augment: Augment | None = None, seed: int = 0
    ) -> Prepare:
        return PrepareTwo(min(len(source), max(1, MOST // (2 * model.graph.width))))

    def loss(self, outputs: Tensor, batch: TextBatch) -> Tensor:
        first, second = vectors(outputs, batch)
        pairs = len(first) * self.peers.place + torch.arange(len(first), device=first.device)
        return self.peers.contrast(first / TEMPERATURE, second, pairs)

    def tally(self, outputs: Tensor, batch: TextBatch) -> Tensor:
        """The width of vectors, summed over stored samples; their number; and both vectors at each sample's place."""
        assert batch.places is not None
        both = torch.stack(vectors(outputs, batch)).double()
        stored = batch.places < batch.most
        table = both.new_zeros(2, batch.most, both.shape[2])
        table[:, batch.places[stored]] = both[:, stored]
        count = stored.sum().double()
        return torch.cat([torch.stack([count * both.shape[2], count]), table.flatten()])

    def metrics(self, samples: int, sums: Sequence[float]) -> dict[str, float]:
        width, stored = sums[:2]
        queries, answers = np.array(sums[2:]).reshape(2, -1, round(width / stored))[:, : int(stored)]
        return scores.search_scores(queries, answers, TEMPERATURE)

    def describe_model(self, model: ModelConfig) -> str:
        return f"{super().describe_model(model)}, {model.graph.width} features"

    def sample(self, model: nn.Module, source: Source, device: torch.device) -> str:
        """The first text, and the nearest of the first sixteen second texts."""
        tokenizer, host = tokenizer_of(source), first_samples(source, SHOWN)
        batch = PrepareTwo(SHOWN)(host, device)
        first, second = vectors(model(*batch.inputs), batch)
        nearest = int((first[:1] @ second.T).argmax())
        texts = [
            tokenizer.decode(host.samples[name][place][: int(host.samples[f"{name}_length"][place])].tolist())
            for name, place in (("first", 0), ("second", nearest), ("second", 0))
        ]
        return f"{texts[0]} → {texts[1]} (belongs to {texts[2]}; of {len(batch)})"


def vectors(outputs: Tensor, batch: TextBatch) -> tuple[Tensor, Tensor]:
    """Unit vectors (B, D) in fp32 of the first and of the second texts, from features (2B, N, D)."""
    first, second = F.normalize(mean_of(outputs.float(), batch.inputs[1]), dim=1).chunk(2)
    return first, second


class PrepareTwo:
    """Makes batches of pairs: all first texts, then all second texts, as one batch of the model, (2B, N)."""

    def __init__(self, kept: int) -> None:
        self.kept = kept

    def __call__(self, host: HostBatch, device: torch.device) -> TextBatch:
        fields = {name: value.numpy() for name, value in host.samples.items()}
        tokens = np.concatenate([fields["first"], fields["second"]])
        lengths = np.concatenate([fields["first_length"], fields["second_length"]])
        tokens = tokens[:, : rounded(int(lengths.max()), tokens.shape[1])]
        return TextBatch.of(
            host, device, (tokens, np.maximum(lengths, 1)), tokens=int(lengths.sum()),
            places=on_device(host.positions, device), most=self.kept,
        )  # fmt: skip
