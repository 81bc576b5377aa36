"""One branch of a model with several, as a model of its own in a family that has no others.

A body and a branch of its form are one stack of blocks: those of the branch come behind those of the body.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from penstock.config.graph import Graph, Run
from penstock.config.model import ModelConfig
from penstock.models.model import part_of

log = logging.getLogger(__name__)

PARTS = ("transform", "pooler", "norm")


def branch_of(
    config: ModelConfig, name: str, state: Mapping[str, Tensor]
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The configuration and the weights of a branch alone, of the whole model's. Raises ConfigError for a model that
    has no such branch, or none that a family without branches computes. A second head of the branch, which such a
    family has no place for, is left out, and a warning names it.
    """
    alone: Any = config.branch(name)
    whole, graph = config.graph, alone.graph
    left = [
        head.name for head in whole.heads if head.run == name and not isinstance(head, type(graph.heads[0]))
    ]
    if left:
        words = "The branch %s alone is a model of one head, %s: %s is left out."
        log.warning(words, name, graph.heads[0].name, ", ".join(left))
    (target,) = graph.runs
    weights: dict[str, Tensor] = {}
    for key, tensor in state.items():
        new = _in_body(key, _path(whole, name), target) or _in_head(key, whole, graph, name)
        if new is not None:
            weights[new] = tensor
    for one in graph.inputs:
        kept = (one.table, *(("types",) if one.segments else ()))
        weights |= {f"{table}.weight": state[f"{table}.weight"] for table in kept}
    return alone, weights


def _path(graph: Graph, name: str) -> list[Run]:
    """The runs that end with the one of that name, from an input on."""
    path = [graph.run(name)]
    while not graph.enters(path[0]):
        path.insert(0, graph.run(path[0].reads))
    return path


def _in_body(key: str, path: list[Run], target: Run) -> str | None:
    """The name in the one run of a parameter of several, which run one after the other; None of any other."""
    first = 0
    for run in path:
        if key.startswith(f"{run.name}.blocks."):
            number, _, rest = key.removeprefix(f"{run.name}.blocks.").partition(".")
            return f"{target.name}.blocks.{first + int(number)}.{rest}"
        if key.startswith(f"{run.name}."):
            return f"{target.name}.{key.removeprefix(f'{run.name}.')}"
        first += run.stack.depth
    return None


def _in_head(key: str, whole: Graph, graph: Graph, name: str) -> str | None:
    """The name of a parameter of the branch's head; None of any other."""
    heads = [head for head in whole.heads if head.run == name and isinstance(head, type(graph.heads[0]))]
    for old, new in zip(heads, graph.heads):
        names = [(old.name, new.name), *((part_of(old, part), part_of(new, part)) for part in PARTS)]
        for before, after in names:
            if key.startswith(f"{before}."):
                return f"{after}.{key.removeprefix(f'{before}.')}"
    return None
