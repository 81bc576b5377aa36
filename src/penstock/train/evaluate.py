"""Metrics over a whole split, with one wait for the device at the end; for a model in a run, or for an exported one."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.apply import INFERENCE, Setup, apply
from penstock.boundary.files import quoted
from penstock.boundary.hub import local_weights
from penstock.checkpoint import rewrite
from penstock.checkpoint.commit import steps
from penstock.checkpoint.manifest import MANIFEST
from penstock.config.evaluate import EvaluateConfig
from penstock.config.model import title
from penstock.data import Loader, Source
from penstock.data.source import ImageSource
from penstock.data.text.open import found_in
from penstock.data.text.rows import RowSource
from penstock.errors import ConfigError
from penstock.models.anatomy import evaluating
from penstock.models.convert import from_pretrained
from penstock.models.convert.files import settings_in
from penstock.models.convert.pretrained import read_config, rounded_weights
from penstock.models.model import Model
from penstock.parallel import ALONE, ParallelDims
from penstock.parallel.agree import add_up, slowest
from penstock.probe import resolve_device
from penstock.tasks import Preferences, Task, task_of
from penstock.tasks.class_counts import ClassCounts


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The task's metrics over a split, also available as attributes: `evaluation.top1`."""

    samples: int
    metrics: Mapping[str, float]
    counts: ClassCounts | None = field(default=None, compare=False)
    """Counts by class; not part of the record."""

    def __getattr__(self, name: str) -> float:
        if name not in Evaluation.__slots__ and name in self.metrics:
            return self.metrics[name]
        raise AttributeError(f"This evaluation has no {name!r}. It has samples, {', '.join(self.metrics)}.")

    def record(self) -> dict[str, Any]:
        """All numbers by name, as logged and stored."""
        return {"samples": self.samples, **self.metrics}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Evaluation:
        """Restore an evaluation from its `record`."""
        return cls(record["samples"], {name: value for name, value in record.items() if name != "samples"})


@torch.no_grad()
def evaluate(
    task: Task, model: nn.Module, batches: Iterable[Any], *, dims: ParallelDims = ALONE, rounds: int = 0,
    blank: tuple[Any, ...] | None = None,
) -> Evaluation:  # fmt: skip
    """Evaluate `model` in evaluation mode, and restore its mode afterwards.

    Draws no random numbers, so it does not influence training. Each rank of `dims` evaluates its own batches, and all
    get the result over all ranks. A sharded model must run on all ranks at the same time: a rank with fewer batches
    than `rounds` runs it on `blank`, arguments for one empty sample, and discards the outputs.
    """
    samples = batches_done = 0
    sums = torch.zeros(0, dtype=torch.float64)
    with evaluating(model):
        for batch in batches:
            own = task.assess(model, batch)
            sums = sums + own if batches_done else own
            batches_done += 1
            samples += len(batch)
        for _ in range(rounds - batches_done):
            assert blank is not None
            task.accompany(model, blank)
    # A rank without batches learns the number of sums from the other ranks.
    sums = F.pad(sums, (0, int(slowest(len(sums), dims)) - len(sums)))
    count = sums.new_tensor([samples])  # exact to 2^53
    device = next((tensor.device for tensor in blank or () if isinstance(tensor, Tensor)), sums.device)
    *sums_of_all, samples_of_all = add_up(torch.cat([sums, count]).to(device), dims).tolist()
    if not (samples := int(samples_of_all)):
        raise ValueError("There is nothing to evaluate: the split has no batches.")
    return Evaluation(samples, task.metrics(samples, sums_of_all), task.class_counts(sums_of_all))


_NUMBERED = re.compile(r"(LABEL_)?\d+")
"""Class names that are only numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderEvaluation:
    """Result of `evaluate_folder`."""

    weights: str
    """The folder or checkpoint that the weights were read from."""
    model: str
    data: str
    task: Task
    evaluation: Evaluation
    classes: tuple[str, ...]
    """Names of the classes; empty if they are unknown, or if there are no classes."""
    sample: str
    """A few lines that show the model's outputs for some samples; empty if the task has nothing to show."""
    seconds: float


def evaluate_folder(config: EvaluateConfig) -> FolderEvaluation:
    """Evaluate the model that `config` names, on one device and in fp32, with its quantised layers in their own
    arithmetic.

    Classes of the data are matched with the model's by name. Raises ConfigError if the data or the task do not fit the
    model, and the errors of opening them.
    """
    if config.model is None:
        raise ConfigError(
            "penstock evaluate needs a model: a run's folder, a checkpoint, a folder that transformers wrote, or a "
            "name on the hub."
        )
    device, started = resolve_device(config.device), time.perf_counter()
    with _weights_of(config.model) as (folder, weights):
        described = read_config(folder)
        task = task_of(described, config.task, init_from=str(folder))
        if isinstance(task, Preferences):
            task = _beside_reference(task, config, device)
        model = open_folder(folder, device)
        data = config.data if found_in(folder) is None else replace(config.data, tokenizer="auto")
        sources = [
            task.open(data, described, split)
            for split in (("train", "val") if config.split == "all" else (config.split,))
        ]
        if described.graph.classes is not None:
            for source in sources:
                _match_classes(source, folder)
        evaluation = evaluate_source(
            task, model, sources, batch=config.batch, device=device, workers=config.data.workers
        )
        with torch.no_grad():
            sample = task.sample(model, sources[-1], device)
    return FolderEvaluation(
        weights=weights, model=title(described), data=f"{sources[0].title} ({config.split})", task=task,
        evaluation=evaluation, classes=_classes_of(sources[0]), sample=sample, seconds=time.perf_counter() - started,
    )  # fmt: skip


def open_folder(folder: Path, device: torch.device) -> Model:
    """Open the model in a folder on the device, ready for evaluation."""
    setup = Setup(purpose=INFERENCE, device=device, rounded=rounded_weights(folder))
    return apply(from_pretrained(folder).eval(), setup)  # type: ignore[no-any-return]


def evaluate_source(
    task: Task, model: Model, sources: Sequence[Source], *, batch: int, device: torch.device, workers: int = 0
) -> Evaluation:
    """Evaluate an open model on all samples of several sources of one form. Raises ConfigError if a source does not fit
    the model."""
    with ExitStack() as loaders:
        passes = []
        for source in sources:
            if task.fit(model.config, source).graph != model.config.graph:
                raise ConfigError(
                    f"{source.name} does not fit the model, {title(model.config)}; name data of the same classes, or "
                    "another task with --task."
                )
            prepare = task.prepare(source, model.config)
            loader = Loader(source, prepare, batch=batch, device=device, endless=False, workers=workers)
            passes.append(loaders.enter_context(loader))
        return evaluate(task, model, itertools.chain.from_iterable(passes))


@contextmanager
def _weights_of(name: str) -> Iterator[tuple[Path, str]]:
    """A folder with the model that a name refers to, and a description. From a checkpoint the weights (the averages if
    there are any, as at the end of a run) are written to a folder that is removed afterwards."""
    path = Path(name)
    running = steps(path / "checkpoints") and not (path / "export" / "config.json").is_file()
    if not (running or steps(path) or (path / MANIFEST).is_file()):
        folder = local_weights(name)
        yield folder, str(folder)
        return
    checkpoint = rewrite.open_newest(path)
    which = "ema" if "ema" in rewrite.weight_sets(checkpoint) else "weights"
    with TemporaryDirectory(prefix="penstock-") as made:
        rewrite.export_model(checkpoint, Path(made), which)
        yield Path(made), f"{checkpoint.path}{' (EMA weights)' * (which == 'ema')}"


def _beside_reference(task: Preferences, config: EvaluateConfig, device: torch.device) -> Preferences:
    if config.reference is None:
        raise ConfigError(
            "The task preferences compares a model with the weights that its training began with; name them with "
            "--reference, or give the run's folder."
        )
    reference = from_pretrained(local_weights(config.reference)).to(device)
    return task.beside(reference, config.preference_beta)


def _classes_of(source: Source) -> tuple[str, ...]:
    return tuple(getattr(source, "classes", None) or ())


def _match_classes(source: Source, folder: Path) -> None:
    """Give the source's classes the numbers that they have in the model's folder, unless classes there have only
    numbers. Raises ConfigError if the source has other classes."""
    named = settings_in(folder).get("id2label") or {}
    names = tuple(str(named[key]) for key in sorted(named, key=int)) if isinstance(named, dict) else ()
    classes = _classes_of(source)
    if not isinstance(source, ImageSource | RowSource) or not classes or classes == names:
        return
    if all(map(_NUMBERED.fullmatch, names)):
        return
    if unknown := [name for name in classes if name not in names]:
        raise ConfigError(
            f"{source.name} has classes that the model does not name: {', '.join(map(quoted, unknown[:5]))}"
            f"{f' and {len(unknown) - 5} more' if len(unknown) > 5 else ''}. The model's are "
            f"{', '.join(names[:20])}{', …' * (len(names) > 20)}; rename the classes of the data."
        )
    numbers: NDArray[np.int64] = np.array([names.index(name) for name in classes])
    source.renumber(names, numbers)
