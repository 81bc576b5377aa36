"""`penstock.ImageGenerator`: images from a trained model that denoises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from penstock.boundary.files import quoted
from penstock.config.decoding import Weights
from penstock.config.graph import PatchInput, TokenInput
from penstock.config.plan import Plan
from penstock.config.sampling import Sampling
from penstock.data.text.open import found_in
from penstock.data.text.tokenizers import Tokenizer
from penstock.errors import ConfigError
from penstock.infer.labels import labels_of
from penstock.infer.load import Loaded, loaded
from penstock.infer.samplers import SAMPLERS, Sampler, ddim, even_times, guide
from penstock.models.convert.files import settings_in
from penstock.models.convert.hub import local_weights
from penstock.models.convert.pretrained import read_config, rounded_weights
from penstock.models.model import Model
from penstock.tasks.denoise import texts_of
from penstock.tasks.noise import NoiseSchedule, ranges_of

Arguments = dict[str, Tensor]
"""Arguments of the model, each of as many samples."""
LAST_WITH_EPS = 0.999
"""First time of models that predict the noise: at 1 that says nothing of the image."""


class ImageGenerator:
    """A model that denoises, and makes images of noise: one of ours, or that in the folder of a run or its export.

    Of a folder whose model has experts by ranges of time, those of one range are in memory at a time: a step needs no
    others, and time passes each range once. `opened` counts how often experts were read.

    Raises ConfigError for a model that does not denoise, and what opening a folder raises.
    """

    def __init__(
        self,
        model: str | Path | Model,
        plan: Plan | None = None,
        *,
        weights: Weights = "auto",
        tokenizer: Tokenizer | None = None,
        batch: int = 64,
        device: torch.device | str = "cpu",
    ) -> None:
        folder = None if isinstance(model, Model) else local_weights(model)
        self._open = partial(
            loaded, folder or model, plan or Plan(), weights=weights, tokenizer=None, device=device
        )
        self.batch, self.opened = batch, 0
        self.graph = cast(Model, model).graph if folder is None else read_config(folder).graph
        settings = {} if folder is None else settings_in(folder)
        if self.graph.pixels is None or self.graph.condition is None:
            raise ConfigError(
                f"The model, {self.graph.form}, does not denoise; give one that was trained to, as `penstock train "
                "ddigits-tiny` does."
            )
        self.head, self.schedule = self.graph.pixels, NoiseSchedule(self.graph.pixels.schedule)
        (self.input,) = self.graph.inputs_of(PatchInput)
        names = settings.get("id2label") or {}
        count = self.graph.condition.classes
        self.classes = tuple(str(names.get(str(number), number)) for number in range(count))
        """Names of the classes that images can have."""
        self.reads = bool(self.graph.inputs_of(TokenInput))
        """Whether labels are texts."""
        self._tokenizer = tokenizer
        if tokenizer is None and self.reads and folder is not None:
            self._tokenizer = found_in(folder)
        self.ranges = labels_of(self.graph, settings).names
        """Names of the ranges of time that have experts of their own; none where all times share them."""
        # Weights in few bits are read together.
        parted = folder is not None and bool(self.ranges) and not rounded_weights(folder)
        self._parted, self._range = parted, -1
        """Whether one range's experts are in memory at a time, and whose."""
        self._loaded: Loaded | None = None if self._parted else self._open()

    # -- the model at a time

    def _model(self, t: float) -> tuple[Model, int]:
        """The model with the experts that time t needs, and the number of its range in that model."""
        number = int(ranges_of(torch.tensor(t, dtype=torch.float64), max(len(self.ranges), 1)))
        if self._parted and self._range != number:
            self._loaded = None  # before the next ones are read
            self._loaded, self._range = self._open(only=[self.ranges[number]]), number
            self.opened += 1
        assert self._loaded is not None
        return self._loaded.model, 0 if self._parted else number

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes of weights that were last read of a folder, and of all weights in it."""
        return (0, 0) if self._loaded is None else (self._loaded.bytes, self._loaded.whole_bytes)

    def predict(
        self, x: Tensor, t: float, condition: Arguments, without: Arguments, scale: float = 1.0
    ) -> Tensor:
        """The model's output for noisy images x (B, C, S, S), fp32, all at time t, guided by this scale from the
        arguments `without` a condition towards those with it."""
        model, number = self._model(t)
        first = next(model.parameters())
        more, every = dict(condition), x
        if scale != 1.0:  # both halves are one batch
            more = {name: torch.cat([value, without[name]]) for name, value in condition.items()}
            every = torch.cat([x, x])
        more["times"] = torch.full((len(every),), t, dtype=torch.float64)
        if "routes" in model.graph.arguments:
            more["routes"] = torch.full((len(every),), number)
        with torch.inference_mode():
            made = model(every.to(first), **{name: value.to(first.device) for name, value in more.items()})
        made = made.float()
        return made if scale == 1.0 else guide(made[: len(x)], made[len(x) :], scale)

    # -- images

    def numbers(self, labels: Sequence[str | int | None]) -> list[int]:
        """The number of each label's class, by name or number; that after the last class for None. Raises ConfigError
        for one that is no class."""
        return [len(self.classes) if label is None else self._number(str(label)) for label in labels]

    def _number(self, label: str) -> int:
        if label in self.classes:
            return self.classes.index(label)
        if not self.classes:
            raise ConfigError("The model knows no classes; leave label out.")
        known = ", ".join(self.classes[:20]) + ", …" * (len(self.classes) > 20)
        raise ConfigError(f"{quoted(label)} is no class of this model. Its classes are {known}.")

    def _arguments(self, labels: Sequence[str | int | None]) -> Arguments:
        """The model's arguments that say what images are of."""
        made: Arguments = {}
        if self.classes or not self.reads:
            made["classes"] = torch.tensor(self.numbers(labels))
        if self.reads:
            texts = list(dict.fromkeys(str(label) for label in labels if label is not None))
            encoded = texts_of(self.graph, texts, self._tokenizer)
            assert encoded is not None
            # The last row is the empty text.
            rows = [len(texts) if label is None else texts.index(str(label)) for label in labels]
            made |= {name: torch.from_numpy(each[rows]) for name, each in zip(("tokens", "lengths"), encoded)}
        return {name: value for name, value in made.items() if name in self.graph.arguments}

    def sample(
        self, labels: Sequence[str | int | None], sampling: Sampling | None = None, **settings: Any
    ) -> Tensor:
        """An image of each label, (N, C, S, S) fp32 on the CPU, pixels in [−1, 1] where the model was trained on those.
        Labels are classes, by name or number, or texts where the model reads such; None leaves the choice to chance.

        `sampling` or single `settings` of it say how. Raises ConfigError for a label that is no class, and for guidance
        of a model that takes no labels.
        """
        how = replace(sampling or Sampling(), **settings)
        if not labels:
            raise ConfigError("There are no labels; give one for each image, or None for each.")
        condition, without = self._arguments(labels), self._arguments([None] * len(labels))
        if not condition and how.guidance != 1.0:
            raise ConfigError("The model takes no labels to guide towards; leave guidance at 1.")
        chances = [np.random.default_rng([how.seed, number]) for number in range(len(labels))]
        shape = (self.input.channels, self.input.image_size, self.input.image_size)

        def draw() -> Tensor:
            return torch.from_numpy(np.stack([each.standard_normal(shape, np.float32) for each in chances]))

        def denoise(x: Tensor, t: float) -> tuple[Tensor, Tensor]:
            parts = []
            for begin in range(0, len(x), self.batch):
                rows = slice(begin, begin + self.batch)
                own, none = (
                    {name: value[rows] for name, value in each.items()} for each in (condition, without)
                )
                parts.append(self.predict(x[rows], t, own, none, how.guidance).cpu())
            times = torch.full((len(x),), t, dtype=torch.float64)
            x0, eps = self.schedule.to_x0_eps(self.head.predicts, torch.cat(parts), x, times)
            if how.clip:
                x0, eps = self.schedule.to_x0_eps("x0", x0.clamp(-how.clip, how.clip), x, times)
            return x0.float(), eps.float()

        sampler: Sampler = SAMPLERS[how.sampler]
        if how.eta:
            sampler = partial(ddim, eta=how.eta, draw=draw)
        start = LAST_WITH_EPS if self.head.predicts == "eps" else 1.0
        return sampler(denoise, draw(), even_times(how.steps, start=start), self.schedule)
