"""Runs of a model from whole models: the images of one from a Vision Transformer, the texts from BERT."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from penstock.config.graph import Graph, Input, PatchInput, Run, TokenInput
from penstock.errors import ConfigError
from penstock.models.convert.names import misfit
from penstock.models.convert.pretrained import from_pretrained
from penstock.models.model import Model


@torch.no_grad()
def load_part(model: Model, run: str, source: str | Path | Model) -> None:
    """Fill a run of `model`, with the table or the stem that its input goes through, with those of another model: one
    in a folder of ours or of transformers, or on the Hugging Face hub. Taken is its first run over an input of the same
    kind. Tables of tokens and of positions may have other numbers of rows: the first are taken. Segments of kind 0 are
    added to the table of tokens.

    Raises ConfigError, naming all, for parts that are missing or of another shape; then nothing is changed.
    """
    names = [one.name for one in model.graph.runs if model.graph.enters(one)]
    if run not in names:
        raise ConfigError(f"The model has no run {run} over an input; name one of {', '.join(names)}.")
    other = source if isinstance(source, Model) else from_pretrained(source)
    ours, theirs = model.graph.run(run), _like(other.graph, model.graph.input_of(model.graph.run(run)))
    if theirs is None:
        raise ConfigError(
            f"The weights for {run} have no run over inputs of the same kind; name another model."
        )
    taken = _taken(model, ours, other, theirs)
    wanted = {name: value for name, value in model.state_dict().items() if name in _places(model, ours)}
    problems = [f"The weights for {run} lack {name}." for name in wanted if name not in taken]
    problems += [
        f"The model has no place for {name} of the weights for {run}." for name in taken if name not in wanted
    ]
    for name, value in wanted.items():
        tables = (f"{ours.name}.places.weight", f"{_table(model, ours)}.weight")
        if name in taken and name in tables and not _pictured(model, ours):
            rows = min(len(value), len(taken[name]))
            taken[name] = torch.cat([taken[name][:rows].to(value), value[rows:]])
        if name in taken and (told := misfit(name, taken[name], value)):
            problems.append(told)
    if problems:
        raise ConfigError([*problems, f"Give the run {run} the sizes and the norms of these weights."])
    model.load_state_dict(taken, strict=False)


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


def _taken(model: Model, ours: Run, other: Model, theirs: Run) -> dict[str, Tensor]:
    """Weights of a run of another model, by the names that they have in ours."""
    state, table = other.state_dict(), _table(other, theirs)
    taken: dict[str, Tensor] = {}
    for name in _places(other, theirs):
        if name.startswith(f"{theirs.name}."):
            taken[f"{ours.name}.{name.removeprefix(f'{theirs.name}.')}"] = state[name]
        else:
            taken[name.replace(f"{table}.", f"{_table(model, ours)}.", 1)] = state[name]
    if not theirs.last_norm and ours.last_norm:  # a head has it
        norms = {key: f"norm.{key}" for key in ("weight", "bias") if f"norm.{key}" in state}
        taken |= {f"{ours.name}.norm.{key}": state[name] for key, name in norms.items()}
    if "types.weight" in state and f"{_table(model, ours)}.weight" in taken:
        key = f"{_table(model, ours)}.weight"
        taken[key] = taken[key] + state["types.weight"][0]
    return taken
