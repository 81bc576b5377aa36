"""The subject of the ladder: a Penstock model on real data, or a user's own model with its own batch and loss.

A subject can be built under any Setting. The same seed gives the same weights and the same order of samples.
"""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from penstock.build import Built, build
from penstock.config.machine import Machine
from penstock.config.model import ModelConfig, option_words, title, vocabulary_of
from penstock.config.plan import Plan
from penstock.config.recipes import JOBS, plan_option
from penstock.config.run import Recipe
from penstock.config.tasks import TaskName
from penstock.cpu import kind_of, this_cpu
from penstock.data import Loader
from penstock.data.source import Source
from penstock.ladder.rung import ALL_SWITCHES, Setting, Situation
from penstock.ladder.settings import LadderConfig, data_words
from penstock.models import create
from penstock.models.draw import seeded
from penstock.parallel import ParallelDims
from penstock.planner.describe import describe
from penstock.planner.operators import Workload
from penstock.planner.prediction import predict_workload
from penstock.tasks import task_of
from penstock.tasks.task import Fullness
from penstock.tasks.text import WordTask, tokenizer_of

BATCH = {"cpu": 8, "cuda": 64}
"""Default samples per step of the baseline."""
BATCH_TOKENS = {"cpu": 1024, "cuda": 32768}
"""Default tokens per step of a baseline that reads text."""
LOOKED_AT = 32
"""Number of batches among which a typical one is chosen."""


class Subject(ABC):
    """A model to build, feed and measure."""

    title: str
    unit: str
    first: Setting
    """The baseline."""
    device: torch.device
    recipe: Recipe
    rank: int = 0
    """Rank of this process, for rungs with several processes."""
    path: str | None = None
    """The factory as `package.module:name`, if other processes can import it."""
    data: str
    """Description of where its batches come from."""

    # Facts that rungs may depend on: see `Situation`.
    procs: int = 1
    splittable: bool = True
    switches: Mapping[str, tuple[str, ...]] = ALL_SWITCHES
    padding_share = 0.0
    groupable = False
    packable = False
    unpacked_padding: float | None = None

    def situation(self, machine: Machine) -> Situation:
        """The facts that rungs may depend on."""

        def holds(setting: Setting) -> bool:
            return predict_workload(self.workload(setting), machine, setting.plan).fits

        return Situation(
            machine=machine, micro_batch=self.first.plan.micro_batch, holds=holds, procs=self.procs,
            splittable=self.splittable, switches=self.switches, padding_share=self.padding_share,
            groupable=self.groupable, packable=self.packable, unpacked_padding=self.unpacked_padding,
        )  # fmt: skip

    @abstractmethod
    def build(self, setting: Setting, seed: int) -> Built:
        """Build the model under a setting, with the weights of the seed."""

    @abstractmethod
    def batches(self, setting: Setting, seed: int) -> Iterator[Any]:
        """Endless batches of `setting.plan.micro_batch` samples on the device, in the seed's order."""

    def size_of(self, setting: Setting) -> Callable[[Any], tuple[int, int]] | None:
        """A function that measures the size of a batch, if batches differ in size; else None."""
        return None

    def typical(self, setting: Setting, seed: int) -> list[Any]:
        """The micro-batches of the one step that is timed repeatedly: the first ones or, if batches differ in size, the
        ones among the first 32 that are nearest to the mean size, on which predictions are based too."""
        size, count = self.size_of(setting), setting.plan.accumulate
        batches = self.batches(setting, seed)
        try:
            looked_at = list(itertools.islice(batches, count if size is None else max(count, LOOKED_AT)))
        finally:
            close(batches)
        if size is None:
            return looked_at
        sizes = torch.tensor([size(batch) for batch in looked_at], dtype=torch.float64)
        distances = (sizes / sizes.mean(dim=0) - 1).abs().sum(dim=1)
        return [looked_at[i] for i in sorted(distances.argsort(stable=True)[:count].tolist())]

    @abstractmethod
    def workload(self, setting: Setting) -> Workload:
        """The work of one micro-batch on the device."""

    @abstractmethod
    def train_command(self, setting: Setting) -> str:
        """The command, or the Python call, that trains with a setting."""

    def dims(self, plan: Plan) -> ParallelDims:
        """This process's coordinates under a Plan."""
        return ParallelDims.of(plan, rank=self.rank if plan.gpus > 1 else 0)

    def worth(self, setting: Setting) -> float:
        """Number of baseline samples that one sample of a setting is worth."""
        return 1.0

    def samples(self, setting: Setting) -> float:
        """Samples of one optimizer step over all processes, counted in samples of the baseline."""
        return setting.plan.global_batch * self.worth(setting)

    def model_flops(self, setting: Setting) -> int:
        """FLOPs of one optimizer step over all processes, forward and backward; recomputation is not counted."""
        plan = setting.plan
        # A workload describes one device, with the blocks of all stages.
        return round(self.workload(setting).model_flops * plan.accumulate * plan.gpus / plan.pp)


class Configured(Subject):
    """A Penstock model, on its task and a data source."""

    def __init__(self, config: LadderConfig, device: torch.device) -> None:
        self.title = title(config.model)
        self.device = device
        self.procs = config.procs
        self.recipe = Recipe(lr=config.lr)
        self._task = task_of(config.model, _task_named(config))
        self._source = self._task.open(config.data, config.model, "train")
        self._model = self._fitted(config.model)
        batch = config.batch if config.batch is not None else _usual_batch(self._model, device)
        self.first = Setting(model=self._model, plan=Plan(micro_batch=batch))
        self.unit = self._task.unit
        self.data = self._source.title
        self._full: dict[tuple[ModelConfig | None, int, bool, bool], Fullness] = {}
        self._task_name, self._data = config.task, config.data
        self.packable = not getattr(self._source, "packed", True)
        self._packed = replace(config.data, packed=True)
        self.groupable = self._source.lengths is not None and not self._source.group_by_length
        self._by_length = copy.copy(self._source)
        self._by_length.group_by_length = self.groupable
        self.padding_share = 1.0 - self._fullness(self.first).real
        self.unpacked_padding = self._source.unpacked_padding
        self._starts: dict[int, dict[str, Tensor]] = {}

    def build(self, setting: Setting, seed: int) -> Built:
        assert setting.model is not None
        built = build(
            setting.model, setting.plan, device=self.device, recipe=self.recipe, loss=self._task, seed=seed
        )
        if setting.model != self._model:
            _adopt(built.model, self._start(seed))
        return built

    def batches(self, setting: Setting, seed: int) -> Iterator[Any]:
        assert setting.model is not None
        source, dims = self._source_of(setting), self.dims(setting.plan)
        prepare = self._task.prepare(source, setting.model, seed=seed)
        loader = Loader(
            source, prepare, batch=setting.plan.micro_batch, seed=seed, device=self.device, rank=dims.data_rank,
            world=dims.data_world,
        )  # fmt: skip
        return iter(loader)

    def size_of(self, setting: Setting) -> Callable[[Any], tuple[int, int]] | None:
        """Tokens of a batch with and without padding, if samples differ in length."""
        if self._source_of(setting).lengths is None:
            return None
        return lambda batch: (self._task.inputs(batch)[0].numel(), self._task.tokens(batch))

    def workload(self, setting: Setting) -> Workload:
        model, real, words = self._fullness(setting)
        return describe(
            model, setting.plan, self.device.type, avx512=this_cpu().avx512, kind=kind_of(self.device.type),
            real=real, words=words,
        )  # fmt: skip

    def train_command(self, setting: Setting) -> str:
        assert setting.model is not None
        ranks = setting.plan.gpus
        verb = "penstock train" if ranks == 1 else f"penstock launch --procs {ranks} --"
        words = [verb, *option_words(setting.model), plan_option(setting.model, setting.plan)]
        if self._task_name != "auto":
            words.append(f"--task {self._task_name}")
        words += data_words(self._packed if setting.packed else self._data)
        if setting.by_length:
            words.append("--data.group_by_length true")
        return " ".join(words)

    def _fitted(self, model: ModelConfig) -> ModelConfig:
        """The model adapted to the data, but with its own vocabulary if that is large enough for all tokens, because
        its size is a large part of a step's cost. The number of image classes does not matter for speed.
        """
        if model.graph.vision:
            return model
        words = model.graph.words
        size = 0 if words is None else words.vocabulary
        if isinstance(self._task, WordTask) and tokenizer_of(self._source).size <= size:
            return model
        fitted: Any = self._task.fit(model, self._source)
        kept: ModelConfig = replace(fitted, vocabulary=max(vocabulary_of(model), fitted.vocabulary))
        return kept

    def worth(self, setting: Setting) -> float:
        """Number of baseline samples that one sample is worth, by real tokens if documents are packed."""
        if not setting.packed:
            return 1.0
        each = [f.model.graph.lengths[0] * f.real for f in map(self._fullness, (setting, self.first))]
        return each[0] / each[1]

    def _source_of(self, setting: Setting) -> Source:
        if setting.packed:
            return self._with_packing
        return self._by_length if setting.by_length else self._source

    @cached_property
    def _with_packing(self) -> Source:
        return self._task.open(self._packed, self._model, "train")

    def _fullness(self, setting: Setting) -> Fullness:
        key = setting.model, setting.plan.micro_batch, setting.by_length, setting.packed
        if key not in self._full:
            assert setting.model is not None
            batch = setting.plan.micro_batch
            self._full[key] = self._task.fullness(self._source_of(setting), setting.model, batch)
        return self._full[key]

    def _start(self, seed: int) -> dict[str, Tensor]:
        """The baseline's initial weights; every rung starts from them as far as its shapes match."""
        if seed not in self._starts:
            with seeded(seed):
                model = create(self._model)
            self._starts[seed] = {name: value.detach().clone() for name, value in model.named_parameters()}
        return self._starts[seed]


def close(batches: Any) -> None:
    """Close batches, if they hold threads."""
    closing = getattr(batches, "close", None)
    if closing is not None:
        closing()


def _task_named(config: LadderConfig) -> TaskName:
    """The requested task, or the task of the nearest preset's job, which `train_command` uses too."""
    if config.task != "auto":
        return config.task
    preset, *_ = option_words(config.model)
    return cast(TaskName, JOBS.get(preset, {}).get("task", "auto"))


def _usual_batch(model: ModelConfig, device: torch.device) -> int:
    """Default samples per step of the baseline."""
    if model.graph.vision:
        return BATCH[device.type]
    return max(1, BATCH_TOKENS[device.type] // model.graph.lengths[0])


def _adopt(model: nn.Module, start: dict[str, Tensor]) -> None:
    """Load weights of the same name and shape; a table of positions may have lost its first row, the class token's."""
    fitting = {}
    for name, parameter in model.named_parameters():
        value = start.get(name)
        if value is None:
            continue
        if value.shape[1:] == parameter.shape[1:] and value.shape[0] == parameter.shape[0] + 1:
            value = value[1:]
        if value.shape == parameter.shape:
            fitting[name] = value
    # Via a state dict, from which master weights and shards take their parts.
    model.load_state_dict(fitting, strict=False)
