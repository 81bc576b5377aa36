"""What the ladder measures: a Penstock model on real data, or a user's own model with its own batch and loss.

A subject can be built under any Setting. For the same seed it starts from the same weights and takes the same samples
in the same order.
"""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn

from penstock.build import Built, build
from penstock.config.jobs import JOBS
from penstock.config.machine import Machine
from penstock.config.model import EncoderConfig, ModelConfig, ViTConfig, option_words, title
from penstock.config.plan import AttentionBackend, LossForm, Padding, Plan
from penstock.config.run import Recipe, TaskName
from penstock.containers import replaced
from penstock.data import Loader
from penstock.data.source import Source
from penstock.errors import ConfigError
from penstock.kernels.sdpa import Switch, Watch
from penstock.ladder.factory import Factory, drawn_anew, load_factory, made_by, path_of, samples_of
from penstock.ladder.rung import Setting, Situation
from penstock.ladder.settings import LadderConfig, data_words
from penstock.ladder.trace import trace
from penstock.models import create
from penstock.models.anatomy import anatomy_of, set_attention, set_loss, set_padding, set_token_order
from penstock.parallel import ParallelDims
from penstock.planner.describe import describe
from penstock.planner.operators import Workload
from penstock.tasks import Loss, task_of
from penstock.tasks.task import Fullness
from penstock.tasks.text import WordTask, tokenizer_of

BATCH = {"cpu": 8, "cuda": 64}
"""Samples per step of the baseline, where nobody says."""


BATCH_TOKENS = {"cpu": 1024, "cuda": 32768}
"""The same of text, in tokens."""


class Subject(ABC):
    """What is built, fed and measured."""

    title: str
    unit: str
    first: Setting
    """The baseline."""
    device: torch.device
    recipe: Recipe
    procs: int = 1
    """Processes that rungs of several may start."""
    rank: int = 0
    """Which of them this is."""
    path: str | None = None
    """The factory as `package.module:name`, where other processes can find it so."""
    splittable: bool = True
    """Whether its batch can be made larger."""
    data: str
    """Where its batches come from."""

    attention: tuple[str, ...] = get_args(AttentionBackend)
    """Attention backends that its model can be switched to."""
    token_orders: tuple[str, ...] = ("batch_first", "batch_second")
    """Orders of tokens that its model can be switched to."""
    losses: tuple[str, ...] = get_args(LossForm)
    """Forms of the loss over a vocabulary that its model can be switched to."""
    paddings: tuple[str, ...] = get_args(Padding)
    """What its model can do with padding."""
    padding_share = 0.0
    """How much of a batch's tokens is padding."""
    unpacked_padding: float | None = None
    """How much of them would be, with one document in each sample, where documents are packed."""
    groupable = False
    """Whether its samples differ in length and are taken in an order of chance."""

    def situation(self, machine: Machine) -> Situation:
        """What rungs may ask about."""
        return Situation(
            machine=machine,
            micro_batch=self.first.plan.micro_batch,
            splittable=self.splittable,
            attention=self.attention,
            token_orders=self.token_orders,
            losses=self.losses,
            paddings=self.paddings,
            padding_share=self.padding_share,
            groupable=self.groupable,
            procs=self.procs,
        )

    @abstractmethod
    def build(self, setting: Setting, seed: int) -> Built:
        """The model under a setting, from the weights that belong to the seed."""

    @abstractmethod
    def batches(self, setting: Setting, seed: int) -> Iterator[Any]:
        """Batches of `setting.plan.micro_batch` samples on the device, without end, in the seed's order."""

    @abstractmethod
    def workload(self, setting: Setting) -> Workload:
        """What one micro-batch makes the device do."""

    @abstractmethod
    def train_command(self, setting: Setting) -> str:
        """How to train with a setting."""

    def dims(self, plan: Plan) -> ParallelDims:
        """Where this process stands under a Plan."""
        return ParallelDims.of(plan, rank=self.rank if plan.gpus > 1 else 0)

    def samples(self, setting: Setting) -> int:
        """Samples of one optimizer step, over all processes."""
        return setting.plan.global_batch

    def model_flops(self, setting: Setting) -> int:
        """FLOPs of one optimizer step over all processes, forward and backward; what is computed twice counts once."""
        plan = setting.plan
        # A workload is of one device, with the blocks of all stages.
        return round(self.workload(setting).model_flops * plan.accumulate * plan.gpus / plan.pp)


class Configured(Subject):
    """A Penstock model, at its family's task on a data source."""

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
        self._full: dict[tuple[ModelConfig | None, int, bool], Fullness] = {}
        self._asked, self._data = config.task, config.data
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
        dims = self.dims(setting.plan)
        return iter(
            Loader(
                self._source_of(setting),
                self._task.prepare(self._source, setting.model, seed=seed),
                batch=setting.plan.micro_batch,
                seed=seed,
                device=self.device,
                rank=dims.data_rank,
                world=dims.data_world,
            )
        )

    def workload(self, setting: Setting) -> Workload:
        model, real, words = self._fullness(setting)
        return describe(model, setting.plan, self.device.type, real=real, words=words)

    def train_command(self, setting: Setting) -> str:
        assert setting.model is not None
        ranks = setting.plan.gpus
        verb = "penstock train" if ranks == 1 else f"penstock launch --procs {ranks} --"
        words = [verb, *option_words(setting.model), f'--plan "{setting.plan.line()}"']
        if self._asked != "auto":
            words.append(f"--task {self._asked}")
        words += data_words(self._data)
        if setting.by_length:
            words.append("--data.group_by_length true")
        return " ".join(words)

    def _fitted(self, model: ModelConfig) -> ModelConfig:
        """The model with what follows from the data, but with its own vocabulary if that has room for all tokens: its
        size is a great part of what a step costs. How many classes images have is no matter of speed.
        """
        if isinstance(model, ViTConfig):
            return model
        words = not isinstance(model, EncoderConfig) or model.head == "words"
        if isinstance(self._task, WordTask) and words and tokenizer_of(self._source).size <= model.vocabulary:
            return model
        fitted = self._task.fit(model, self._source)
        assert not isinstance(fitted, ViTConfig)
        return replace(fitted, vocabulary=max(model.vocabulary, fitted.vocabulary))

    def _source_of(self, setting: Setting) -> Source:
        return self._by_length if setting.by_length else self._source

    def _fullness(self, setting: Setting) -> Fullness:
        key = setting.model, setting.plan.micro_batch, setting.by_length
        if key not in self._full:
            assert setting.model is not None
            batch = setting.plan.micro_batch
            self._full[key] = self._task.fullness(self._source_of(setting), setting.model, batch)
        return self._full[key]

    def _start(self, seed: int) -> dict[str, Tensor]:
        """The baseline's first weights, which every rung starts from as far as its shapes allow."""
        if seed not in self._starts:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = create(self._model)
            self._starts[seed] = {name: value.detach().clone() for name, value in model.named_parameters()}
        return self._starts[seed]


class Own(Subject):
    """A model of the user's: what a factory returns. Its one batch is fed at every step; further micro-batches, and
    other ranks, get its samples drawn anew.
    """

    unit, data = "samples", "the factory's batch"

    def __init__(self, factory: Factory, name: str, config: LadderConfig, device: torch.device) -> None:
        self.title = name
        self.path = config.factory or path_of(factory)
        self.procs = config.procs
        self.device = device
        self.recipe = Recipe(lr=config.lr)
        self._factory = factory
        model, self._batch, self._loss = self._make(config.seed)
        self._samples = samples_of(self._batch)
        self.splittable = self._samples is not None
        self.first = Setting(model=None, plan=Plan(micro_batch=self._samples or 1))
        self.attention = self._attention_of(model)
        self.token_orders = tuple(
            name for name in self.token_orders if _accepts(set_token_order, model, name)
        )
        self.losses = tuple(name for name in self.losses if _accepts(set_loss, model, name))
        self.paddings = tuple(name for name in self.paddings if _accepts(set_padding, model, name))
        self._traces: dict[int, Workload] = {}

    def build(self, setting: Setting, seed: int) -> Built:
        model, _, loss = self._make(seed)
        return build(model, setting.plan, device=self.device, recipe=self.recipe, loss=loss, seed=seed)

    def batches(self, setting: Setting, seed: int) -> Iterator[Any]:
        plan = setting.plan
        batch, dims = self._enlarged(plan.micro_batch), self.dims(plan)
        places = range(dims.data_rank, plan.accumulate * dims.data_world, dims.data_world)
        return itertools.cycle([drawn_anew(batch, plan.micro_batch, place) for place in places])

    def workload(self, setting: Setting) -> Workload:
        """Traced once per batch size in fp32."""
        size = setting.plan.micro_batch
        if size not in self._traces:
            model, _, loss = self._make(0)
            blocks = _blocks_in(model)
            self._traces[size] = trace(model.to(self.device), self._enlarged(size), loss, size, units=blocks)
        return self._traces[size]

    def train_command(self, setting: Setting) -> str:
        plan = setting.plan.line()
        ranks = f", on each of {setting.plan.gpus} ranks" if setting.plan.gpus > 1 else ""
        return (
            f'penstock.build.build(model, penstock.Plan.parse("{plan}"), loss=loss)  '
            f"# model of {self.title}{ranks}"
        )

    def _make(self, seed: int) -> tuple[nn.Module, Any, Loss]:
        return made_by(self._factory, self.title, seed)

    def _attention_of(self, model: nn.Module) -> tuple[str, ...]:
        """The backends that the model can be switched to: none where it never calls torch's attention."""
        switch = Switch("sdpa")
        with torch.no_grad(), torch.random.fork_rng(devices=[]), Watch(switch):
            self._loss(model.to(self.device), self._enlarged(self.first.plan.micro_batch))
        if not switch.used:
            return ()
        return tuple(name for name in self.attention if _accepts(set_attention, model, name))

    def _enlarged(self, size: int) -> Any:
        """The example batch on the device, repeated to `size` samples."""
        times = size // (self._samples or 1)

        def move(leaf: Tensor) -> Tensor:
            leaf = leaf.to(self.device)
            grows = times > 1 and leaf.ndim > 0 and leaf.shape[0] == self._samples
            return torch.cat([leaf] * times) if grows else leaf

        return replaced(self._batch, move)


def _task_named(config: LadderConfig) -> TaskName:
    """The task that is asked for, or that of the nearest preset's job, as `train_command` will have it."""
    if config.task != "auto":
        return config.task
    preset, *_ = option_words(config.model)
    return cast(TaskName, JOBS.get(preset, {}).get("task", "auto"))


def _usual_batch(model: ModelConfig, device: torch.device) -> int:
    """Samples of the baseline where nobody says."""
    if isinstance(model, ViTConfig):
        return BATCH[device.type]
    return max(1, BATCH_TOKENS[device.type] // model.tokens)


def _blocks_in(model: nn.Module) -> int:
    """Repeated blocks, which are gathered one by one where weights are sharded; 1 where none are found."""
    try:
        return len(anatomy_of(model).blocks)
    except ConfigError:
        return 1


def subject_of(config: LadderConfig, factory: str | Factory | None, device: torch.device) -> Subject:
    """The subject of a configuration, or of a factory function that is given instead of its path."""
    if callable(factory):
        return Own(factory, getattr(factory, "__qualname__", "factory"), config, device)
    if config.factory is not None:
        return Own(load_factory(config.factory), config.factory, config, device)
    return Configured(config, device)


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
    # As a state dict: master weights and shards take what is theirs of it.
    model.load_state_dict(fitting, strict=False)


def _accepts(switch: Callable[[nn.Module, Any], None], model: nn.Module, value: str) -> bool:
    try:
        switch(model, value)
    except ConfigError:
        return False
    return True
