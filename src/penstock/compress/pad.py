"""Pruned models in transformers' format: padded with zeros up to the widest layer, which does not change the outputs.

A head whose values are zero adds nothing, and neither does a hidden feature that `down` multiplies by zero. Removed
layers stay removed. The folder computes as much as the widest layers do: it is meant for other programs, not for speed.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.nn.functional as F

from penstock.boundary.hub import local_weights
from penstock.compress.prune import State, head_weights, made_like, with_layers
from penstock.config.graph import Run
from penstock.config.layer import Layer
from penstock.errors import ConfigError, NumericError
from penstock.export.export import inputs_of
from penstock.models.convert import from_pretrained
from penstock.models.convert.files import described
from penstock.models.convert.pretrained import require_theirs, rounded_weights, save_values
from penstock.models.model import Model

CLOSE = 1e-5
"""Most that padded outputs may differ, relative to the largest output."""


def write_transformers(source: str | Path, target: Path) -> tuple[Path, float]:
    """Write the model in a folder in transformers' format, padded if its layers are unequal, in the type of its
    weights; returns the folder, and how much its outputs differ from the model's, relative to the largest.

    Raises ConfigError for a model that transformers does not have, and NumericError if outputs differ.
    """
    model = from_pretrained(source).eval()
    written = model
    for whole in (False, True):
        try:
            require_theirs(written.config)
            break
        except ConfigError:
            written = padded(model, whole=whole)
    require_theirs(written.config)
    folder = local_weights(source)
    types = {tensor.dtype for tensor in described(folder).values() if tensor.is_floating_point()}
    if len(types) == 1 and not rounded_weights(folder):  # fp32 can hold the values of several types
        written = copy.deepcopy(written).to(types.pop())
    save_values(written, target, source=folder)
    inputs = inputs_of(model, 3, 11, 9).values()
    with torch.inference_mode():
        expected, outputs = model(*inputs), from_pretrained(target).eval()(*inputs)
    difference = float((outputs - expected).abs().max() / expected.abs().max())
    if not difference <= CLOSE:
        raise NumericError(
            f"{target} has outputs that differ from the model's by {difference:.2g} of the largest."
        )
    return target, difference


def padded(model: Model, *, whole: bool = False) -> Model:
    """The model with each layer zero-padded up to the widest of its run. With `whole`, heads are padded to the width of
    the model, for libraries whose heads always fill it.

    Raises ConfigError if blocks share a KV head over different numbers of queries.
    """
    for name in (run.name for run in model.graph.runs):
        model = _padded_run(model, model.graph.run(name), whole)
    return model


def _padded_run(model: Model, run: Run, whole: bool) -> Model:
    stack = run.stack
    ratios = {layer.queries_per_key for layer in stack.layers}
    if len(ratios) > 1:
        raise ConfigError(
            f"Blocks of {run.name} share a KV head over {' and '.join(map(str, sorted(ratios)))} queries, which no "
            "padding makes equal; keep the folder as it is."
        )
    shared = ratios.pop()
    kv = max(layer.kv_heads for layer in stack.layers)
    if whole:
        kv = max(kv, stack.width // stack.layers[0].head_width // shared)
    every = [layer.sizes for layer in stack.layers]
    widest = {
        mixture: max((one.hidden for one in every if one.mixture == mixture), default=0)
        for mixture in (False, True)
    }
    state, layers = dict(model.state_dict()), list[Layer]()
    for number, layer in enumerate(stack.layers):
        name, more = f"{run.name}.blocks.{number}", kv - layer.kv_heads
        for attention in ("attention", "cross") if run.memories else ("attention",):
            for key, dim, size in head_weights(f"{name}.{attention}", layer):
                _grow(state, key, dim, more * size)
        hidden = widest[layer.mixture is not None]
        wider = hidden - layer.perceptron.width
        _grow_hidden(state, f"{name}.mlp", wider, layer)
        if layer.mixture and layer.mixture.shared_experts:
            _grow_hidden(state, f"{name}.mlp.shared", wider * layer.mixture.shared_experts, layer)
        layers.append(layer.resized(kv_heads=kv, hidden=hidden))
    if stack.positions == "relative":
        _grow(state, f"{run.name}.relative.weight", 1, (kv - stack.layers[0].kv_heads) * shared)
    return made_like(model, with_layers(model.config, run, layers), state)


def _grow(state: State, key: str, dim: int, count: int, parts: int = 1) -> None:
    """Append `count` zeros along a dimension of a weight, if there is one, or of each of `parts` weights that follow
    each other along it, in place."""
    if (whole := state.get(key)) is not None:
        behind = [0, 0] * (whole.ndim - 1 - dim % whole.ndim) + [0, count]
        state[key] = torch.cat([F.pad(part, behind) for part in whole.chunk(parts, dim)], dim)


def _grow_hidden(state: State, name: str, count: int, layer: Layer) -> None:
    """Append hidden features of zeros to a perceptron, or to each expert of a mixture, in place."""
    parts = 2 if layer.perceptron.gated else 1
    _grow(state, f"{name}.up.weight", -2, count, parts)
    _grow(state, f"{name}.up.bias", -1, count, parts)
    _grow(state, f"{name}.down.weight", -1, count)
