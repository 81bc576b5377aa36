"""The settings of a run: defaults, then those of the preset's job, a file, and the command line."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.boundary.files import quoted
from penstock.config.convert import NONE_WORDS
from penstock.config.graph import FeatureHead, Graph, PatchInput, TokenInput
from penstock.config.load import from_dict, load, read_file
from penstock.config.model import PRESETS, ModelConfig, option_words, stacks, title
from penstock.config.optimizers import BY_WIDTH, OPTIMIZERS
from penstock.config.plan import Plan
from penstock.config.rule import degrees_above_one
from penstock.config.rules import require
from penstock.config.run import Recipe, RunConfig
from penstock.config.shipped import over, read_shipped, with_forms
from penstock.errors import ConfigError

_log = logging.getLogger(__name__)
INSIDE = ("teacher_hidden", "teacher_attention", "teacher_scores")
"""Settings of a recipe that compare the blocks of teacher and student."""


def load_run(
    cls: type[RunConfig] = RunConfig, *, file: Path | str | None = None,
    overrides: Mapping[str, Any] | None = None, model_in: Callable[[str], ModelConfig | None] | None = None,
) -> RunConfig:  # fmt: skip
    """A run from general defaults, then the job of the preset that `overrides` or `file` name as `model`, then `file`,
    then `overrides`. Without a model, the preset is `vit-digits`.

    `model_in` returns the model that a folder of weights describes, or None if it describes none. With it, a run that
    starts from a text model's weights, or names no model, uses the sizes of that model, and the defaults of fine-tuning
    override the preset's job.

    Raises ConfigError as `penstock.config.load.load` does.
    """
    given = dict(overrides or {})
    stored = read_file(file) if file is not None else {}
    name: Any = given.get("model", stored.get("model"))
    weights: Any = given.get("init_from", stored.get("init_from"))
    known = isinstance(name, str) and name in PRESETS
    described = None
    if name is None or (
        known and not PRESETS[name].graph.inputs_of(PatchInput)
    ):  # images can have another size
        given_weights = isinstance(weights, str) and weights.lower() not in NONE_WORDS
        described = model_in(weights) if model_in and given_weights else None
    if name is None and file is None and described is None:
        name, known = "vit-digits", True
    base = RunConfig()
    if known:
        settings = {"output": f"runs/{name}", **JOBS.get(name, {})}
        base = from_dict(
            RunConfig, settings, origin=f"the job of {name}", base=RunConfig(model=PRESETS[name])
        )
    if described is not None:
        base = replace(base, model=_of_weights(described, weights, base.model if known else None))
        task: Any = given.get("task", stored.get("task"))
        tuning = TUNING.get(task, {}) if isinstance(task, str) else {}
        if "sequence" in tuning.get("model", {}):
            shorter = min(tuning["model"]["sequence"], base.model.tokens)
            tuning = over(tuning, {"model": {"sequence": shorter}})
        base = from_dict(RunConfig, tuning, origin="the defaults of fine-tuning", base=base)
        # The preset's name is no longer needed. Changes to single fields of the model still apply.
        given.pop("model", None)
        stored = {key: value for key, value in stored.items() if key != "model"}
    return load(cls, file=file, stored=stored, overrides=given, base=base)


def plan_option(model: ModelConfig, plan: Plan) -> str:
    """The command-line option for a Plan; it names the micro-batch if the preset's job would otherwise change it."""
    line = plan.line()
    job = JOBS.get(option_words(model)[0], {})
    unnamed = Plan.named(line).isdisjoint(Plan.KEPT) and not {*Plan.KEPT}.isdisjoint(job.get("plan", {}))
    return f'--plan "{line}{f" micro_batch={plan.micro_batch}" * unnamed}"'


def require_startable(config: RunConfig, *, elastic: bool = False) -> None:
    """Raise ConfigError for problems that can be found before a rank starts: a Plan that this model refuses, and a
    warm-up that does not fit. The Plan of an `elastic` run changes with its ranks, so it is checked without the
    model."""
    require(config.plan, None if elastic else config.model, run=True)
    require_recipe(config.recipe, config.plan, preferences=config.task == "preferences")
    if config.task == "preferences" and config.init_from is None:
        raise ConfigError(
            "task=preferences compares the model with the weights that it starts from; name them with --from "
            "(init_from)."
        )
    if config.recipe.steps is not None:
        config.recipe.warmup(config.recipe.steps)
    graph = config.model.graph
    if config.data.regions is not None and graph.pixels is None:
        raise ConfigError("data.regions is for models that learn to make images; leave it out.")
    if config.data.word_weights and not (graph.pixels and graph.inputs_of(TokenInput)):
        raise ConfigError("data.word_weights is for models that learn to make images of texts; leave it out.")


def require_recipe(recipe: Recipe, plan: Plan, *, preferences: bool) -> None:
    """Raise ConfigError, with every reason, if a Plan cannot train as a recipe says, or settings of a recipe have no
    effect. `preferences`: whether the task is training by preferences.
    """
    problems = [
        *_unscheduled(recipe, plan),
        *(_unteachable(recipe, plan) if recipe.teacher is not None else _idle(recipe)),
        *_incomparable(recipe, plan, preferences),
        *(_unadaptable(recipe, plan, preferences) if recipe.lora.base != "plain" else ()),
    ]
    if problems:
        raise ConfigError(problems)


def _unscheduled(recipe: Recipe, plan: Plan) -> Iterator[str]:
    """Settings without effect on the schedule or the optimizer."""
    usual = Recipe()
    if recipe.schedule != "wsd" and recipe.decay_share != usual.decay_share:
        yield (
            f"recipe.decay_share is {recipe.decay_share:g}, but recipe.schedule={recipe.schedule} has no such part; "
            "use schedule=wsd, or leave decay_share out."
        )
    if recipe.schedule == "constant" and recipe.min_lr:
        yield f"recipe.min_lr is {recipe.min_lr:g}, but recipe.schedule=constant never comes down; leave min_lr out."
    if plan.algorithm != "muon" and recipe.muon_momentum != usual.muon_momentum:
        yield (
            f"recipe.muon_momentum is {recipe.muon_momentum:g}, but recipe.optimizer is {plan.algorithm}; use "
            "optimizer=muon, or leave muon_momentum out."
        )
    if recipe.lr_width is not None and plan.algorithm not in BY_WIDTH:
        yield (
            f"recipe.lr_width scales the learning rate for another width as {', '.join(BY_WIDTH)} need it, and "
            f"recipe.optimizer={plan.algorithm} needs another rule; use one of these, or leave lr_width out."
        )
    if recipe.lr_width is not None and recipe.lora.rank:
        yield "recipe.lr_width is for weights of blocks, which recipe.lora freezes; leave it out, or use lora.rank=0."
    if recipe.weight_decay and not OPTIMIZERS[plan.algorithm].decays:
        yield (
            f"recipe.weight_decay is {recipe.weight_decay:g}, but recipe.optimizer={plan.algorithm} has none; use "
            "weight_decay=0."
        )


def _idle(recipe: Recipe) -> Iterator[str]:
    """Settings of a teacher although there is none."""
    usual = Recipe()
    for name in ("teacher_weight", *INSIDE, "temperature"):
        if getattr(recipe, name) != getattr(usual, name):
            yield (
                f"recipe.{name} is {getattr(recipe, name):g}, but there is no recipe.teacher to learn from; name one, "
                f"or leave {name} out."
            )
    if recipe.teacher_targets != usual.teacher_targets:
        yield f"recipe.teacher_targets is {recipe.teacher_targets}, but there is no recipe.teacher; name one."


def _unteachable(recipe: Recipe, plan: Plan) -> Iterator[str]:
    for name, degree in degrees_above_one(plan, "pp", "cp"):
        yield (
            f"plan.{name}={degree} splits the student's outputs, which recipe.teacher is compared with as a whole; use "
            f"{name}=1."
        )
    if recipe.teacher_targets == "hard" and recipe.temperature != Recipe().temperature:
        yield (
            f"recipe.temperature is {recipe.temperature:g}, but the likeliest class is the same at any; leave it out, "
            "or use recipe.teacher_targets soft."
        )
    block_settings = [name for name in INSIDE if getattr(recipe, name)]
    if block_settings and plan.tp > 1:
        yield f"recipe.{block_settings[0]} reads inside blocks, which plan.tp={plan.tp} splits over ranks; use tp=1."
    inner_settings = [name for name in block_settings if name != "teacher_hidden"]  # reads only block outputs
    if plan.compile == "blocks" and inner_settings:
        yield f"recipe.{inner_settings[0]} reads inside blocks, which plan.compile=blocks hides; use compile=none."
    if block_settings and plan.padding == "remove":
        yield (
            f"recipe.{block_settings[0]} compares the features of each token, which plan.padding=remove joins; use "
            "padding=keep."
        )
    if plan.compiles_whole:
        yield (
            f"plan.compile={plan.compile} compiles the student's head, whose loss changes with each batch of "
            "recipe.teacher; use compile=blocks."
        )


def _incomparable(recipe: Recipe, plan: Plan, preferences: bool) -> Iterator[str]:
    """Why training by preferences is not possible, or why β has no effect."""
    if not preferences:
        if recipe.preference_beta != Recipe().preference_beta:
            yield (
                f"recipe.preference_beta is {recipe.preference_beta:g}, but only task=preferences uses it; leave it "
                "out."
            )
        return
    for name, degree in degrees_above_one(plan, "pp", "tp", "cp"):
        yield (
            f"plan.{name}={degree} splits the model, which task=preferences compares with a whole copy; use {name}=1."
        )
    if plan.compiles_whole:
        yield (
            f"plan.compile={plan.compile} compiles the model's head, which task=preferences makes the logits of again "
            "in the backward pass; use compile=blocks."
        )
    if recipe.z_loss:
        yield (
            f"recipe.z_loss is {recipe.z_loss:g}, but task=preferences compares likelihoods and has no such term; "
            "leave it out."
        )
    if recipe.teacher is not None:
        yield "task=preferences has a reference in place of a recipe.teacher; leave the teacher out."


def _unadaptable(recipe: Recipe, plan: Plan, preferences: bool) -> Iterator[str]:
    """Why frozen weights cannot be stored as `recipe.lora.base` says."""
    lora = recipe.lora
    if not lora.rank:
        yield (
            f"recipe.lora.base={lora.base} stores weights that do not learn, but without adapters all of them do; set "
            "recipe.lora.rank, such as 16, or leave base out."
        )
    if plan.products != "plain":
        yield (
            f"recipe.lora.base={lora.base} makes weights of few bits for products in the compute type, which "
            f"plan.products={plan.products} would round again; use products=plain, or leave base out."
        )
    for name, degree in degrees_above_one(plan, "tp", "pp", "ep"):
        yield (
            f"plan.{name}={degree} splits weights, which recipe.lora.base={lora.base} stores as a whole; use {name}=1, "
            "or sharding=fsdp."
        )
    if preferences and lora.trained_parts:
        yield (
            "task=preferences compares with the weights beside the adapters, which "
            f"recipe.lora.base={lora.base} rounds and recipe.lora.trained_parts changes; leave one of them out."
        )


def require_alike(teacher: ModelConfig, student: ModelConfig, name: str) -> None:
    """Raise ConfigError if a teacher, called `name`, cannot be compared with a student: different inputs, vocabularies
    or classes, or too few positions."""
    problems = list(_differences(teacher.graph, student.graph))
    if problems:
        raise ConfigError(
            [f"recipe.teacher {quoted(name)} cannot teach this model: {each}" for each in problems]
        )


def _differences(teacher: Graph, student: Graph) -> Iterator[str]:
    if len(teacher.heads) != 1 or len(student.heads) != 1:
        yield "one of them has several heads or none; teach models with one head."
        return
    names = [tuple(one.name for one in graph.inputs) for graph in (teacher, student)]
    if names[0] != names[1]:
        yield f"it takes {' and '.join(names[0])}, the student {' and '.join(names[1])}; use one of the same kind."
        return
    for student_input, teacher_input in zip(student.inputs, teacher.inputs, strict=True):
        if isinstance(student_input, PatchInput) and isinstance(teacher_input, PatchInput):
            for size in ("image_size", "channels"):
                wanted, has = getattr(student_input, size), getattr(teacher_input, size)
                if wanted != has:
                    yield f"its {size} is {has}, the student's {wanted}; set model.{size} to {has}."
        elif isinstance(student_input, TokenInput) and isinstance(teacher_input, TokenInput):
            if student_input.vocabulary != teacher_input.vocabulary:
                yield (
                    f"it has a vocabulary of {teacher_input.vocabulary} {student_input.name}, the student one of "
                    f"{student_input.vocabulary}; use the teacher's tokenizer as data.tokenizer, and no "
                    "init_from with another one."
                )
            rows = [
                run.rows for run in teacher.runs
                if run.reads == teacher_input.name and run.stack.positions == "learned"
            ]  # fmt: skip
            if rows and min(rows) < student_input.length:
                yield (
                    f"it has {min(rows)} positions, but samples have {student_input.length} {student_input.name}; make "
                    "samples shorter."
                )
    if teacher.labelled and not student.labelled:
        yield "its router is given the label of each sample, but the student takes no labels."
    if not student.classes and not student.words:
        if not (student.heads_of(FeatureHead) and teacher.heads_of(FeatureHead)):
            yield "the student returns features, and can only be compared with a teacher that returns features too."
        elif student.width != teacher.width:
            yield (
                f"its embeddings have {teacher.width} features, the student's {student.width}; use a student of the "
                "same width, with fewer or narrower blocks."
            )
        return
    teacher_logits, student_logits = _outputs(teacher), _outputs(student)
    if teacher_logits != student_logits:
        yield f"it returns logits of {teacher_logits}, the student of {student_logits}; both must return the same."


def _outputs(graph: Graph) -> str:
    """The logits of a graph's head, in words."""
    if graph.classes is not None:
        return f"{graph.classes.classes} classes"
    if graph.words is None:
        return "nothing"
    return f"{graph.words.vocabulary} words" + (" by a causal model" if graph.main.causal else "")


def _of_weights(model: ModelConfig, weights: str, preset: ModelConfig | None) -> ModelConfig:
    """The model in a folder of weights, in place of a preset of its family. Samples may be shorter than its table of
    positions, which does not change.
    """
    if not model.graph.inputs_of(PatchInput) and any(stack.positions == "learned" for stack in stacks(model)):
        text: Any = model
        model = replace(text, max_positions=text.max_positions or text.sequence)
    if preset is None:
        return model
    if preset.family != model.family:
        raise ConfigError(
            f"init_from is {quoted(weights)}, which holds a model of the family {model.family}, but the preset is of "
            f"the family {preset.family}; name a preset of that family, or none."
        )
    if stacks(preset) != stacks(model):
        _log.warning("The model has the sizes of %s: %s.", weights, title(model))
    return model


def _settings(kind: str) -> dict[str, dict[str, Any]]:
    tables = read_shipped("jobs")
    return {name: with_forms(table, tables["forms"]) for name, table in tables[kind].items()}


JOBS = _settings("presets")
"""Settings by preset."""
TUNING = _settings("tasks")
"""Settings by task, for models that start from weights. They override those of the preset."""
