"""`penstock.ImageGenerator`: images from a trained diffusion model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.boundary.files import quoted
from penstock.boundary.hub import local_weights
from penstock.config.formats import Weights
from penstock.config.graph import TokenInput
from penstock.config.machine import Machine
from penstock.config.plan import Plan
from penstock.config.sampling import Sampling
from penstock.data.text.tokenizers import Tokenizer
from penstock.errors import ConfigError
from penstock.infer.labels import labels_of
from penstock.infer.load import loaded
from penstock.infer.samplers import SAMPLERS, Sampler, ddim, even_times, guide
from penstock.models.convert.files import settings_in
from penstock.models.convert.pretrained import read_config, rounded_weights
from penstock.models.model import Model
from penstock.planner.prediction import predict_pass
from penstock.planner.serve import stored_on
from penstock.tasks.denoise import conditions_of
from penstock.tasks.noise import NoiseSchedule, ranges_of

Arguments = dict[str, Tensor]
"""Arguments of the model; all have the same number of samples."""
LAST_WITH_EPS = 0.999
"""First time for models that predict the noise: at 1 the noise says nothing about the image."""


class ImageGenerator:
    """A diffusion model that turns noise into images: a model object, or the folder of a run or its export.

    If the model in a folder has experts by time range, only one range's experts are in memory at a time: a step needs
    no others, and sampling visits each range once. `opened` counts how often experts were read.

    Raises ConfigError for a model that does not denoise, and the errors of opening a folder.
    """

    def __init__(
        self, model: str | Path | Model, plan: Plan | None = None, *, weights: Weights = "auto",
        tokenizer: Tokenizer | None = None, batch: int = 64, device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        source = model if isinstance(model, Model) else local_weights(model)
        self.graph = source.graph if isinstance(source, Model) else read_config(source).graph
        settings = {} if isinstance(source, Model) else settings_in(source)
        if self.graph.pixels is None or self.graph.condition is None:
            raise ConfigError(
                f"The model, {self.graph.form}, does not denoise; give one that was trained to, as `penstock train "
                "ddigits-tiny` does."
            )
        self.head, self.schedule = self.graph.pixels, NoiseSchedule(self.graph.pixels.schedule)
        names, count = settings.get("id2label") or {}, self.graph.condition.classes
        self.classes = tuple(str(names.get(str(number), number)) for number in range(count))
        """Names of the classes that images can have."""
        self.reads = bool(self.graph.inputs_of(TokenInput))
        """Whether labels are free texts."""
        self.ranges = labels_of(self.graph, settings).names
        """Names of the time ranges that have their own experts; empty if all times share them."""
        self._plan, self._weights = plan or Plan(), weights
        self._open = partial(loaded, source, self._plan, weights=weights, tokenizer=tokenizer, device=device)
        # Quantised weights cannot be read in part.
        self._parted = isinstance(source, Path) and bool(self.ranges) and not rounded_weights(source)
        """Whether only the experts of range `_range` are in memory; sampling begins with the last range."""
        self.batch, self.opened, self._range = batch, int(self._parted), len(self.ranges) - 1
        self._loaded = self._open(only=self.ranges[-1:] if self._parted else ())
        self._tokenizer = self._loaded.tokenizer

    # -- the model at a time

    def _model(self, t: float) -> tuple[Model, int]:
        """The model with the experts for time t, and the number of t's range in that model."""
        number = int(ranges_of(torch.tensor(t, dtype=torch.float64), max(len(self.ranges), 1)))
        if self._parted and self._range != number:
            del self._loaded  # before the next experts are read
            self._loaded, self._range = self._open(only=[self.ranges[number]]), number
            self.opened += 1
        return self._loaded.model, 0 if self._parted else number

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes of the weights that were last read from the folder, and of all weights in it."""
        return self._loaded.bytes, self._loaded.whole_bytes

    def predict(self, x: Tensor, t: float, arguments: Arguments, scale: float = 1.0) -> Tensor:
        """The model's output for noisy images x (B, C, S, S), fp32, all at time t. With a scale other than 1,
        `arguments` have 2 · B samples: the output is guided from the second half, without a condition, towards the
        first."""
        model, number = self._model(t)
        first, every = next(model.parameters()), x if scale == 1.0 else torch.cat([x, x])
        more = arguments | {"times": torch.full((len(every),), t, dtype=torch.float64)}
        if "routes" in model.graph.arguments:
            more["routes"] = torch.full((len(every),), number)
        with torch.inference_mode():
            output = model(every.to(first), **{name: value.to(first.device) for name, value in more.items()})
        output = output.float()
        return output if scale == 1.0 else guide(output[: len(x)], output[len(x) :], scale)

    # -- images

    def _arguments(self, labels: Sequence[str | int | None], factors: Sequence[str] = ()) -> Arguments:
        """The model's arguments for the labels; `factors` are weights of words in them."""
        names = self.classes
        if self.reads and not names:
            names = tuple(dict.fromkeys(str(label) for label in labels if label is not None))
        rows = [len(names) if label is None else _number(str(label), names) for label in labels]
        tables = conditions_of(self.graph, names, self._tokenizer, factors)
        return {name: torch.from_numpy(table[rows]) for name, table in tables.items()}

    def sample(
        self, labels: Sequence[str | int | None], sampling: Sampling | None = None, **settings: Any
    ) -> Tensor:
        """An image for each label, (N, C, S, S) fp32 on the CPU, with pixels in [−1, 1] if the model was trained on
        such pixels. Labels are classes, by name or number, or texts if the model reads texts; None: without a
        condition.

        `sampling`, or single `settings` of it, control how. Raises ConfigError for an unknown class, and for guidance
        of a model without labels.
        """
        how = replace(sampling or Sampling(), **settings)
        if not labels:
            raise ConfigError("There are no labels; give one for each image, or None for each.")
        # Labels of the images, then None for each, encoded together so that all texts have the same padding.
        every = self._arguments([*labels, *[None] * len(labels)], how.word_weights)
        if not every and how.guidance != 1.0:
            raise ConfigError("The model has no labels to guide towards; leave guidance at 1.")
        chances = [np.random.default_rng([how.seed, number]) for number in range(len(labels))]
        shape = self.graph.images.shape

        def draw() -> Tensor:
            return torch.from_numpy(np.stack([each.standard_normal(shape, np.float32) for each in chances]))

        def denoise(x: Tensor, t: float) -> tuple[Tensor, Tensor]:
            parts = []
            for rows in torch.arange(len(x)).split(self.batch):  # type: ignore[no-untyped-call]
                both = rows if how.guidance == 1.0 else torch.cat([rows, rows + len(x)])
                own = {name: value[both] for name, value in every.items()}
                parts.append(self.predict(x[rows], t, own, how.guidance).cpu())
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

    def predict_seconds(
        self, images: int, machine: Machine, sampling: Sampling | None = None, **settings: Any
    ) -> float:
        """Predicted seconds of `sample` for a number of images on one device of a machine; reads no weights."""
        how = replace(sampling or Sampling(), **settings)
        weights = stored_on(machine, "packed" if self._weights == "auto" else self._weights)

        def passed(batch: int) -> float:
            plan = replace(self._plan, micro_batch=batch if how.guidance == 1.0 else 2 * batch)
            return predict_pass(self._loaded.model.config, machine, plan, weights=weights)

        full, rest = divmod(images, self.batch)
        return how.steps * ((full and full * passed(self.batch)) + (rest and passed(rest)))


def _number(label: str, names: Sequence[str]) -> int:
    """The index of a label in `names`. Raises ConfigError if it is not one of them."""
    if label in names:
        return names.index(label)
    if not names:
        raise ConfigError("The model has no classes; leave label out.")
    listed = ", ".join(names[:20]) + ", …" * (len(names) > 20)
    raise ConfigError(f"{quoted(label)} is not a class of this model. Its classes are {listed}.")
