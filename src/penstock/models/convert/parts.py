"""Filling one run of a model from another model (images from a Vision Transformer, texts from BERT, either from CLIP),
and extracting one branch as a model."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.boundary.hub import local_weights
from penstock.config.activations import PLAIN_NAMES
from penstock.config.graph import Graph, Input, PatchInput, Run, TokenInput, VectorHead, part_of
from penstock.config.model import ModelConfig
from penstock.config.theirs.read import read_json
from penstock.errors import ConfigError
from penstock.models.convert.files import read_state_dict
from penstock.models.convert.names import misfit
from penstock.models.convert.pretrained import from_pretrained
from penstock.models.model import Model

log = logging.getLogger(__name__)


@torch.no_grad()
def load_part(model: Model, run: str, source: str | Path | Model) -> None:
    """Fill a run of `model`, and the table or stem of its input, from another model in a folder of ours or of
    transformers, or on the Hugging Face hub. The other model's first run over an input of the same kind is used. Tables
    of tokens and of positions may have another number of rows: the first rows are used. Segments of kind 0 are added to
    the table of tokens.

    A CLIP of transformers is read too: its tower over such inputs, and its projection to vectors with their factor if
    the run has a head of the same size. The run needs model.vision_norm, or model.text_causal, to have CLIP's form.

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
    """Problems of a run that computes differently from a tower of CLIP, even if the shapes of the weights agree."""
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
    """The tower's projection as weights of the run's head for vectors; empty if there is none or the shapes differ."""
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
    """Name of the module that embeds the input of a run."""
    one = model.graph.input_of(run)
    return one.table if isinstance(one, TokenInput) else "stem"


def _places(model: Model, run: Run) -> list[str]:
    """Names of the weights of a run and of its input."""
    begin = (f"{run.name}.", f"{_table(model, run)}.", *(("class_token",) if _pictured(model, run) else ()))
    return [name for name in model.state_dict() if name.startswith(begin)]


def _pictured(model: Model, run: Run) -> bool:
    return isinstance(model.graph.input_of(run), PatchInput)


def _taken(model: Model, target: Run, other: Model, origin: Run) -> dict[str, Tensor]:
    """Weights of a run of another model, under the names that they have in ours."""
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


_KINDS = ("clip", "clip_vision_model", "clip_text_model")
_USUAL: dict[str, dict[str, Any]] = {
    "vision": {"num_attention_heads": 12, "num_hidden_layers": 12},
    "text": {"num_attention_heads": 8, "num_hidden_layers": 12},
}
"""transformers' defaults, for entries that a config.json omits."""
_BLOCK = {
    "norm1": "layer_norm1", "attention.out": "self_attn.out_proj", "norm2": "layer_norm2", "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
}  # fmt: skip


class Tower(NamedTuple):
    """The weights of one tower of a CLIP, and the settings that their shapes do not show."""

    state: dict[str, Tensor]
    """The run's weights by their names in it; names of its input's weights begin with `input.`."""
    head: dict[str, Tensor]
    """The projection (E, D), `weight`, and the logarithm of the factor (1,), `learned`; empty without a projection."""
    sizes: dict[str, Any]
    """Fields that its `Stack` must have."""
    causal: bool


def tower_in(folder: Path, one: Input) -> Tower | None:
    """The tower over inputs of this kind, from a folder that transformers wrote; None if it holds another model.

    Raises ConfigError for a CLIP without that tower, and CheckpointError for broken files.
    """
    file = folder / "config.json"
    values = read_json(file) if file.is_file() else {}
    if values.get("model_type") not in _KINDS:
        return None
    side = "vision" if isinstance(one, PatchInput) else "text"
    inner = values.get(f"{side}_config") if values["model_type"] == "clip" else values
    options = _USUAL[side] | (inner if isinstance(inner, dict) else {})
    state = read_state_dict(folder)
    prefix, whole = f"{side}_model.", values["model_type"] == "clip"
    # transformers 5 writes a tower alone without the prefix.
    there = {
        name.removeprefix(prefix): value
        for name, value in state.items()
        if name.startswith(prefix) or not whole
    }
    if not whole and values["model_type"] != f"clip_{side}_model":
        there = {}
    activation = options.get("hidden_act", "quick_gelu")
    if not there or activation not in PLAIN_NAMES:
        lacking = (
            f"no {side}_model"
            if not there
            else f"the activation {str(activation)[:40]!r}, which no stack has"
        )
        raise ConfigError(f"The CLIP in {folder} has {lacking}; name another folder.")
    heads, depth = options["num_attention_heads"], options["num_hidden_layers"]
    weights = _ends(there, side)
    for number in range(depth):
        old, new = f"encoder.layers.{number}.", f"blocks.{number}."
        for kind in ("weight", "bias"):
            weights |= {
                f"{new}{name}.{kind}": there.get(f"{old}{place}.{kind}") for name, place in _BLOCK.items()
            }
            parts = [there.get(f"{old}self_attn.{which}_proj.{kind}") for which in "qkv"]
            weights[f"{new}attention.qkv.{kind}"] = _by_head(
                [part for part in parts if part is not None], heads
            )
    head = {"weight": state.get("visual_projection.weight" if side == "vision" else "text_projection.weight")}
    if head["weight"] is not None:
        head["learned"] = state.get("logit_scale", torch.tensor(math.log(1 / 0.07))).reshape(1)
    sizes = {"heads": heads, "mlp": PLAIN_NAMES[activation], "norm_eps": options.get("layer_norm_eps", 1e-5)}
    sizes |= {"norm_first": True, "norm": "layer", "positions": "learned"}
    return Tower(_there(weights), _there(head), sizes, causal=side == "text")


def _ends(there: dict[str, Tensor], side: str) -> dict[str, Tensor | None]:
    """The weights before the first block and after the last."""
    last = "post_layernorm" if side == "vision" else "final_layer_norm"
    state = {f"norm.{kind}": there.get(f"{last}.{kind}") for kind in ("weight", "bias")}
    state["places.weight"] = there.get("embeddings.position_embedding.weight")
    if side == "text":
        return state | {"input.weight": there.get("embeddings.token_embedding.weight")}
    state |= {f"embedding_norm.{kind}": there.get(f"pre_layrnorm.{kind}") for kind in ("weight", "bias")}
    state["class_token"] = there.get("embeddings.class_embedding")
    patches = there.get("embeddings.patch_embedding.weight")
    if patches is not None:  # a convolution without a bias
        state |= {"input.proj.weight": patches.flatten(1), "input.proj.bias": patches.new_zeros(len(patches))}
    return state


def _by_head(parts: list[Tensor], heads: int) -> Tensor | None:
    """Rows of queries, keys and values in our order, (head, {q, k, v}, K); None unless all three are present."""
    if len(parts) < 3 or any(len(part) % heads for part in parts):
        return None
    return torch.stack([part.view(heads, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 2)


def _there(weights: dict[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: value for name, value in weights.items() if value is not None}


PARTS = ("transform", "pooler", "norm")


def branch_of(
    config: ModelConfig, name: str, state: Mapping[str, Tensor]
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Extract one branch: its configuration, and its weights from the whole model's. Raises ConfigError if the model
    has no such branch, or no family with a single branch computes the same. Such a family has one head: a second head
    of the branch is left out, with a warning that names it.
    """
    alone: Any = config.branch(name)
    whole, graph = config.graph, alone.graph
    left = [
        head.name for head in whole.heads if head.run == name and not isinstance(head, type(graph.heads[0]))
    ]
    if left:
        words = "The branch %s by itself is a model with one head, %s: %s is left out."
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
    """The runs from an input up to the run of this name."""
    path = [graph.run(name)]
    while not graph.enters(path[0]):
        path.insert(0, graph.run(path[0].reads))
    return path


def _in_body(key: str, path: list[Run], target: Run) -> str | None:
    """The name of a parameter after the runs of `path` are joined into `target`; None if it is in none of them."""
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
    """The new name of a parameter of the branch's head; None for any other parameter."""
    heads = [head for head in whole.heads if head.run == name and isinstance(head, type(graph.heads[0]))]
    for old, new in zip(heads, graph.heads):
        names = [(old.name, new.name), *((part_of(old, part), part_of(new, part)) for part in PARTS)]
        for before, after in names:
            if key.startswith(f"{before}."):
                return f"{after}.{key.removeprefix(f'{before}.')}"
    return None
