"""`penstock scale`: how large a model's gradients are on its data, and the loss scale for fp16 that follows."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli._app import configured
from penstock.cli.ladder import factory_as_model
from penstock.config.scale import ScaleConfig
from penstock.errors import ExitCode

if TYPE_CHECKING:
    import torch

    from penstock.build import Built
    from penstock.precision import GradientHistogram, Recommendation


@factory_as_model
@configured(ScaleConfig, positional="model")
def scale(config: ScaleConfig) -> int:
    """Measure how large a model's gradients are, and choose the constant loss scale that fits them into fp16.

    MODEL is a preset such as vit-s16, or package.module:factory, a function that returns your model, an example batch,
    and a function loss(model, batch).
    """
    from penstock.cli.scale_page import scale_page, table
    from penstock.precision import gradient_histogram, recommend
    from penstock.probe import resolve_device
    from penstock.report.record import environment

    subject = _subject(config, resolve_device(config.device))

    def train(batch: Any) -> None:
        subject.built.step([batch])

    found = gradient_histogram(
        subject.built.model,
        itertools.islice(subject.batches, config.batches),
        loss=subject.built.loss,
        between=train if config.lr else None,
    )
    advice = recommend(found, headroom=config.headroom)
    measured = Measured(
        title=subject.title, data=subject.data, samples=subject.samples, lr=config.lr, line=line(advice)
    )
    stored = {**to_dict(measured, found, advice), "environment": environment()}
    pages = _write(Path(config.output), scale_page(measured, found, advice, stored["environment"]), stored)
    print(table(measured, found, advice))
    print(f"\nWritten: {', '.join(str(path) for path in pages)}\n")
    print(
        f"The largest power of two that leaves a factor of {advice.headroom:g} below 65,504 is {advice.scale:g}:"
    )
    print(measured.line)
    return int(ExitCode.DONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured, and the line of code that follows from it."""

    title: str
    data: str
    samples: int | None
    """Per batch; None where a factory's batch does not say."""
    lr: float
    line: str


def line(advice: Recommendation) -> str:
    """The call that trains with the recommended scale."""
    return (
        'model, optimizer = penstock.accelerate(model, optimizer, precision="O1", dtype="fp16", '
        f"loss_scale={advice.scale!r})"
    )


def to_dict(measured: Measured, found: GradientHistogram, advice: Recommendation) -> dict[str, Any]:
    """For scale.json."""
    return {
        "model": measured.title,
        "data": measured.data,
        "samples": measured.samples,
        "lr": measured.lr,
        "recommendation": {
            "scale": advice.scale, "headroom": advice.headroom, "largest": advice.largest, "saved": advice.saved,
            "lost": advice.lost, "lost_before": advice.lost_before, "denormal": advice.denormal,
            "denormal_before": advice.denormal_before,
        },
        "line": measured.line,
        "gradients": found.to_dict(),
    }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    built: Built
    batches: Iterator[Any]
    title: str
    data: str
    samples: int | None


def _subject(config: ScaleConfig, device: torch.device) -> _Subject:
    from penstock.build import build
    from penstock.config.model import title
    from penstock.config.plan import Plan
    from penstock.config.run import Recipe
    from penstock.data import Loader
    from penstock.ladder.factory import load_factory, made_by, samples_of
    from penstock.ladder.subject import BATCH
    from penstock.models.convert import load_weights
    from penstock.precision.inspect.undisturbed import moved
    from penstock.tasks import task_of

    recipe = Recipe(lr=config.lr) if config.lr else Recipe()
    if config.factory is not None:
        own, batch, loss = made_by(load_factory(config.factory), config.factory, config.seed)
        built = build(own, Plan(), device=device, recipe=recipe, loss=loss, seed=config.seed)
        return _Subject(
            built=built, batches=itertools.repeat(moved(batch, device)), title=config.factory,
            data="the factory's batch", samples=samples_of(batch),
        )  # fmt: skip
    task = task_of(config.model)
    source = task.open(config.data, config.model, "train")
    samples = config.batch if config.batch is not None else BATCH["cpu" if device.type == "cpu" else "cuda"]
    built = build(config.model, Plan(micro_batch=samples), device=device, recipe=recipe, seed=config.seed)
    if config.init_from is not None:
        load_weights(built.model, config.init_from, new_head=True)
    prepare = task.prepare(source, config.model, seed=config.seed)
    loader = Loader(source, prepare, batch=samples, seed=config.seed, device=device)
    return _Subject(
        built=built,
        batches=iter(loader),
        title=title(config.model),
        data=config.data.source,
        samples=samples,
    )


def _write(folder: Path, page: tuple[str, str], stored: dict[str, Any]) -> list[Path]:
    """scale.html, scale.svg and scale.json; the folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    html, svg = page
    texts = {"scale.html": html, "scale.svg": svg, "scale.json": json.dumps(stored, indent=1) + "\n"}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]
