"""Mixtures of experts from dense weights (Komatsuzaki et al., ICLR 2023, "Sparse Upcycling", section 2.1)."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.config.layer import LayerSizes
from penstock.config.model import ModelConfig, with_stacks
from penstock.config.stack import Stack
from penstock.errors import ConfigError
from penstock.models import create
from penstock.models.convert.files import read_state_dict
from penstock.models.experts import MixtureOfExperts


@dataclass(frozen=True, slots=True, kw_only=True)
class Upcycling:
    """How perceptrons, or blocks, become experts: each expert starts as a copy; routers are random at first."""

    noise: float = 0.0
    """Standard deviation of the noise added to an expert's weight, relative to the weight's own."""
    seed: int = 0
    """Determines the noise."""


_NAMES = [one.name for one in fields(Stack)]
DENSE = {name: getattr(Stack, name) for name in _NAMES[_NAMES.index("experts") : _NAMES.index("unequal")]}
"""Settings that have no meaning for a dense stack, with their defaults."""


def dense_twin(config: ModelConfig) -> ModelConfig:
    """The same model with a perceptron in place of each mixture, and one block in place of several experts' blocks."""

    def dense(stack: Stack) -> Stack:
        return replace(stack, unequal=dense_layers(stack) if stack.unequal else (), **DENSE)

    return with_stacks(config, dense)


def dense_layers(stack: Stack) -> tuple[LayerSizes, ...]:
    """The layers of a stack that compute one sample, each without experts."""
    every = zip(stack.layers, stack.experts_of_blocks)
    return tuple(replace(layer.sizes, mixture=False, routed=False) for layer, expert in every if not expert)


def require_copies(config: ModelConfig) -> None:
    """Raise ConfigError for mixtures whose experts cannot start as copies of a perceptron."""
    for run in config.graph.runs:
        stack, where = run.stack, run.setting
        if stack.experts and stack.shared_experts:
            raise ConfigError(
                "The weights are of a model without experts, with nothing to copy shared experts from; set "
                f"{where}.shared_experts to 0."
            )
        if stack.experts and stack.expert_width not in (None, stack.mlp_width):
            raise ConfigError(
                f"Each expert starts as a copy of a perceptron of {stack.mlp_width:,} hidden features, but "
                f"{where}.expert_width is {stack.expert_width:,}; leave {where}.expert_width out."
            )


def starts_equal(stack: Stack) -> bool:
    """Whether upcycled mixtures without noise compute the same as the perceptrons."""
    weighted = not stack.mixture.learns_routes or stack.mixture.router_normalised
    return weighted and not stack.expert_dropout and stack.sample_capacity is None


def upcycled(
    dense: Mapping[str, Tensor], expected: Mapping[str, Tensor], config: ModelConfig, options: Upcycling
) -> dict[str, Tensor]:
    """The state dict of a model with experts, named and shaped as `expected`, from `dense`, its `dense_twin`'s. Routers
    keep their values in `expected`. Without noise nothing is copied."""
    made, sources = {}, _sources(config)
    for name, target in expected.items():
        block = ".".join(name.split(".")[:3])
        source, routed = sources.get(block, (block, False))
        weight = dense.get(source + name.removeprefix(block))
        if weight is None or (weight.shape == target.shape and not routed):
            # A router, or counts of visits.
            fresh = target if target.is_floating_point() else torch.zeros_like(target)
            made[name] = fresh if weight is None else weight
            continue
        experts = weight if routed else weight.expand(len(target), *weight.shape)
        if options.noise and not weight.is_meta:
            generator = torch.Generator().manual_seed(options.seed ^ zlib.crc32(name.encode()))
            drawn = torch.randn(experts.shape, generator=generator)
            spread = options.noise * weight.float().std(correction=0).item()
            experts = experts + (drawn * spread).to(weight)
        made[name] = experts
    return made


def _sources(config: ModelConfig) -> dict[str, tuple[str, bool]]:
    """For each block's name, the dense block that it is copied from, and whether the block is one expert's."""
    sources = {}
    for run in config.graph.runs:
        experts, blocks = run.stack.experts_of_blocks, f"{run.name}.blocks."
        depths = accumulate(not expert for expert in experts)
        for number, (expert, depth) in enumerate(zip(experts, depths)):
            sources[f"{blocks}{number}"] = f"{blocks}{depth - 1}", expert is not None
    return sources


# -- models with the experts of some labels only. A mixture with one expert left becomes a perceptron with its weights.
# If experts are whole blocks, the blocks of other labels are left out.


def gated(config: ModelConfig, labels: Sequence[int]) -> ModelConfig:
    """The model with only the experts of these labels, which are renumbered from 0 in their order. Routers that choose
    among all experts are not changed."""

    def change(stack: Stack) -> Stack:
        if not stack.experts:
            return stack
        if stack.router != "given":
            return replace(stack, labels=len(labels)) if stack.labels else stack
        kept = _given(stack, labels)
        if not stack.mixture.learns_routes and len(kept) == 1 and _is_a_perceptron(stack):
            return _dense(stack)
        every = zip(stack.unequal, stack.experts_of_blocks)
        stack = replace(stack, unequal=tuple(sizes for sizes, one in every if one is None or one in kept))
        size = stack.experts // stack.router_groups if stack.mixture.learns_routes else 1
        if stack.mixture.learns_routes and len(kept) == 1:
            # With one group left, the router chooses among all experts.
            alone: dict[str, Any] = {"router": "softmax", "router_groups": 1, "expert_of": ()}
            return replace(stack, experts=size, labels=len(labels), **alone)
        of = tuple(kept.index(_table(stack)[label]) for label in labels)
        groups = len(kept) if stack.mixture.learns_routes else 1
        return replace(
            stack, experts=size * len(kept), router_groups=groups, labels=len(labels), expert_of=of
        )

    return with_stacks(config, change)


def _table(stack: Stack) -> Sequence[int]:
    """The expert of each label, or its group."""
    return stack.expert_of or range(stack.router_groups if stack.mixture.learns_routes else stack.experts)


def _given(stack: Stack, labels: Sequence[int]) -> list[int]:
    """The experts of these labels, or their groups, in ascending order."""
    return sorted({_table(stack)[label] for label in labels})


def _is_a_perceptron(stack: Stack) -> bool:
    """Whether a mixture with one expert computes as a perceptron does."""
    return not stack.shared_experts and stack.sample_capacity is None


def _dense(stack: Stack) -> Stack:
    """The stack with a perceptron as wide as an expert in place of each mixture."""
    layers = dense_layers(stack)
    widths = {sizes.hidden for sizes in layers}
    made = replace(stack, **DENSE, mlp_width=layers[0].hidden)
    return replace(made, unequal=layers) if stack.unequal or len(widths) > 1 else made


def read_gated(folder: Path, config: ModelConfig, labels: Sequence[int]) -> dict[str, Tensor]:
    """The weights of `gated(config, labels)` from the whole model's folder; no others are read. Raises as
    `read_state_dict`."""
    expected = create(gated(config, labels), device="meta").state_dict()
    rows: dict[str, list[int]] = {}
    whole = create(config, device="meta")
    named = [(name, one) for name, one in whole.named_modules() if isinstance(one, MixtureOfExperts)]
    places = _places(config, labels)
    rows |= {name: [] for name in whole.state_dict() if places.get(_block_of(name), "") is None}
    stacks = [run.stack for run in config.graph.runs for layer in run.stack.layers if layer.mixture]
    for (name, mixture), stack in zip(named, stacks, strict=True):
        if stack.router == "given":
            size = stack.experts // stack.router_groups if stack.mixture.learns_routes else 1
            kept = [group * size + place for group in _given(stack, labels) for place in range(size)]
            for part in mixture.state_dict():
                if not part.startswith("shared."):
                    rows[f"{name}.{part}"] = kept
    state = {_moved(name, places): value for name, value in read_state_dict(folder, rows).items()}
    # A perceptron has no dimension of experts, no router and no counts.
    return {
        name: value[0] if name in rows and value.shape != expected[name].shape else value
        for name, value in state.items()
        if name in expected or name not in rows
    }


def _places(config: ModelConfig, labels: Sequence[int]) -> dict[str, str | None]:
    """For each block's name, its name in `gated(config, labels)`; None if it is left out."""
    places: dict[str, str | None] = {}
    for run in config.graph.runs:
        stack, at, blocks = run.stack, 0, f"{run.name}.blocks."
        kept = _given(stack, labels) if stack.experts_in == "block" else []
        for number, expert in enumerate(stack.experts_of_blocks):
            stays = expert is None or expert in kept
            places[f"{blocks}{number}"] = f"{blocks}{at}" if stays else None
            at += stays
    return places


def _block_of(name: str) -> str:
    """The name of the block that contains a weight, if any."""
    return ".".join(name.split(".")[:3])


def _moved(name: str, places: Mapping[str, str | None]) -> str:
    """The name of a weight in `gated(config, labels)`."""
    block = _block_of(name)
    return f"{places.get(block) or block}{name.removeprefix(block)}"
