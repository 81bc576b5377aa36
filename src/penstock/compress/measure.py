"""Figures of a model's folder: measured size, latency, memory and metrics, and predicted latency."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.apply import INFERENCE, Setup, apply
from penstock.compress.quantise import candidates
from penstock.config.compress import CompressConfig
from penstock.config.formats import Products
from penstock.config.machine import Machine
from penstock.config.model import ModelConfig
from penstock.config.plan import AttentionBackend, Plan
from penstock.config.run import DataConfig, RunConfig
from penstock.data import Loader
from penstock.data.text.open import found_in
from penstock.errors import ConfigError
from penstock.export.export import inputs_of
from penstock.ladder.trace import TensorMemory
from penstock.models import create
from penstock.models.convert.pretrained import read_config, rounded_weights
from penstock.models.model import Model
from penstock.planner.describe import totals
from penstock.planner.prediction import predict_pass, predict_pass_bytes
from penstock.planner.terms import assumption, basis_of
from penstock.probe import resolve_device
from penstock.products.rounded import stored_tensors
from penstock.tasks import Task, task_of
from penstock.train.evaluate import evaluate_source, open_folder
from penstock.train.prepare import machine_of

ROUNDS, ROUND_SECONDS = 15, 0.06
"""Rounds in which models take turns, and the least seconds of a model's turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderFigures:
    """Measurements of a model's folder."""

    parameters: int
    bytes: int
    """Size of its weight files."""
    flops: float
    """Floating-point operations of a pass over `batch` samples."""
    memory_bytes: int
    """Peak of tensors in that pass, including weights."""
    predicted_memory_bytes: float
    """The same, predicted by the planner."""
    predicted_seconds: float | None
    """Latency of that pass, predicted by the planner; None if the machine has no rate for a quantised model."""
    assumption: str
    """A sentence on the rate that the prediction uses instead of one that the machine lacks; "" if not needed."""
    metrics: dict[str, float]
    """The task's metrics on the validation data."""
    words: str
    """The metrics for people."""


class Workbench:
    """The data, task and device with which all models of one compression are measured."""

    def __init__(self, config: CompressConfig, folder: Path) -> None:
        """`folder` holds the model to compress. Raises ConfigError and DataError if its task cannot be measured."""
        self.config = config
        self.device = resolve_device(config.device)
        self.model = read_config(folder)
        self.task, self.data = self.task_for(folder)
        if len(self.model.graph.heads) != 1:
            raise ConfigError(
                "Models with several heads, or none, cannot be compressed; use one with one head."
            )

    def task_for(self, folder: Path) -> tuple[Task, DataConfig]:
        """The task of the model in a folder, and the data, to be read with the folder's tokenizer."""
        task = task_of(read_config(folder), self.config.task, init_from=str(folder))
        data = self.config.data
        return task, data if found_in(folder) is None else replace(data, tokenizer="auto")

    @cached_property
    def machine(self) -> Machine:
        """The machine on which latency is predicted."""
        return machine_of(RunConfig(machine=self.config.machine), self.device)

    def batches(self, samples: int) -> list[Any]:
        """At least `samples` samples of the training data, shuffled, as batches for evaluation."""
        size = min(samples, self.config.plan.micro_batch)
        source = self.task.open(self.data, self.model, "train")
        prepare = self.task.prepare(source, self.task.fit(self.model, source))
        with Loader(source, prepare, batch=size, seed=self.config.seed, device=self.device) as loader:
            return [next(loader) for _ in range(-(-samples // size))]

    def open(self, folder: Path) -> Model:
        """Open the model in a folder, ready for inference."""
        return open_folder(folder, self.device)

    def figures(self, folder: Path) -> FolderFigures:
        """Everything but the latency, which `latencies` measures for several models in turn."""
        model = self.open(folder)
        task, data = self.task_for(folder)
        source = task.open(data, model.config, "val")
        evaluation = evaluate_source(
            task, model, [source], batch=self.config.plan.micro_batch, device=self.device
        )
        inputs = self._inputs(model)
        held = [*model.state_dict().values(), *stored_tensors(model)]
        with torch.inference_mode(), TensorMemory(held=held, ignored=list(inputs.values())) as memory:
            model(**inputs)
        work, (predicted, assumed) = totals(model.config), self.forecast(folder, model.config)
        return FolderFigures(
            parameters=sum(p.numel() for p in create(model.config, device="meta").parameters()),
            bytes=sum(file.stat().st_size for file in folder.glob("*.safetensors")),
            flops=self.config.batch * work.model_flops / 3, memory_bytes=memory.peak,
            predicted_memory_bytes=self.predicted_bytes(folder, model.config),
            predicted_seconds=predicted, assumption=assumed,
            metrics=dict(evaluation.metrics), words=task.describe(evaluation.metrics),
        )  # fmt: skip

    def forecast(self, folder: Path, model: ModelConfig) -> tuple[float | None, str]:
        """Predicted seconds of a pass of a folder's model (None if the machine has no rate for its layers), and the
        assumption. If some layers were not rounded, time is split by numbers of weights."""
        rounded, plain = rounded_weights(folder), self.predicted(model)
        if not rounded:
            return plain, ""
        form = next(form for form, _ in rounded.values())
        if basis_of(self.machine, form) == "plain":
            return None, ""
        linears, _ = candidates(create(model, device="meta"), form)
        stored = sum(weight.numbers.numel() for _, weight in rounded.values())
        share = stored / sum(linear.weight.numel() for linear in linears.values())
        return share * self.predicted(model, form) + (1 - share) * plain, assumption(self.machine, form)

    def predicted(self, model: ModelConfig, weights: Products = "plain") -> float:
        """Predicted seconds of a pass, with `weights` in the linear layers of blocks."""
        return predict_pass(model, self.machine, self._plan(), weights=weights)

    def predicted_bytes(self, folder: Path, model: ModelConfig) -> float:
        """Predicted bytes of tensors in a pass of a folder's model."""
        rounded = rounded_weights(folder)
        few = sum(weight.numbers.numel() for _, weight in rounded.values())
        stored = [part for name, (_, weight) in rounded.items() for part in weight.stored(name).values()]
        parameters, other_bytes = predict_pass_bytes(model, self.machine, self._plan())
        return 4.0 * (parameters - few) + sum(part.nbytes for part in stored) + other_bytes

    def _plan(self) -> Plan:
        attention: AttentionBackend = "auto" if self.device.type == "cpu" else "sdpa"
        return Plan(micro_batch=self.config.batch, attention=attention)

    def latencies(self, models: Sequence[Model]) -> list[list[float]]:
        """Measured seconds of a pass of each model, by round: the fastest tenth of its passes in that round, because
        other processes can only lengthen them. Models take turns. The fp32 layers of a quantised model are laid out for
        the processor, as in inference; other models multiply as torch does."""
        for model in models:
            if stored_tensors(model):
                setup = Setup(purpose=INFERENCE, device=self.device, weights="auto")
                apply(model, setup, "store")
        passes = [(model, self._inputs(model)) for model in models]
        seconds: list[list[float]] = [[] for _ in passes]
        with torch.inference_mode():
            for model, inputs in passes:
                model(**inputs)
            for _ in range(ROUNDS):
                for (model, inputs), rounds in zip(passes, seconds, strict=True):
                    begun, times = time.perf_counter(), list[float]()
                    while (started := time.perf_counter()) - begun < ROUND_SECONDS or not times:
                        model(**inputs)
                        if self.device.type == "cuda":
                            torch.cuda.synchronize()
                        times.append(time.perf_counter() - started)
                    rounds.append(sorted(times)[len(times) // 10])
        return seconds

    def drawn(self, model: ModelConfig) -> Model:
        """A model of these sizes with random weights, whose latency does not depend on them."""
        with torch.random.fork_rng(devices=[]):
            drawn = create(model).eval()
        # With the attention that inference uses on the device.
        setup = Setup(purpose=INFERENCE, device=self.device)
        return apply(drawn, setup, "device", "switches")  # type: ignore[no-any-return]

    def _inputs(self, model: Model) -> dict[str, Tensor]:
        lengths, samples = model.graph.lengths, self.config.batch
        inputs = inputs_of(model, samples, lengths[0], lengths[-1])
        inputs.pop("lengths", None)  # texts without padding
        if model.graph.routed:  # all tokens to one expert, as in a decoding step
            inputs["routes"] = torch.zeros(samples, dtype=torch.int64)
        return {name: value.to(self.device) for name, value in inputs.items()}
