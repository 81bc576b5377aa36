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
from penstock.config.model import ModelConfig, title
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
    totals: Tensor | None = None
    with evaluating(model):
        for batch in batches:
            batches_done += 1
            sums = task.assess(model, batch)
            totals = sums if totals is None else totals + sums
            samples += len(batch)
        for _ in range(rounds - batches_done):
            assert blank is not None
            task.accompany(model, blank)
    own_sums = torch.zeros(0, dtype=torch.float64) if totals is None else totals
    # A rank without batches learns the number of sums from the other ranks.
    own_sums = F.pad(own_sums, (0, int(slowest(len(own_sums), dims)) - len(own_sums)))
    count = own_sums.new_tensor([samples])  # exact to 2^53
    device = next((tensor.device for tensor in blank or () if isinstance(tensor, Tensor)), own_sums.device)
    *sums_of_all, samples_of_all = add_up(torch.cat([own_sums, count]).to(device), dims).tolist()
    samples = int(samples_of_all)
    if not samples:
        raise ValueError("There is nothing to evaluate: the split has no batches.")
    return Evaluation(samples, task.metrics(samples, sums_of_all), task.class_counts(sums_of_all))


_NUMBERED = re.compile(r"(LABEL_)?\d+")
"""Names of classes that have only numbers."""


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
    model, and whatever opening these raises.
    """
    if config.model is None:
        raise ConfigError(
            "penstock evaluate needs a model: a run's folder, a checkpoint, one that transformers wrote, or a name on "
            "the hub."
        )
    device, started = resolve_device(config.device), time.perf_counter()
    with _weights_of(config.model) as (folder, weights):
        described = read_config(folder)
        task = task_of(described, config.task, init_from=str(folder))
        if isinstance(task, Preferences):
            task = _beside_reference(task, config, device)
        model = open_folder(folder, device)
        names = _names_in(folder)
        data = config.data if found_in(folder) is None else replace(config.data, tokenizer="auto")
        sources = [
            _matched(task.open(data, described, split), described, names)
            for split in (("train", "val") if config.split == "all" else (config.split,))
        ]
        evaluation = evaluate_source(
            task, model, sources, batch=config.batch, device=device, workers=config.data.workers
        )
        with torch.no_grad():
            sample = task.sample(model, sources[-1], device)
    return FolderEvaluation(
        weights=weights, model=title(described), data=f"{sources[0].title} ({config.split})", task=task,
        evaluation=evaluation, classes=tuple(getattr(sources[0], "classes", None) or ()), sample=sample,
        seconds=time.perf_counter() - started,
    )  # fmt: skip


def open_folder(folder: Path, device: torch.device) -> Model:
    """Open the model in a folder on the device, ready for evaluation."""
    setup = Setup(purpose=INFERENCE, device=device, rounded=rounded_weights(folder))
    return apply(from_pretrained(folder).eval(), setup)  # type: ignore[no-any-return]


def evaluate_source(
    task: Task, model: Model, sources: Sequence[Source], *, batch: int, device: torch.device, workers: int = 0
) -> Evaluation:
    """Evaluate an open model on all samples of sources of one form. Raises ConfigError if the task does not fit."""
    with ExitStack() as loaders:
        passes = []
        for source in sources:
            if task.fit(model.config, source).graph != model.config.graph:
                raise ConfigError(
                    f"{source.name} does not fit the model, {title(model.config)}; name data of the same classes, or "
                    "another task with --task."
                )
            prepare = task.prepare(source, model.config)
            passes.append(
                loaders.enter_context(
                    Loader(source, prepare, batch=batch, device=device, endless=False, workers=workers)
                )
            )
        return evaluate(task, model, itertools.chain.from_iterable(passes))


@contextmanager
def _weights_of(name: str) -> Iterator[tuple[Path, str]]:
    """A folder with the model that a name refers to, and a description. Weights of a checkpoint, the moving average if
    there is one (as at the end of a run), are written to a folder that is removed afterwards."""
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


def _names_in(folder: Path) -> tuple[str, ...]:
    """Names of the classes in a folder's configuration; empty if there are none or only numbers."""
    named = settings_in(folder).get("id2label") or {}
    names = tuple(str(named[key]) for key in sorted(named, key=int)) if isinstance(named, dict) else ()
    return () if all(map(_NUMBERED.fullmatch, names)) else names


def _matched(source: Source, model: ModelConfig, names: tuple[str, ...]) -> Source:
    """The source with class numbers of the model. Raises ConfigError if it has classes that the model does not have."""
    classes: tuple[str, ...] = getattr(source, "classes", None) or ()
    head = model.graph.classes
    if head is None or not classes or not isinstance(source, ImageSource | RowSource):
        return source
    if not names or classes == names:
        return source
    unknown = [name for name in classes if name not in names]
    if unknown:
        raise ConfigError(
            f"{source.name} has classes that the model does not name: {', '.join(map(quoted, unknown[:5]))}"
            f"{f' and {len(unknown) - 5} more' if len(unknown) > 5 else ''}. The model's are "
            f"{', '.join(names[:20])}{', …' * (len(names) > 20)}; rename the classes of the data."
        )
    numbers: NDArray[np.int64] = np.array([names.index(name) for name in classes])
    source.renumber(names, numbers)
    return source
