"""`penstock scale`: how large a model's gradients are on its data, and the loss scale for fp16 that follows."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.boundary.files import own_file, require_folder, write_text
from penstock.cli._app import configured, load_or_described
from penstock.cli._display import show
from penstock.config.convert import (
    Checked,
    Count,
    Device,
    FilledText,
    FunctionPath,
    Headroom,
    NotNegative,
    Seed,
)
from penstock.config.model import PRESETS, ModelConfig
from penstock.config.run import DataConfig
from penstock.report.page import Cell, Section
from penstock.report.precision_figures import gradient_figure, percent

if TYPE_CHECKING:
    from penstock.precision.histogram import GradientHistogram, Histogram


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleConfig(Checked):
    """One measurement of the gradients of a model on its data."""

    model: ModelConfig = PRESETS["vit-s16"]
    """Name of a preset (`vit-s16`), or `package.module:factory`: a function that returns (model, batch, loss)."""
    factory: FunctionPath | None = None
    """`package.module:function` that returns a model, an example batch, and loss(model, batch); replaces `model`."""
    data: DataConfig = field(default_factory=DataConfig)
    """Images: `digits`, `imagefolder:PATH` or `pack:PATH`."""
    init_from: FilledText | None = None
    """Folder or safetensors file of weights to start from, such as a run's export (Hugging Face, timm or Penstock)."""
    batches: Count = 16
    """Number of batches whose gradients are measured."""
    batch: Count | None = None
    """Samples per batch; none: 8 on a CPU and 64 on a GPU. A factory's batch is used as it is."""
    lr: NotNegative = 3e-4
    """Learning rate of the fp32 AdamW step after each batch, so that not only the initial weights are
    measured; 0 leaves the weights unchanged."""
    headroom: Headroom = 2.0
    """Factor by which gradients of other batches may be larger than the largest that was measured."""
    device: Device = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    seed: Seed = 0
    """Determines weights and sample order."""
    output: FilledText = "runs/scale"
    """Folder of the result: scale.svg and scale.json."""

    def _problems(self) -> Iterator[str]:
        if self.factory is not None and self.init_from is not None:
            yield "init_from is for presets; let the factory load its weights."


@configured(ScaleConfig, positional="model", loader=load_or_described)
def scale(config: ScaleConfig) -> None:
    """Measure a model's gradients and choose a loss scale for fp16.

    The scale is a constant that fits the gradients into fp16. MODEL is a preset such as vit-s16, or
    package.module:factory, a function that returns your model, an example batch, and a function loss(model, batch).

        penstock scale vit-s16 --data imagefolder:/data/flowers
    """
    from penstock.ladder.own import subject_of
    from penstock.ladder.settings import LadderConfig
    from penstock.models.convert import load_weights
    from penstock.precision import gradient_histogram, recommend
    from penstock.probe import resolve_device
    from penstock.report.record import environment
    from penstock.tasks import mean_loss

    require_folder(config.output)
    settings = LadderConfig(
        model=config.model, factory=config.factory, data=config.data, batch=config.batch, seed=config.seed,
        lr=config.lr or LadderConfig().lr,
    )  # fmt: skip
    subject = subject_of(settings, None, resolve_device(config.device))
    built = subject.build(subject.first, config.seed)
    if config.init_from is not None:
        load_weights(built.model, config.init_from, new_head=True)
    gradients = gradient_histogram(
        built.model, itertools.islice(subject.batches(subject.first, config.seed), config.batches),
        loss=partial(mean_loss, built.loss), between=(lambda batch: built.step([batch])) if config.lr else None,
    )  # fmt: skip
    advice = recommend(gradients, headroom=config.headroom)
    samples = subject.first.plan.global_batch if subject.splittable else None
    line = (
        'model, optimizer = penstock.accelerate(model, optimizer, precision="O1", dtype="fp16", '
        f"loss_scale={advice.scale!r})"
    )
    stored = {
        "model": subject.title, "data": subject.data, "samples": samples, "lr": config.lr,
        "recommendation": asdict(advice) | {"saved": advice.saved}, "line": line, "gradients": gradients.to_dict(),
        "environment": environment(),
    }  # fmt: skip
    title = f"Gradients of activations of {subject.title}"
    figure = gradient_figure(gradients.activations, scale=advice.scale, title=title)
    folder = Path(config.output)
    texts = {"scale.svg": figure, "scale.json": json.dumps(stored, indent=1) + "\n"}
    for name, text in texts.items():
        write_text(own_file(folder, name), text)
    per_batch = f" of {samples}" if samples else ""
    trained = f", training at a rate of {config.lr:g} in between" if config.lr else ", at the same weights"
    show([
        f"{subject.title} on {subject.data}: {gradients.batches} batches{per_batch}{trained}\n",
        _shares(gradients, advice.scale), f"\nWritten: {', '.join(str(folder / name) for name in texts)}\n",
        f"The largest power of two that leaves a factor of {advice.headroom:g} below 65,504 is {advice.scale:g}:", line,
    ])  # fmt: skip


def _shares(gradients: GradientHistogram, scale: float) -> Section:
    """The effect of fp16 on gradients of activations, of weights and of all, without the scale and with it."""
    kinds = (gradients.activations, gradients.weights, gradients.all)

    def pair(share: Callable[[Histogram, float], float]) -> list[str]:
        return [f"{percent(share(kind, 1.0))} → {percent(share(kind, scale))}" for kind in kinds]

    rows = {
        "values": [f"{kind.values:,}" for kind in kinds],
        "zero in fp32 too": [percent(kind.zeros / max(kind.values, 1)) for kind in kinds],
        "lost: become zero": pair(lambda kind, by: kind.lost(by)),
        "held with fewer bits": pair(lambda kind, by: kind.denormal(by)),
        "become infinite": pair(lambda kind, by: kind.infinite(by)),
        "largest": [f"{kind.largest:.3g} → {kind.largest * scale:,.0f}" for kind in kinds],
    }
    heads = [Cell("in fp16, without → with the scale", words=True), Cell("activations"), Cell("weights")]
    return Section(
        title="", columns=[*heads, Cell("all", rank=2)],
        rows=[("", [Cell(words, words=True), *map(Cell, cells)]) for words, cells in rows.items()],
    )  # fmt: skip
