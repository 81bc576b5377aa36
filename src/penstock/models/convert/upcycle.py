"""Mixtures of experts from dense weights (Komatsuzaki et al., ICLR 2023, "Sparse Upcycling", section 2.1)."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import accumulate

import torch
from torch import Tensor

from penstock.config.model import ModelConfig, with_stacks
from penstock.config.stack import Layer, Stack
from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Upcycling:
    """How experts are made of perceptrons, or of blocks: each starts as a copy, and routers are drawn."""

    noise: float = 0.0
    """Deviation of what is added to each number of an expert, as a share of its weight's own deviation."""
    seed: int = 0
    """Determines the noise."""


_NAMES = [one.name for one in fields(Stack)]
DENSE = {name: getattr(Stack, name) for name in _NAMES[_NAMES.index("experts") : _NAMES.index("unequal")]}
"""Settings that say nothing of a dense stack, with their defaults."""


def dense_twin(config: ModelConfig) -> ModelConfig:
    """The same model with a perceptron in place of each mixture, and one block in place of those of experts."""

    def dense(stack: Stack) -> Stack:
        return replace(stack, unequal=dense_layers(stack) if stack.unequal else (), **DENSE)

    return with_stacks(config, dense)


def dense_layers(stack: Stack) -> tuple[Layer, ...]:
    """The layers of a stack that a sample goes through, none of them with experts."""
    every = zip(stack.layers, stack.experts_of_blocks)
    return tuple(replace(layer, mixture=False, routed=False) for layer, expert in every if not expert)


def require_copies(config: ModelConfig) -> None:
    """Raise ConfigError for mixtures whose experts cannot be copies of a perceptron."""
    for run in config.graph.runs:
        stack, where = run.stack, run.setting
        if stack.experts and stack.shared_experts:
            raise ConfigError(
                "The weights are dense, and have nothing that experts which every token visits could start from; set "
                f"{where}.shared_experts to 0."
            )
        if stack.experts and stack.expert_width not in (None, stack.mlp_width):
            raise ConfigError(
                f"The weights are dense, and experts as wide as their perceptrons, {stack.mlp_width:,}, but "
                f"{where}.expert_width is {stack.expert_width:,}; leave it out."
            )


def starts_equal(stack: Stack) -> bool:
    """Whether upcycled mixtures without noise give what the perceptrons gave."""
    weighted = not stack.learns_routes or stack.normalises
    return weighted and not stack.expert_dropout and stack.sample_capacity is None


def upcycled(
    dense: Mapping[str, Tensor], expected: Mapping[str, Tensor], config: ModelConfig, options: Upcycling
) -> dict[str, Tensor]:
    """The state dict of a model with experts, whose own is `expected`, made of that of its `dense_twin`: all but its
    routers, which stay as they are. Nothing is copied where there is no noise."""
    made, sources = {}, _sources(config)
    for name, target in expected.items():
        block = ".".join(name.split(".")[:3])
        source, routed = sources.get(block, (block, False))
        weight = dense.get(source + name.removeprefix(block))
        if weight is None or (weight.shape == target.shape and not routed):
            fresh = (
                target if target.is_floating_point() else torch.zeros_like(target)
            )  # a router, or counts of visits
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
    """The dense block that each block is made of, by its name, and whether it is an expert's."""
    sources = {}
    for run in config.graph.runs:
        experts, blocks = run.stack.experts_of_blocks, f"{run.name}.blocks."
        depths = accumulate(not expert for expert in experts)
        for number, (expert, depth) in enumerate(zip(experts, depths)):
            sources[f"{blocks}{number}"] = f"{blocks}{depth - 1}", expert is not None
    return sources
