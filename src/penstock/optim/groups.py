"""Which parameters are decayed, how fast each layer learns, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from fnmatch import fnmatchcase
from types import NoneType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from penstock.config.convert import PositiveShare, nearest, require
from penstock.config.run import Recipe
from penstock.errors import ConfigError
from penstock.models.anatomy import Anatomy, anatomy_of, closest_part, uncompiled
from penstock.models.former_names import present_patterns
from penstock.models.roles import Attention, Embedding, Linear, Role
from penstock.optim.tensors import mesh_of


def parameter_groups(
    model: nn.Module, *, weight_decay: float, layer_decay: float = 1.0, lr_width: int | None = None,
    matrices: bool = False,
) -> list[dict[str, Any]]:  # fmt: skip
    """Parameter groups for an optimizer: with and without decay, for each depth and each sharding over ranks.

    Weights of linear and convolution layers and token embeddings are decayed. Not decayed are tensors of fewer than two
    dimensions (biases, norms, scales), all other embeddings (positions, segments, class tokens), and the names in
    `model.no_weight_decay()`, if it exists (timm's convention). Frozen parameters are left out.

    With `layer_decay` below 1, block i of n learns at `layer_decay ** (n - i)` times the rate, the head at the full
    rate and the parts before the blocks at the lowest (Bao et al., BEiT, ICLR 2022, appendix; Clark et al., ELECTRA,
    ICLR 2020); the factor is the group's `lr_scale`, which `set_learning_rate` applies. With `lr_width`, weights of the
    blocks' linear layers, including stacked experts, learn at `lr_width` / width of their stack times the rate (Yang et
    al., "Tensor Programs V", 2022, table 8). With `matrices`, they are in groups whose `orthogonal` is true. Every
    parameter is in exactly one group; `param_names` holds the names. Raises ConfigError for a factor outside (0, 1], a
    model without trainable parameters, or one whose blocks, or their widths, are needed but cannot be found.
    """
    require("recipe.layer_decay", layer_decay, PositiveShare)
    try:
        anatomy: Anatomy | None = anatomy_of(model)
    except ConfigError:
        if layer_decay != 1.0 or lr_width is not None or matrices:
            raise
        anatomy = None
    linears = _block_matrices(uncompiled(model), anatomy) if anatomy and (lr_width or matrices) else {}
    widths = _widths(uncompiled(model), anatomy, linears) if anatomy and lr_width else {}
    listed = getattr(model, "no_weight_decay", None)
    undecayed = set(listed()) if callable(listed) else set()
    last = anatomy.depth + 1 if anatomy else 0
    groups: dict[tuple[int, bool, int, bool, float], dict[str, Any]] = {}
    kinds: list[Hashable] = []
    for name, parameter in uncompiled(model).named_parameters():
        if not parameter.requires_grad:
            continue
        role = anatomy.role_of(name) if anatomy else None
        decayed = name not in undecayed and _maps_features(name, parameter, role)
        depth = anatomy.depth_of(name) if anatomy and layer_decay != 1.0 else last
        kind = mesh_of(parameter)  # one launch supports only tensors of one mesh
        if kind not in kinds:
            kinds.append(kind)
        factor = lr_width / widths[linears[name]] if lr_width and name in linears else 1.0
        group = groups.setdefault(
            (depth, decayed, kinds.index(kind), name not in linears, factor),
            {
                "params": [],
                "param_names": [],
                "weight_decay": weight_decay if decayed else 0.0,
                "lr_scale": layer_decay ** (last - depth) * factor,
                **({"orthogonal": name in linears} if matrices else {}),
            },
        )
        group["params"].append(parameter)
        group["param_names"].append(name)
    if not groups:
        raise ConfigError(
            f"{type(model).__name__} has no parameter that requires a gradient, so there is nothing to train; "
            f"call requires_grad_(True) on the parts that should learn."
        )
    return [groups[key] for key in sorted(groups, key=lambda key: (key[0], not key[1], *key[2:]))]


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze parameters with these names or patterns (`blocks.*.attention`), and all parameters inside parts with these
    names. Raises ConfigError for a pattern that matches nothing, or if nothing is left to learn."""
    names = [name for name, _ in uncompiled(model).named_parameters()]
    frozen: set[str] = set()
    for pattern in present_patterns(uncompiled(model), patterns):
        matching = {name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")}
        if not matching:
            parts = sorted({name.partition(".")[0] for name in names})
            raise ConfigError(
                f"recipe.freeze names {pattern!r}, but the model has no such part.{nearest(pattern, names)} Its parts "
                f"are {', '.join(parts)}."
            )
        frozen |= matching
    if len(frozen) == len(names):
        raise ConfigError("recipe.freeze freezes the whole model: nothing would learn; leave out the head.")
    for name, parameter in uncompiled(model).named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)


def learning_rate(step: int, recipe: Recipe, total_steps: int, began: int = 0) -> float:
    """The learning rate of step `step` (from 0) in a schedule that starts at step `began`: a linear warm-up over
    `recipe.warmup_steps`, or `recipe.warmup_share` of its steps, then `recipe.schedule` from `recipe.lr` down to
    `recipe.min_lr`: half a cosine (Loshchilov and Hutter, SGDR, ICLR 2017, equation 5, without restarts), linear,
    constant, or constant with linear decay over the last `recipe.decay_share` of all steps (`wsd`; Hu et al.,
    "MiniCPM", 2024, section 4.2).

    The first step already has a rate above 0, and steps after `total_steps` keep `min_lr`. Raises ConfigError if the
    warm-up does not fit into the run.
    """
    step, total_steps = step - began, total_steps - began
    warmup = recipe.warmup(total_steps)
    if step < warmup:
        return recipe.lr * (step + 1) / warmup
    if recipe.schedule == "constant":
        return recipe.lr
    begin = warmup
    if recipe.schedule == "wsd":
        begin = max(warmup, total_steps - round(recipe.decay_share * total_steps))
    progress = min(max((step - begin) / max(total_steps - begin, 1), 0.0), 1.0)
    left = 0.5 * (1.0 + math.cos(math.pi * progress)) if recipe.schedule == "cosine" else 1.0 - progress
    return recipe.min_lr + (recipe.lr - recipe.min_lr) * left


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group to `lr` times its `lr_scale` (1 by default)."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def _maps_features(name: str, parameter: nn.Parameter, role: Role | None) -> bool:
    """Whether weight decay regularises a parameter as intended: see `parameter_groups`."""
    if isinstance(role, Embedding):
        return role.kind == "token"
    # Without a known role: positions or tokens that are broadcast over the samples of a batch.
    if parameter.ndim == 3 and parameter.shape[0] == 1 and type(role) in (NoneType, Role):
        return False
    if isinstance(role, Linear) and name == f"{role.name}.bias":
        return False  # biases of several experts: (E, out)
    return parameter.ndim >= 2


def _block_matrices(model: nn.Module, anatomy: Anatomy) -> dict[str, str]:
    """Names of the weights of linear layers in blocks, with the block of each; in blocks with unknown parts, of torch's
    `nn.Linear`."""
    blocks, names = {name: name for name in anatomy.blocks}, {}
    for name, parameter in model.named_parameters():
        module, _, attribute = name.rpartition(".")
        role = anatomy.role_of(name)
        linear = isinstance(role, Linear) and not name.endswith(".bias") and name != role.bias
        if role is None and not linear:
            linear = attribute == "weight" and isinstance(model.get_submodule(module), nn.Linear)
        if linear and parameter.ndim in (2, 3) and (block := closest_part(blocks, name)):
            names[name] = block
    return names


def _widths(model: nn.Module, anatomy: Anatomy, linears: dict[str, str]) -> dict[str, int]:
    """Features of the tokens that each block reads, on all ranks together, by the block's name."""
    readers = {f"{one.readers[0].name}.weight": one.readers[0] for one in anatomy.parts(Attention)}
    widths = {
        linears[name]: model.get_parameter(name).shape[-2 if reader.transposed else -1]
        for name, reader in readers.items()
        if name in linears
    }
    if unknown := sorted(set(linears.values()) - widths.keys()):
        raise ConfigError(
            f"recipe.lr_width needs the width of {unknown[0]}, but no part of it has the role Attention; leave "
            "lr_width out."
        )
    return widths
