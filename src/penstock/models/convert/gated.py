"""The experts of some labels alone, of a model whose experts are given by labels: its configuration, and its weights.

Where one expert of each mixture is left, the mixture becomes a perceptron with the expert's weights. Where experts are
whole blocks, the others' blocks are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.config.model import ModelConfig, with_stacks
from penstock.config.stack import Stack
from penstock.models import create
from penstock.models.convert.files import read_state_dict
from penstock.models.convert.upcycle import DENSE, dense_layers
from penstock.models.experts import MixtureOfExperts


def gated(config: ModelConfig, labels: Sequence[int]) -> ModelConfig:
    """The model with the experts of these labels alone, which are numbered from 0 on in their order. Its routers that
    choose among all experts stay as they are."""

    def change(stack: Stack) -> Stack:
        if not stack.experts:
            return stack
        if stack.router != "given":
            return replace(stack, labels=len(labels)) if stack.labels else stack
        kept = _given(stack, labels)
        if not stack.learns_routes and len(kept) == 1 and _is_a_perceptron(stack):
            return _dense(stack)
        every = zip(stack.unequal, stack.experts_of_blocks)
        stack = replace(stack, unequal=tuple(layer for layer, one in every if one is None or one in kept))
        size = stack.experts // stack.router_groups if stack.learns_routes else 1
        if stack.learns_routes and len(kept) == 1:
            # A router that chooses in the only group chooses among all.
            alone: dict[str, Any] = {"router": "softmax", "router_groups": 1, "expert_of": ()}
            return replace(stack, experts=size, labels=len(labels), **alone)
        of = tuple(kept.index(_table(stack)[label]) for label in labels)
        groups = len(kept) if stack.learns_routes else 1
        return replace(
            stack, experts=size * len(kept), router_groups=groups, labels=len(labels), expert_of=of
        )

    return with_stacks(config, change)


def _table(stack: Stack) -> Sequence[int]:
    """The expert of each label, or its group."""
    return stack.expert_of or range(stack.router_groups if stack.learns_routes else stack.experts)


def _given(stack: Stack, labels: Sequence[int]) -> list[int]:
    """The experts of these labels, or their groups, in ascending order."""
    return sorted({_table(stack)[label] for label in labels})


def _is_a_perceptron(stack: Stack) -> bool:
    """Whether a mixture with one expert computes as a perceptron does."""
    return not stack.shared_experts and stack.sample_capacity is None


def _dense(stack: Stack) -> Stack:
    """The stack with a perceptron as wide as an expert in place of each mixture."""
    layers = dense_layers(stack)
    widths = {layer.hidden for layer in layers}
    made = replace(stack, **DENSE, mlp_width=layers[0].hidden)
    return replace(made, unequal=layers) if stack.unequal or len(widths) > 1 else made


def read_gated(folder: Path, config: ModelConfig, labels: Sequence[int]) -> dict[str, Tensor]:
    """The weights of `gated(config, labels)` in a folder with those of the whole model. Of its experts, no others are
    read. Raises as `read_state_dict`."""
    expected = create(gated(config, labels), device="meta").state_dict()
    rows: dict[str, list[int]] = {}
    whole = create(config, device="meta")
    named = [(name, one) for name, one in whole.named_modules() if isinstance(one, MixtureOfExperts)]
    places = _places(config, labels)
    rows |= {name: [] for name in whole.state_dict() if places.get(_block_of(name), "") is None}
    stacks = [run.stack for run in config.graph.runs for layer in run.stack.layers if layer.mixture]
    for (name, mixture), stack in zip(named, stacks, strict=True):
        if stack.router == "given":
            size = stack.experts // stack.router_groups if stack.learns_routes else 1
            kept = [group * size + place for group in _given(stack, labels) for place in range(size)]
            for part in mixture.state_dict():
                if not part.startswith("shared."):
                    rows[f"{name}.{part}"] = kept
    state = {_moved(name, places): value for name, value in read_state_dict(folder, rows).items()}
    # A perceptron has no dimension of experts, and neither a router nor counts.
    return {
        name: value[0] if name in rows and value.shape != expected[name].shape else value
        for name, value in state.items()
        if name in expected or name not in rows
    }


def _places(config: ModelConfig, labels: Sequence[int]) -> dict[str, str | None]:
    """The name of each block in `gated(config, labels)`, by its own; None of one that is left out."""
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
    """The name of the block that a weight is in, if it is in one."""
    return ".".join(name.split(".")[:3])


def _moved(name: str, places: Mapping[str, str | None]) -> str:
    """The name of a weight in `gated(config, labels)`."""
    block = _block_of(name)
    return f"{places.get(block) or block}{name.removeprefix(block)}"
