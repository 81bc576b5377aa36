"""Decisions before a run builds anything: the number of ranks, the machine, the files of exports other than weights,
and the steps at which the run evaluates, saves and logs."""

from __future__ import annotations

import json
import logging
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from penstock.boundary.files import own_file, write_text
from penstock.boundary.hub import local_weights
from penstock.checkpoint.rewrite import folder_beside
from penstock.config.formats import PRODUCTS
from penstock.config.load import dump_toml
from penstock.config.machine import Machine, load_machine
from penstock.config.model import ModelConfig, vocabulary_of
from penstock.config.recipes import require_alike
from penstock.config.run import EPOCHS, Augment, RunConfig
from penstock.data import Source
from penstock.data.text.open import found_in
from penstock.disk import write_file
from penstock.errors import ConfigError, EnvironmentProblem
from penstock.launch import ELASTIC
from penstock.models import create
from penstock.models.convert.files import described
from penstock.models.convert.load import require_fitting
from penstock.models.convert.pretrained import read_config
from penstock.models.convert.upcycle import Upcycling
from penstock.models.lora import add_adapters, gives_classes
from penstock.models.rounded import rounded_in
from penstock.optim.groups import freeze
from penstock.parallel import fit_to_ranks, launched
from penstock.planner.learning import WHOLE, Learning
from penstock.probe import machine_for
from penstock.tasks import Task

_log = logging.getLogger(__name__)


def fit_to_started_ranks(config: RunConfig) -> RunConfig:
    """`config` with its Plan adapted to the number of started ranks, if the launcher may change that number. Ranks are
    replicas if the Plan is for one. The global batch stays the same; raises ConfigError, with the numbers of ranks that
    divide it, if this number does not."""
    if ELASTIC not in os.environ or config.plan.gpus == launched():
        return config
    plan = fit_to_ranks(config.plan, launched())
    fitted = f"plan.dp={plan.dp}, micro_batch={plan.micro_batch}, accumulate={plan.accumulate}"
    if config.plan.gpus == 1:
        replicas = "%d ranks train replicas with the same global batch of %d: %s."
        _log.info(replicas, launched(), plan.global_batch, fitted)
    else:
        _log.warning("%d ranks are there instead of %d: %s.", launched(), config.plan.gpus, fitted)
    return replace(config, plan=plan)


def with_teachers_vocabulary(config: RunConfig) -> RunConfig:
    """`config` with its teacher's vocabulary size, for a student that starts without weights."""
    if config.recipe.teacher is None or config.init_from is not None:
        return config
    vocabulary = vocabulary_of(read_config(local_weights(config.recipe.teacher)))
    if not vocabulary or not (has := vocabulary_of(config.model)) or has == vocabulary:
        return config
    _log.warning("model.vocabulary is set to %d, the teacher's.", vocabulary)
    model: Any = config.model
    return replace(config, model=replace(model, vocabulary=vocabulary))


def require_teacher(config: RunConfig, source: Source) -> None:
    """Raise ConfigError, before anything is built or measured, if the run's teacher is missing, would be overwritten by
    the run, or differs from the student in its inputs or classes.
    """
    if config.task == "preferences" and config.init_from is not None:
        _require_outside_output("init_from", config.init_from, config)
    name = config.recipe.teacher
    if name is None:
        return
    folder = _require_outside_output("recipe.teacher", name, config)
    require_alike(read_config(folder), config.model, name)
    tokenizer: Any = getattr(source, "tokenizer", None)
    of_teacher = None if tokenizer is None else found_in(folder)
    if of_teacher is not None and of_teacher.words() != tokenizer.words():
        raise ConfigError(
            f"recipe.teacher {name} has the tokenizer {of_teacher.name}, and this run {tokenizer.name}; the numbers "
            "of their words differ. Set data.tokenizer to the teacher's folder, or leave it out."
        )


def require_calibrated(config: RunConfig) -> None:
    """Raise ConfigError if the Plan learns clips of inputs, and the initial weights have no initial values for them."""
    if not PRODUCTS[config.plan.products].clips:
        return
    weights, missing = {}, "init_from is not set"
    if config.init_from is not None:
        weights = rounded_in(described(local_weights(config.init_from)))
        missing = f"init_from {config.init_from} has no scales of inputs"
    if not any(weight.input_scale is not None for weight in weights.values()):
        raise ConfigError(
            f"plan.products={config.plan.products} learns where inputs are clipped, and starts from a calibrated "
            f"model, but {missing}; calibrate a trained model with penstock compress MODEL --quantise int8 "
            "--quantise.inputs static, and start --from the result."
        )


def _require_outside_output(setting: str, name: str, config: RunConfig) -> Path:
    """Folder of weights that a run reads until its end. Raises ConfigError if the run would overwrite it."""
    folder = local_weights(name)
    if Path(config.output).resolve() in (folder.resolve(), *folder.resolve().parents):
        raise ConfigError(
            f"{setting} is {name}, in the output folder of this run, which will overwrite it; choose another --output."
        )
    return folder


def learning_of(config: RunConfig) -> Learning:
    """Which part of the run's model learns, if parts are frozen or only adapters learn."""
    recipe = config.recipe
    if not recipe.lora.rank and not recipe.freeze:
        return WHOLE
    model = create(config.model, device="meta")
    if recipe.lora.rank:
        with torch.random.fork_rng(devices=[]):
            add_adapters(model, recipe.lora)
    freeze(model, recipe.freeze)
    every = list(model.parameters())
    learn = [parameter for parameter in every if parameter.requires_grad]
    return Learning(
        parameters=sum(p.numel() for p in learn) / sum(p.numel() for p in every),
        tensors=len(learn) / len(every), lora=recipe.lora, classes=bool(recipe.lora.rank) and gives_classes(model),
    )  # fmt: skip


def machine_of(config: RunConfig, device: torch.device) -> Machine:
    """The machine that `config` names; else the known or quickly measured values of `device`.

    Raises ConfigError if a GPU is named for a run on a CPU, or vice versa.
    """
    if config.machine is None:
        return machine_for(device)
    machine = load_machine(config.machine)
    if machine.device != device.type:
        raise ConfigError(
            f"machine {config.machine} is a {machine.device} machine, but the run is on {device}. "
            f"Name one of its kind, or leave machine out."
        )
    return machine


def require_start(config: RunConfig) -> None:
    """Raise ConfigError for a new run whose initial weights do not fit the model, or lack the clips to start with."""
    require_calibrated(config)
    if config.init_from:
        model, weights = create(config.model, device="meta"), local_weights(config.init_from)
        require_fitting(model, weights, new_head=True, upcycling=Upcycling())


def report_unused(config: RunConfig, task: Task) -> None:
    """Warn about augmentations that the recipe sets and the task does not support."""
    for name, default in asdict(Augment()).items():
        if getattr(config.recipe.augment, name) != default and name not in task.augments:
            _log.warning("recipe.augment.%s changes nothing: this task does not support it.", name)


def link_latest(output: Path) -> None:
    """Let `runs/latest` be a link to the newest run in `runs`, unless a file or folder has that name."""
    output = output.absolute()
    link, name = output.with_name("latest"), output.name
    if output.parent.name != "runs" or name == link.name or (link.exists() and not link.is_symlink()):
        return
    link.unlink(missing_ok=True)
    link.symlink_to(name, target_is_directory=True)


def prepare_folder(output: Path, config: RunConfig, source: Source) -> None:
    """Write the files that a run's folder has before the first step."""
    write_text(own_file(output, "run.toml"), dump_toml(config))
    link_latest(output)
    tokenizer = getattr(source, "tokenizer", None) is not None
    write_beside(config.model, source, own_file(output, folder_beside(output, tokenizer).name))


def write_beside(model: ModelConfig, source: Source, folder: Path) -> None:
    """Write the files of an export other than its weights: a text model's tokenizer, and a config.json with the numbers
    of special tokens, the names of classes, the labels that select experts, and the captions' languages, if any."""
    tokenizer: Any = getattr(source, "tokenizer", None)
    classes, graph = getattr(source, "classes", None) or (), model.graph
    values: dict[str, Any] = {}
    if tokenizer is not None:
        ends = [*dict.fromkeys([tokenizer.end, *getattr(source, "ends", ())])]
        ends = [number for number in ends if number is not None]
        numbers = {
            "pad_token_id": tokenizer.pad, "bos_token_id": tokenizer.begin,
            "eos_token_id": ends if len(ends) > 1 else tokenizer.end,
            "decoder_start_token_id": tokenizer.start if graph.remembered else None,
        }  # fmt: skip
        values |= {name: number for name, number in numbers.items() if number is not None}
    owner = graph.classes or graph.condition
    if classes and owner is not None and owner.classes == len(classes):
        values["id2label"] = {str(number): str(name) for number, name in enumerate(classes)}
        values["label2id"] = {str(name): number for number, name in enumerate(classes)}
    if graph.routed and source.label_names:
        values |= {"labels": list(source.label_names), "labels_in_prompts": source.labels_in_prompts}
    if white := getattr(source, "white", None):
        values["image_range"] = white
    if languages := getattr(source, "languages", ()):
        values["languages"] = list(languages)
    shutil.rmtree(folder, ignore_errors=True)
    if not values:
        return
    folder.mkdir(parents=True)
    if tokenizer is not None:
        try:
            tokenizer.save(folder, getattr(model, "vocabulary", 0))
        except EnvironmentProblem as problem:
            _log.warning("Exports of this run will have no tokenizer. %s", problem)
    write_file(folder / "config.json", [json.dumps(values).encode()])


class Calendar:
    """The calendar of a run over `samples` training samples. Steps are counted from 1: after step `n`, `n` optimizer
    steps have been done. Raises ConfigError if the run would have no steps."""

    def __init__(self, config: RunConfig, samples: int) -> None:
        recipe = config.recipe
        self.samples = samples
        """Number of training samples in one epoch."""
        self.batch = config.plan.global_batch
        """Number of samples in one optimizer step, over all ranks."""
        self.total = recipe.total_steps(samples, self.batch)
        self._config = config
        if self.total < 1:
            raise ConfigError(
                f"The run has no steps: recipe.epochs {recipe.epochs or EPOCHS:g} of {samples} samples at "
                f"{self.batch} a step. Raise recipe.epochs, set recipe.steps, or lower plan.micro_batch or "
                "plan.accumulate."
            )

    def epoch(self, step: int) -> float:
        """Number of epochs done after `step`, also in parts."""
        return step * self.batch / self.samples

    def evaluates(self, step: int) -> bool:
        """Whether `step` completes a multiple of `eval_every_epochs`, or the run."""
        return step == self.total or self._completes(step, self._config.recipe.eval_every_epochs)

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is saved after `step`."""
        if step == self.total:
            return True
        if self._config.checkpoint_every:
            return step % self._config.checkpoint_every == 0
        return self._completes(step, 1.0)

    def logs(self, step: int) -> bool:
        """Whether numbers are read from the device after `step`."""
        return step % self._config.log_every == 0 or self.evaluates(step) or self.saves(step)

    def _completes(self, step: int, epochs: float) -> bool:
        return int(self.epoch(step) / epochs) > int(self.epoch(step - 1) / epochs)
