"""Smaller models made from parts of another one. Parts are removed, not masked: the configuration of the result has
fewer or narrower layers, so it is built, saved, trained, split and served like any other model.

Removing a part has the same effect on outputs as multiplying its contribution by zero; tokens of a removed expert go
to others.

Shapes: D width, G KV heads, K features of a head, M hidden width of a perceptron, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.config.graph import ClassHead, Run
from penstock.config.layer import Layer
from penstock.config.model import ModelConfig
from penstock.config.stack import Stack
from penstock.errors import ConfigError
from penstock.models import create
from penstock.models.model import Model

State = dict[str, Tensor]


def keep_layers(model: Model, run: str, blocks: Sequence[int]) -> Model:
    """The model with only these blocks of a run, by their numbers, ascending.

    Raises ConfigError for numbers that the run does not have.
    """
    here = _run_of(model, run)
    layers = here.stack.layers
    _require_numbers(f"the blocks of {run}", blocks, len(layers))
    places = {str(old): str(new) for new, old in enumerate(blocks)}
    prefix, state = f"{run}.blocks.", State()
    for name, value in model.state_dict().items():
        if not name.startswith(prefix):
            state[name] = value
            continue
        number, _, rest = name.removeprefix(prefix).partition(".")
        if number in places:
            state[f"{prefix}{places[number]}.{rest}"] = value
    return made_like(model, with_layers(model.config, here, [layers[number] for number in blocks]), state)


def keep_heads(
    model: Model, run: str, groups: Sequence[Sequence[int]], cross: Sequence[Sequence[int]] | None = None
) -> Model:
    """The model with only these KV heads in each block of a run, and the queries that share them. `cross` are the KV
    heads of cross attention, in each block the same number as in self-attention.

    Raises ConfigError if positions are biases, which blocks share, and blocks would keep different heads; and for
    ALiBi, whose slopes follow from the number of heads.
    """
    here = _run_of(model, run)
    stack, layers = here.stack, here.stack.layers
    if stack.positions == "alibi":
        raise ConfigError(
            f"Heads of {run} have ALiBi's slopes, which follow from the number of heads, so that none can be removed; "
            "remove layers or hidden width instead."
        )
    if stack.qk_norm_whole:
        raise ConfigError(
            f"Heads of {run} share the norms of their queries and keys, so that none can be removed alone; remove "
            "layers or hidden width instead."
        )
    heads = [list(numbers) for numbers in groups]
    if stack.biased and any(numbers != heads[0] for numbers in heads):
        raise ConfigError(
            f"All blocks of {run} share the relative biases of their heads; keep the same heads in each."
        )
    cross_heads = [list(numbers) for numbers in cross or ()]
    if (
        bool(here.memories) != bool(cross_heads)
        or len(heads) != len(layers)
        or len(cross_heads) not in (0, len(layers))
    ):
        raise ConfigError(
            f"{run} has {len(layers)} blocks{' with cross attention' * bool(here.memories)}; give heads for each."
        )
    state, narrower = dict(model.state_dict()), list[Layer]()
    for number, layer in enumerate(layers):
        name = f"{run}.blocks.{number}"
        if cross_heads and len(cross_heads[number]) != len(heads[number]):
            raise ConfigError(f"{name} must keep as many heads in cross attention as in self-attention.")
        for attention, numbers in (("attention", heads), ("cross", cross_heads)):
            if numbers:
                _require_numbers(f"the KV heads of {name}.{attention}", numbers[number], layer.kv_heads)
                for weight in head_weights(f"{name}.{attention}", layer):
                    _take_heads(state, *weight, numbers[number])
        narrower.append(layer.resized(kv_heads=len(heads[number])))
    if stack.positions == "relative":
        _take_heads(state, f"{run}.relative.weight", 1, layers[0].queries_per_key, heads[0])
    return made_like(model, with_layers(model.config, here, narrower), state)


def keep_hidden(
    model: Model, run: str, columns: Sequence[Tensor], shared: Sequence[Tensor | None] | None = None
) -> Model:
    """The model with only these hidden features of the perceptron in each block of a run: (M',) numbers; for a mixture
    (E, M'), separately for each expert. `shared` are the features of the shared experts, (S · M',).

    Raises ConfigError for numbers that a block does not have.
    """
    here = _run_of(model, run)
    stack, state, narrower = here.stack, dict(model.state_dict()), list[Layer]()
    for number, (layer, kept) in enumerate(zip(stack.layers, columns, strict=True)):
        name, width = f"{run}.blocks.{number}.mlp", layer.perceptron.width
        for row in kept.reshape(-1, kept.shape[-1]).tolist():
            _require_numbers(f"the hidden features of {name}", row, width)
        _take_hidden(state, name, kept, layer)
        if layer.mixture and layer.mixture.shared_experts:
            common, count = None if shared is None else shared[number], layer.mixture.shared_experts
            if common is None or len(common) != kept.shape[-1] * count:
                raise ConfigError(
                    f"{name} has {count} shared experts; keep {kept.shape[-1]} hidden features for each of them."
                )
            _take_hidden(state, f"{name}.shared", common, layer.resized(hidden=width * count))
        narrower.append(layer.resized(hidden=kept.shape[-1]))
    return made_like(model, with_layers(model.config, here, narrower), state)


def keep_experts(model: Model, run: str, experts: Sequence[Sequence[int] | None]) -> Model:
    """The model with only these experts in each mixture of a run, in each the same number; None for blocks without one.

    Raises ConfigError if the data select experts, and if groups of experts would become unequal.
    """
    here = _run_of(model, run)
    stack, state = here.stack, dict(model.state_dict())
    if stack.router == "given":
        raise ConfigError(
            f"The experts of {run} are given with each sample, so that none can be removed; remove hidden features."
        )
    counts = {len(kept) for kept in experts if kept is not None}
    if len(counts) != 1 or [kept is not None for kept in experts] != [
        layer.mixture is not None for layer in stack.layers
    ]:
        raise ConfigError(
            f"All mixtures of {run} have the same number of experts; keep equally many in each."
        )
    for number, kept in enumerate(experts):
        if kept is None:
            continue
        name = f"{run}.blocks.{number}.mlp"
        _require_numbers(f"the experts of {name}", kept, stack.experts)
        size = stack.experts // stack.router_groups
        if len({sum(e // size == group for e in kept) for group in range(stack.router_groups)}) > 1:
            raise ConfigError(
                f"{name} has {stack.router_groups} equal groups of experts; keep equally many in each."
            )
        take_experts(state, f"{name}.", stack, kept)
    changed = replace(stack, experts=counts.pop())
    return made_like(model, with_stack(model.config, here, changed), state)


# -- parts of weights


def take_experts(state: State, prefix: str, stack: Stack, kept: Sequence[int]) -> None:
    """Keep only some experts of the mixture whose names begin with `prefix`, in place."""
    index = torch.tensor(list(kept))
    for key in [key for key in state if key.startswith(prefix)]:
        name = key.removeprefix(prefix)
        if not name.startswith("shared."):
            state[key] = state[key][index.to(state[key].device)]


def head_weights(attention: str, layer: Layer) -> Iterator[tuple[str, int, int]]:
    """The weights of a block's self-attention, or of cross attention if the name ends with it: the key that each has in
    a state dict, if it is there, its dimension that counts heads, and its size there for each KV head."""
    shared, features = layer.queries_per_key, layer.head_width
    rows = {**layer.head_rows, "shift": (shared + 1) * features, "sinks": shared}
    columns = shared * layer.value_width
    if attention.endswith(".cross"):
        rows, columns = {"q": shared * features, "kv": 2 * features}, shared * features
    for part, size in rows.items():
        yield f"{attention}.{part}.weight", 0, size
        yield f"{attention}.{part}.bias", 0, size
    yield f"{attention}.out.weight", 1, columns


def _take_heads(state: State, key: str, dim: int, size: int, heads: Sequence[int]) -> None:
    """Keep only some KV heads of a weight, in place."""
    if (whole := state.get(key)) is not None:
        index = torch.tensor(list(heads), device=whole.device)
        state[key] = torch.unflatten(whole, dim, (-1, size)).index_select(dim, index).flatten(dim, dim + 1)


def _take_hidden(state: State, name: str, kept: Tensor, layer: Layer) -> None:
    """Keep only some hidden features of a perceptron, (M',), or of each expert of a mixture, (E, M'), in place."""
    rows = torch.cat([kept, kept + layer.perceptron.width], dim=-1) if layer.perceptron.gated else kept
    for part, numbers, dim in (("up.weight", rows, 0), ("up.bias", rows, 0), ("down.weight", kept, 1)):
        if (whole := state.get(f"{name}.{part}")) is not None:
            index = numbers.to(whole.device)
            pairs = [(whole, index)] if index.dim() == 1 else zip(whole, index, strict=True)
            taken = [weight.index_select(dim, features) for weight, features in pairs]
            state[f"{name}.{part}"] = taken[0] if index.dim() == 1 else torch.stack(taken)


# -- configurations


def _run_of(model: Model, name: str) -> Run:
    runs = [run.name for run in model.graph.runs]
    if name not in runs:
        raise ConfigError(f"The model has no run {name}; it has {', '.join(runs)}.")
    return model.graph.run(name)


def _require_numbers(parts: str, numbers: Sequence[int], count: int) -> None:
    """Raise ConfigError unless the numbers are ascending, from 0 to below `count`, and not empty."""
    ordered = list(numbers)
    if not ordered or ordered != sorted(set(ordered)) or ordered[0] < 0 or ordered[-1] >= count:
        raise ConfigError(
            f"To keep a part of {parts}, give at least one of the numbers from 0 to {count - 1}, ascending, not "
            f"{ordered[:9]}."
        )


def with_layers(config: ModelConfig, run: Run, layers: Sequence[Layer]) -> ModelConfig:
    """The configuration in which the run has these layers, expressed by the sizes of its stack if possible. Raises
    ConfigError if experts are whole blocks: each depth must have one of every expert."""
    if run.stack.experts_in == "block":
        raise ConfigError(
            f"{run.setting}.experts_in is block, and blocks of experts cannot be pruned; prune the dense model, and "
            "start the experts from it."
        )
    stack, first = run.stack, layers[0]
    dense = [layer.perceptron.width for layer in layers if not layer.mixture]
    mixed = [layer.perceptron.width for layer in layers if layer.mixture]
    heads: dict[str, Any] = {}
    if (first.heads, first.kv_heads) != (stack.heads, stack.kv_heads or stack.heads):
        whole = stack.kv_heads is None and first.kv_heads == first.heads
        heads = {
            "heads": first.heads,
            "kv_heads": None if whole else first.kv_heads,
            "head_features": None if stack.latent else first.head_width,
        }
    width = dense[0] if dense else stack.mlp_width if stack.expert_width else mixed[0]
    expert = mixed[0] if mixed and (stack.expert_width or mixed[0] != width) else stack.expert_width
    equal = replace(stack, depth=len(layers), unequal=(), mlp_width=width, expert_width=expert, **heads)
    pooled = any(
        head.pool == "attention" and head.run == run.name for head in config.graph.heads_of(ClassHead)
    )
    resized = pooled and equal.plain_layer != stack.plain_layer  # the pool's sizes would follow
    if equal.layers == tuple(layers) and not resized:
        return with_stack(config, run, equal)
    shared = heads if stack.biased else {}
    sizes = tuple(layer.sizes for layer in layers)
    return with_stack(config, run, replace(stack, depth=len(layers), unequal=sizes, **shared))


def with_stack(config: ModelConfig, run: Run, stack: Stack) -> ModelConfig:
    """The configuration in which the run has this stack. Raises ConfigError if the stack is not one of its settings."""
    name = run.setting.removeprefix("model").removeprefix(".")
    if not name and run.stack is config:
        return stack  # type: ignore[return-value]
    if name not in vars(config):
        raise ConfigError(
            f"The run {run.name} is not a setting of the model's configuration, so it cannot be changed."
        )
    changed: Any = config
    return replace(changed, **{name: stack})  # type: ignore[no-any-return]


def made_like(model: Model, config: ModelConfig, state: State) -> Model:
    """A model with this configuration and these weights, in the mode and on the device of `model`."""
    first = next(model.parameters())
    with torch.random.fork_rng(devices=[first.device] if first.is_cuda else []):
        smaller = create(config, device=first.device, dtype=first.dtype)
    smaller.load_state_dict(state)
    return smaller.train(model.training)
