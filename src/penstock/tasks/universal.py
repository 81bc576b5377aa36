"""Understanding and generation in one task: masked words, the order of a text's halves, and the next token (Sun et al.,
2021, "ERNIE 3.0", section 3.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.config.model import ModelConfig
from penstock.config.run import Augment, DataConfig
from penstock.data.hashing import SWAP, uniforms
from penstock.data.loader import HostBatch
from penstock.data.source import PADDING, Source, Split
from penstock.data.text.tokenizers import Tokenizer
from penstock.data.text.tokens import open_tokens
from penstock.errors import ConfigError
from penstock.kernels.cross_entropy import IGNORED
from penstock.tasks.masked_words import PrepareMasked
from penstock.tasks.next_token import NextToken, PrepareNextToken
from penstock.tasks.task import Prepare
from penstock.tasks.text import TextBatch, Tokens, on_device, tokenizer_of

HEADS = ("next", "masked", "kind")
"""Names of the heads, in the order of their losses."""
ORDERS = ("in order", "swapped")
"""Classes of texts by the order of their halves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UniversalBatch(TextBatch):
    """Texts to continue and texts to understand, with their targets."""

    counts: Tensor
    """(3,) float64 on the device, number of targets of each head."""
    weights: tuple[float, ...]
    """Weight of each head's loss."""


class Universal(NextToken):
    """Weighted sum of a mean loss for each head: the next token; masked words, 15 % of a text; and, if the model has a
    head for two classes, whether the two halves of a text, with a separator in between, are in their original order
    (Lan et al., ICLR 2020, "ALBERT", section 3.1). A text that begins in one document and ends in another has no order.

    A sample is a window of the text, with targets for all heads; in training, `model.continued` and `model.masked` are
    the shares of samples for the next token and for the other heads. `model.prefix` is the share of the former that
    begin with a prefix, whose tokens all attend to each other and are not targets. The choice of hidden words, swaps
    and prefixes is a pure function of the seed and the sample's position in the stream. An evaluation has no prefixes,
    so that its perplexity covers all tokens.

    Metrics: `loss`; `perplexity` and `bits_per_byte` of the next token; `masked_accuracy` and `order_accuracy`.
    """

    losses = HEADS
    shown = (
        "loss {loss:.4f}",
        "perplexity {perplexity:.2f}",
        "masked accuracy {masked_accuracy:.2%}",
        "order accuracy {order_accuracy:.2%}",
    )

    def read(self, data: DataConfig, model: ModelConfig, tokenizer: Tokenizer, split: Split) -> Source:
        if not data.packed:
            raise ConfigError(
                "data.packed is false, but texts to continue and texts to understand are processed together, with "
                "one length; leave it out."
            )
        length = model.graph.inputs[0].length
        source: Any = open_tokens(data, tokenizer, split, length=length + 1, stride=length)
        source.classes = ORDERS  # their names are stored with the model
        return source  # type: ignore[no-any-return]

    def fit(self, model: ModelConfig, source: Source) -> ModelConfig:
        tokenizer, classes = tokenizer_of(source), model.graph.classes
        if tokenizer.mask is None or (
            classes is not None and None in (tokenizer.classify, tokenizer.separator)
        ):
            raise ConfigError(
                f"The tokenizer {tokenizer.name} lacks a mask token, or the tokens around texts whose order is "
                "predicted. Name them as mask_token, cls_token and sep_token in its tokenizer_config.json, choose "
                "another with data.tokenizer, or set model.head to words."
            )
        if classes is not None and classes.classes != len(ORDERS):
            raise ConfigError(
                f"model.classes is {classes.classes}, but two halves have {len(ORDERS)} orders; set it to that, or "
                "model.head to words."
            )
        return self.fit_vocabulary(model, tokenizer)

    def taught_by(self, teacher: Any) -> Any:
        raise ConfigError(
            "recipe.teacher supports only models with one head; export a branch of this one, and train that instead."
        )

    def prepare(
        self, source: Source, model: ModelConfig, *, augment: Augment | None = None, seed: int = 0
    ) -> Prepare:
        size = float(getattr(source, "bytes_per_token", 0.0))
        return PrepareUniversal(tokenizer_of(source), model, seed, size, mixes=augment is not None)

    def blank(self, model: ModelConfig, device: torch.device) -> tuple[Any, ...]:
        return (torch.zeros(1, 1, dtype=torch.int64, device=device),) * len(model.graph.inputs)

    def targets(self, batch: UniversalBatch) -> Tensor:  # type: ignore[override]
        return batch.counts

    def loss(self, outputs: Mapping[str, Tensor], batch: UniversalBatch) -> Tensor:  # type: ignore[override]
        """(3,): the weighted mean loss of each head, 0 for a head that the model lacks."""
        sums = self._sums(outputs, batch)
        weights = sums.new_tensor(batch.weights)
        return weights * sums / batch.counts.clamp(min=1.0).to(sums.dtype)

    def _sums(self, outputs: Mapping[str, Tensor], batch: UniversalBatch) -> Tensor:
        """(3,), the summed loss of each head, whose output is this sum or logits."""
        targets = _targets(batch)
        losses = {
            name: F.cross_entropy(value.float(), targets[name], ignore_index=IGNORED, reduction="sum")
            if value.dim()
            else value
            for name, value in outputs.items()
        }
        none = next(iter(losses.values())).new_zeros(())
        return torch.stack([losses.get(name, none) for name in HEADS])

    # -- evaluation

    def assess(self, model: nn.Module, batch: UniversalBatch) -> Tensor:
        """Computes logits of masked words, not only their loss, so that hits can be counted."""
        inputs = list(batch.inputs)
        at = next(place for place, value in enumerate(inputs) if value is _word_targets(batch))
        inputs[at] = {name: value for name, value in inputs[at].items() if name != "masked"}
        return self.tally(model(*inputs), batch)

    def tally(self, outputs: Mapping[str, Tensor], batch: UniversalBatch) -> Tensor:  # type: ignore[override]
        """For each head: summed loss, number of targets, hits, and weight times samples; then the bytes."""
        hits, targets = batch.counts.new_zeros(3), _targets(batch)
        for place, name in enumerate(HEADS):
            if name in outputs and outputs[name].dim():
                hits[place] = (outputs[name].argmax(-1) == targets[name]).sum()
        sums = self._sums(outputs, batch).double()
        weights = sums.new_tensor(batch.weights) * len(batch)
        return torch.cat([sums, batch.counts, hits, weights, sums.new_tensor([batch.bytes])])

    def metrics(self, samples: int, sums: Sequence[float]) -> dict[str, float]:
        losses, counts, hits, weights = (sums[at : at + 3] for at in (0, 3, 6, 9))
        means = [loss / max(count, 1.0) for loss, count in zip(losses, counts)]
        values = super().metrics(samples, (losses[0], counts[0], sums[12])) if counts[0] else {}
        values["loss"] = sum(mean * weight / samples for mean, weight in zip(means, weights))
        for place, name in ((1, "masked"), (2, "order")):
            if counts[place]:
                values[f"{name}_accuracy"] = hits[place] / counts[place]
        return values

    def sample(self, model: nn.Module, source: Source, device: torch.device) -> str:
        graph: Any = model.graph
        return "" if graph.writer is None else super().sample(model, source, device)


def _word_targets(batch: UniversalBatch) -> dict[str, Tensor]:
    """The targets of each head over words."""
    named = (value for value in batch.inputs if isinstance(value, dict))
    return next(value for value in named if not value.keys().isdisjoint(HEADS))


def _targets(batch: UniversalBatch) -> dict[str, Any]:
    """The targets of each head."""
    return {**_word_targets(batch), "kind": batch.labels}


class PrepareUniversal:
    """Makes batches of windows (B, N + 1) for a model's inputs and heads. Each sample is for all heads or, if `mixes`,
    for some of them, by the model's shares `continued` and `masked`."""

    def __init__(
        self, tokenizer: Tokenizer, model: Any, seed: int, bytes_per_token: float, *, mixes: bool
    ) -> None:
        self.graph = graph = model.graph
        self.seed, self.size = seed, bytes_per_token
        self.understood, self.orders = graph.padded, graph.classes is not None
        self.segments = self.orders and any(item.segments > 1 for item in graph.inputs)
        self.end, self.separator = tokenizer.end, tokenizer.separator
        self.before = int(tokenizer.classify is not None)
        self.room = graph.inputs[0].length - self.before - (self.separator is not None)
        """Tokens of a text, in which words are hidden, between the special tokens around it."""
        self.weights = (model.next_weight, model.words_weight, model.classes_weight)
        self.continued: float = model.continued if mixes else 1.0
        self.masked: float = model.masked if mixes else 1.0
        prefix = graph.inputs[0].prefix if mixes else 0.0
        following = PrepareNextToken(self.end, 0.0, prefix=prefix, seed=seed)
        self._next = None if graph.writer is None else following
        self._hide = PrepareMasked(tokenizer, seed) if self.understood else None

    def __call__(self, host: HostBatch, device: torch.device) -> UniversalBatch:
        named: dict[str, Any] = {"documents": {}, "targets": {}, "rows": {}}
        counts = [0, 0, 0]
        tokens, labels = 0, None
        if self._next is not None:
            some, counted = _due(host.positions, self.continued, first=True)
            made = self._next(HostBatch(host.samples[some], host.ids[some], host.positions[some], ()), device)
            named["tokens"], named["documents"]["tokens"], targets, *prefixes = made.inputs
            named["prefixes"] = prefixes[-1] if prefixes else None
            named["targets"]["next"] = targets if counted else torch.full_like(targets, IGNORED)
            counts[0] = (made.count or 0) * counted
            tokens += made.tokens
        if self._hide is not None:
            some, counted = _due(host.positions, self.masked, first=False)
            texts, orders = self._texts(host.samples.numpy()[some], host.positions[some])
            part = HostBatch(torch.from_numpy(texts), host.ids[some], host.positions[some], ())
            made = self._hide(part, device)
            hidden, _, _, documents, targets, rows = made.inputs
            named[self.understood], named["documents"][self.understood] = hidden, documents
            named["segments"] = self._segments(hidden)
            named["targets"]["masked"] = targets if counted else torch.full_like(targets, IGNORED)
            named["rows"]["masked"] = rows
            counts[1] = (made.count or 0) * counted
            tokens += made.tokens
            if self.orders:
                orders = orders if counted else np.full_like(orders, IGNORED)
                labels, counts[2] = on_device(orders, device), int((orders != IGNORED).sum())
        if all(value is None for value in named["documents"].values()):
            named["documents"] = None
        return UniversalBatch(
            inputs=self.graph.ordered(**named), ids=host.ids, tokens=tokens, labels=labels,
            bytes=counts[0] * self.size, weights=self.weights,
            counts=torch.tensor(counts, dtype=torch.float64).to(device, non_blocking=True),
        )  # fmt: skip

    def _texts(self, windows: Tokens, positions: NDArray[np.int64]) -> tuple[Tokens, NDArray[np.int64]]:
        """Texts (B, L) of windows, in which words will be hidden, and the order of their halves, (B,): half of the
        texts are swapped at random, and texts with the end of a document have no target."""
        if not self.orders:
            return windows[:, : self.room], np.zeros(0, np.int64)
        half = (self.room - 1) // 2
        first, second = windows[:, :half], windows[:, half : 2 * half]
        swapped = uniforms(self.seed, SWAP, counters=positions, columns=1) < 0.5  # (B, 1)
        between = np.full((len(windows), 1), self.separator, windows.dtype)
        rest = np.full((len(windows), self.room - 1 - 2 * half), PADDING, windows.dtype)
        sides = (np.where(swapped, second, first), between, np.where(swapped, first, second), rest)
        orders = swapped[:, 0].astype(np.int64)
        if self.end is not None:
            orders[(windows[:, : 2 * half] == self.end).any(axis=1)] = IGNORED
        return np.concatenate(sides, axis=1), orders

    def _segments(self, hidden: Tensor) -> Tensor | None:
        """Which tokens belong to a text's second half, (B, N)."""
        if not self.segments:
            return None
        end = self.before + (self.room - 1) // 2
        second: Tensor = torch.arange(hidden.shape[1], device=hidden.device) > end
        return second.long().expand_as(hidden)


def _due(positions: NDArray[np.int64], share: float, *, first: bool) -> tuple[NDArray[np.int64], bool]:
    """Indices of a batch's samples that belong to a share of the stream, by their positions, and whether there are any;
    if not, the index of one sample, which must not count. Two shares that add up to 1, one of them `first`, have each
    sample once."""
    share = share if first else 1.0 - share
    due = np.floor((positions + 1) * share) > np.floor(positions * share)
    chosen = np.flatnonzero(due if first else ~due)
    return (chosen, True) if len(chosen) else (np.zeros(1, np.int64), False)
