"""Runs of a model from whole models: images from a Vision Transformer, texts from BERT, either from CLIP."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor

from penstock.config.graph import Graph, Input, PatchInput, Run, TokenInput, VectorHead
from penstock.errors import ConfigError
from penstock.models.convert.clip import Tower, tower_in
from penstock.models.convert.hub import local_weights
from penstock.models.convert.names import misfit
from penstock.models.convert.pretrained import from_pretrained
from penstock.models.model import Model

log = logging.getLogger(__name__)


@torch.no_grad()
def load_part(model: Model, run: str, source: str | Path | Model) -> None:
    """Fill a run of `model`, with the table or the stem that its input goes through, with those of another model: one
    in a folder of ours or of transformers, or on the Hugging Face hub. Taken is its first run over an input of the same
    kind. Tables of tokens and of positions may have other numbers of rows: the first are taken. Segments of kind 0 are
    added to the table of tokens.

    Of a CLIP of transformers it is the tower over such inputs, with the projection to vectors and their factor where
    the run has a head for as many features. Its form is that of `vision_norm`, and of `text_causal`.

    Raises ConfigError, naming all, for parts that are missing or of another shape; then nothing is changed.
    """
    names = [one.name for one in model.graph.runs if model.graph.enters(one)]
    if run not in names:
        raise ConfigError(f"The model has no run {run} over an input; name one of {', '.join(names)}.")
    target, one = model.graph.run(run), model.graph.input_of(model.graph.run(run))
    if not isinstance(source, Model):
        source = local_weights(source)
    tower, differing, head = None if isinstance(source, Model) else tower_in(source, one), list[str](), {}
    if tower is not None:
        places = {"input": _table(model, target), "class_token": "class_token"}
        taken = {
            ".".join([places.get(first, f"{run}.{first}"), *rest]): value
            for name, value in tower.state.items()
            for first, *rest in (name.split("."),)
        }
        differing, head = _differing(target, tower), _vectors(model, target, tower)
    else:
        other = source if isinstance(source, Model) else from_pretrained(source)
        origin = _like(other.graph, one)
        if origin is None:
            raise ConfigError(
                f"The weights for {run} have no run over inputs of the same kind; name another model."
            )
        taken = _taken(model, target, other, origin)
    wanted = {name: value for name, value in model.state_dict().items() if name in _places(model, target)}
    problems = [*differing, *(f"The weights for {run} lack {name}." for name in wanted if name not in taken)]
    problems += [
        f"The model has no place for {name} of the weights for {run}." for name in taken if name not in wanted
    ]
    for name, value in wanted.items():
        tables = (f"{target.name}.places.weight", f"{_table(model, target)}.weight")
        if name in taken and name in tables and not _pictured(model, target):
            rows = min(len(value), len(taken[name]))
            taken[name] = torch.cat([taken[name][:rows].to(value), value[rows:]])
        if name in taken and (problem := misfit(name, taken[name], value)):
            problems.append(problem)
    if problems:
        raise ConfigError([*problems, f"Give the run {run} the sizes and the norms of these weights."])
    model.load_state_dict(taken | head, strict=False)


def _differing(run: Run, tower: Tower) -> list[str]:
    """Problems of a run that computes otherwise than a tower of CLIP does, whatever the shapes of its weights."""
    sizes = {name: (getattr(run.stack, name), value) for name, value in tower.sizes.items()}
    problems = [
        f"{run.setting}.{name} is {size}, but the weights were trained with {trained}."
        for name, (size, trained) in sizes.items()
        if size != trained
    ]
    if run.causal is not tower.causal:
        problems.append(
            f"The run {run.name} is {'' if run.causal else 'not '}causal, but the weights were trained "
            f"{'with' if tower.causal else 'without'} a causal mask; set model.text_causal."
        )
    return problems


def _vectors(model: Model, run: Run, tower: Tower) -> dict[str, Tensor]:
    """The weights of the head for vectors over a run, of as many features as the tower's."""
    heads = (head for head in model.graph.heads_of(VectorHead) if head.run == run.name)
    head, state = next(heads, None), model.state_dict()
    weights = {} if head is None else {f"{head.name}.{name}": value for name, value in tower.head.items()}
    fitting = {
        name: value for name, value in weights.items() if name in state and state[name].shape == value.shape
    }
    if head is not None and f"{head.name}.weight" not in fitting:
        log.info(
            "The projection to vectors of %s stays as it was drawn: the weights have none of its shape.",
            run.name,
        )
        return {}
    return fitting


def _like(graph: Graph, one: Input) -> Run | None:
    """The first run over an input of the same kind."""
    return next(
        (run for run in graph.runs if graph.enters(run) and type(graph.input_of(run)) is type(one)), None
    )


def _table(model: Model, run: Run) -> str:
    """The module of the input of a run, or what it begins with."""
    one = model.graph.input_of(run)
    return one.table if isinstance(one, TokenInput) else "stem"


def _places(model: Model, run: Run) -> list[str]:
    """Names of the weights of a run and of its input."""
    begin = (f"{run.name}.", f"{_table(model, run)}.", *(("class_token",) if _pictured(model, run) else ()))
    return [name for name in model.state_dict() if name.startswith(begin)]


def _pictured(model: Model, run: Run) -> bool:
    return isinstance(model.graph.input_of(run), PatchInput)


def _taken(model: Model, target: Run, other: Model, origin: Run) -> dict[str, Tensor]:
    """Weights of a run of another model, by the names that they have in ours."""
    state, table = other.state_dict(), _table(other, origin)
    taken: dict[str, Tensor] = {}
    for name in _places(other, origin):
        if name.startswith(f"{origin.name}."):
            taken[f"{target.name}.{name.removeprefix(f'{origin.name}.')}"] = state[name]
        else:
            taken[name.replace(f"{table}.", f"{_table(model, target)}.", 1)] = state[name]
    if not origin.last_norm and target.last_norm:  # a head has it
        norms = {key: f"norm.{key}" for key in ("weight", "bias") if f"norm.{key}" in state}
        taken |= {f"{target.name}.norm.{key}": state[name] for key, name in norms.items()}
    if "types.weight" in state and f"{_table(model, target)}.weight" in taken:
        key = f"{_table(model, target)}.weight"
        taken[key] = taken[key] + state["types.weight"][0]
    return taken
