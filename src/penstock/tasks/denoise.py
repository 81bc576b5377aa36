"""Denoising: a model learns to predict the noise in images (Ho et al., NeurIPS 2020; see `penstock.tasks.noise`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.boundary.files import quoted
from penstock.config.graph import Graph, TokenInput
from penstock.config.model import ModelConfig
from penstock.config.run import Augment, DataConfig
from penstock.data.hashing import NOISE, uniforms, words
from penstock.data.imagefolder import ImageFolder
from penstock.data.images import PrepareImages
from penstock.data.loader import HostBatch
from penstock.data.open import open_source
from penstock.data.resample import to_device
from penstock.data.source import ImageSource, Source, Split
from penstock.data.text.open import open_tokenizer
from penstock.data.text.tokenizers import Bytes, Tokenizer
from penstock.dtypes import widened
from penstock.errors import ConfigError
from penstock.tasks.image_classification import fit_classes
from penstock.tasks.noise import NoiseSchedule, ranges_of
from penstock.tasks.task import Prepare, Task
from penstock.tasks.text import padded

_GOLDEN = 0x9E3779B97F4A7C15
"""2⁶⁴ times the fractional part of the golden ratio; any number of its multiples fills [0, 1) evenly."""


@dataclass(frozen=True, slots=True)
class NoisyBatch:
    """Noisy images and the targets to predict from them."""

    inputs: tuple[Tensor | None, ...]
    """The model's arguments, in the order of `graph.arguments`: noisy images (B, C, S, S), then arguments for texts (B,
    N), `times` (B,) in fp64, `classes` (B,), `routes` (B,)."""
    target: Tensor
    """(B, C, S, S)."""
    weights: Tensor | None = None
    """Factors of the squared error: (B, 1, 1, 1), or (B, 1, S, S) if regions have different weights, such as regions of
    known objects (Feng et al., CVPR 2023, "ERNIE-ViLG 2.0", section 2.2), which `data.regions` marks. None: 1."""

    @classmethod
    def of(
        cls, graph: Graph, target: Tensor, weights: Tensor | None = None, **arguments: Tensor | None
    ) -> NoisyBatch:
        """A batch for a model with this graph, from its arguments by name."""
        return cls(graph.ordered(**arguments), target, weights)

    def __len__(self) -> int:
        return len(self.target)


class PrepareNoise:
    """Makes noisy batches of images. Times and noise depend on the seed and on a sample's place in the stream, so they
    are the same for any split of a step into batches and over ranks.

    Times of consecutive samples are evenly spaced in [0, 1), so that the loss of a step varies less than with
    independent times (Kingma et al., NeurIPS 2021, "Variational Diffusion Models", appendix I.1). Without `augment`, as
    in evaluation, they depend on the sample only, and no condition is dropped.
    """

    def __init__(
        self, source: ImageSource, graph: Graph, *, augment: Augment | None = None, seed: int = 0
    ) -> None:
        head, condition = graph.pixels, graph.condition
        assert head is not None
        assert condition is not None
        self._graph, self._head, self._seed = graph, head, seed
        self._schedule = NoiseSchedule(head.schedule)
        self._labels, self._none = source.labels, len(source.classes)
        self._dropout = 0.0 if augment is None else condition.dropout
        self._training = augment is not None
        flips = None if augment is None else Augment(crop_scale_min=1.0, flip=augment.flip)
        self._images = PrepareImages(
            source, image_size=graph.images.image_size, classes=len(source.classes), augment=flips, seed=seed
        )
        self._conditions = conditions_of(graph, source.classes, source.tokenizer, source.word_weights)
        self._marked, self._region_weight = source.marked, source.region_weight

    def __call__(self, host: HostBatch, device: torch.device) -> NoisyBatch:
        """Copy to the device and add noise there, on the current stream, without waiting."""
        x0 = self._images(host, device).images
        weights = None
        if self._marked:
            weights = 1 + (self._region_weight - 1) * (x0[:, -1:] + 1) / 2
            x0 = x0[:, :-1].contiguous()
        places = host.positions if self._training else host.ids
        table = uniforms(self._seed, NOISE, counters=places, columns=1 + x0[0].numel() // 2 * 2 + 2)
        shown = table[:, 0] >= self._dropout
        noise = to_device(_normal(table[:, 1:], x0[0].numel()), device).view_as(x0)
        times = to_device(_times(self._seed, places), device)
        t = times.float()  # adding noise in fp64 would be slow on a GPU
        rows = np.where(shown, self._labels[host.ids], self._none)
        more = {name: to_device(table[rows], device) for name, table in self._conditions.items()}
        if self._graph.labelled:
            more["routes"] = ranges_of(times, self._graph.ranges)
        if self._head.min_snr is not None:
            ratios = self._schedule.min_snr_weight(self._head.predicts, times, self._head.min_snr)
            ratios = ratios.float().view(-1, 1, 1, 1)
            weights = ratios if weights is None else ratios * weights
        return NoisyBatch.of(
            self._graph, self._schedule.target(self._head.predicts, x0, noise, t), weights,
            images=self._schedule.add_noise(x0, noise, t), times=times, **more,
        )  # fmt: skip


class Denoise(Task):
    """Mean squared error of the model's prediction, over the pixels of each image and then over images; with weights,
    the mean of the weighted squares. Computed in fp32 or wider under every Plan.

    A model that reads texts gets the names of classes, encoded by the tokenizer of `data.tokenizer` or of the weights
    in `init_from`; else as bytes. Batches are `NoisyBatch`es. The metric `loss` is the same for held-out images, each
    with the same time and noise in all evaluations.
    """

    unit = "images"
    size_setting = "model.image_size"
    augments = frozenset({"flip"})

    def __init__(self, init_from: str | None = None) -> None:
        self.init_from = init_from

    def open(self, data: DataConfig, model: ModelConfig, split: Split) -> Source:
        images = model.graph.images
        source = open_source(data, split=split, channels=images.channels, image_size=images.image_size)
        if model.graph.inputs_of(TokenInput):
            source.tokenizer = open_tokenizer(data, self.init_from)
            source.word_weights = data.word_weights
        if data.regions is not None:
            assert isinstance(source, ImageFolder)
            source.mark(data.regions, needed=split == "train")
            source.region_weight = data.region_weight
        return source

    def fit(self, model: ModelConfig, source: Source) -> ModelConfig:
        """The model with the data's number of classes, if its own was left at the default; this is logged. Raises
        ConfigError if it contradicts the data, or has no room for the texts."""
        assert isinstance(source, ImageSource)
        texts_of(model.graph, source.classes, source.tokenizer)
        condition = model.graph.condition
        return fit_classes(model, source) if condition is not None and condition.classes else model

    def prepare(
        self, source: Source, model: ModelConfig, *, augment: Augment | None = None, seed: int = 0
    ) -> Prepare:
        assert isinstance(source, ImageSource)
        return PrepareNoise(source, model.graph, augment=augment, seed=seed)

    def blank(self, model: ModelConfig, device: torch.device) -> tuple[Any, ...]:
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        noisy = torch.zeros(1, *model.graph.images.shape, device=device)
        return model.graph.ordered(
            images=noisy, tokens=zero[None], lengths=zero + 1, times=zero.double(), classes=zero, routes=zero
        )

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        squares: Tensor = (widened(outputs) - batch.target).square()
        return (squares if batch.weights is None else squares * batch.weights).flatten(1).mean(1).mean()

    def describe_model(self, model: ModelConfig) -> str:
        return f"images of {' × '.join(map(str, model.graph.images.shape))}"


def conditions_of(
    graph: Graph, names: Sequence[str], tokenizer: Tokenizer | None, factors: Sequence[str],
) -> dict[str, NDArray[Any]]:  # fmt: skip
    """Arguments of the model for images of each name, (names + 1, …), and in the last row for images without a name:
    names as texts, with `factors` for the attention to their words, or class numbers. Raises ConfigError."""
    tables: dict[str, NDArray[Any]] = dict(
        zip(("tokens", "lengths"), texts_of(graph, names, tokenizer) or ())
    )
    if factors:
        tables["token_weights"] = weights_of(graph, names, tokenizer, factors)
    if graph.condition is not None and graph.condition.classes:
        tables["classes"] = np.append(np.arange(len(names)), graph.condition.classes)
    return tables


def texts_of(
    graph: Graph, classes: Sequence[str], tokenizer: Tokenizer | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """The names of classes as a model's texts: tokens (classes + 1, N) and lengths (classes + 1,), the empty text last;
    None for a model without texts. Without a tokenizer they are bytes after a begin token. Raises ConfigError if the
    model has no room for them."""
    one = next(iter(graph.inputs_of(TokenInput)), None)
    if one is None:
        return None
    words, texts = tokenizer or Bytes(), [*classes, ""]
    rows = words.framed(texts)
    if isinstance(words, Bytes):
        rows = [[words.begin, *numbers] for numbers in words.encode(texts)]
    tokens, lengths = padded([row or [words.pad] for row in rows], words.pad)
    problems = []
    if one.vocabulary < words.size:
        problems.append(
            f"model.vocabulary is {one.vocabulary}, but the tokenizer {words.name} has {words.size} entries; "
            f"use {words.size}."
        )
    if one.length < lengths.max():
        problems.append(
            f"model.sequence is {one.length}, but the longest name of a class has {lengths.max()} tokens; use "
            f"{lengths.max()}."
        )
    if problems:
        raise ConfigError(problems)
    return tokens, lengths


def weights_of(
    graph: Graph, texts: Sequence[str], tokenizer: Tokenizer | None, factors: Sequence[str],
) -> NDArray[np.float32]:  # fmt: skip
    """The weights of the tokens of `texts_of`, (texts + 1, N): the factor of the word that a token belongs to, else 1.
    `factors` have the form `seven=2`; for a token of several words the last is used. Raises ConfigError if the model
    reads no texts, if a text spells a special token, or if no text contains one of the words."""
    encoded = texts_of(graph, texts, tokenizer)
    if encoded is None:
        raise ConfigError("The model reads no texts whose words could have weights; leave word_weights out.")
    tokenizer = tokenizer or Bytes()
    first = 1 if isinstance(tokenizer, Bytes) else len(tokenizer.frame().before)
    weights = np.ones(encoded[0].shape, np.float32)
    unseen = dict.fromkeys(factors)
    for row, (text, (numbers, places)) in enumerate(zip(texts, tokenizer.encode_marked(texts), strict=True)):
        if not np.array_equal(numbers, encoded[0][row, first : first + len(numbers)]):
            raise ConfigError(
                f"{quoted(text)} spells a special token, so that its words can have no weights."
            )
        for each in factors:
            word, _, factor = each.rpartition("=")
            for place in re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", text):
                unseen.pop(each, None)
                covered = [low < place.end() and high > place.start() for low, high in places]
                weights[row, first : first + len(numbers)][np.array(covered, bool)] = float(factor)
    if unseen:
        raise ConfigError(
            f"word_weights names {', '.join(map(quoted, unseen))}, but no text has such a word."
        )
    return weights


def _times(seed: int, places: NDArray[np.int64]) -> NDArray[np.float64]:
    """A time in (0, 1) for each place in the stream, (B,)."""
    start = words(seed, NOISE, counters=np.zeros(1, np.uint64))
    turned = start + places.astype(np.uint64) * np.uint64(_GOLDEN)
    return ((turned >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _normal(table: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    """Normal numbers (B, count) from at least `count` uniform ones in [0, 1), an even number (Box & Muller, 1958)."""
    first, second = table[:, 0::2].astype(np.float64), table[:, 1::2].astype(np.float64)
    radius, angle = np.sqrt(-2.0 * np.log1p(-first)), 2.0 * np.pi * second
    pairs = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return np.asarray(pairs[:, :count], np.float32)
