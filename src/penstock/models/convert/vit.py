"""Names and shapes of a ViT's weights: Penstock's, transformers' and timm's.

transformers' files have the names of its version 4 (`vit.encoder.layer.0.attention.attention.query.weight`), and
version 5 still writes them, though its modules have other names (`vit.layers.0.attention.q_proj.weight`). Both are
read; the former are written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.config.model import ViTConfig
from penstock.config.theirs.backbones import backbone_in, require_vit, written_as
from penstock.errors import ConfigError
from penstock.models.anatomy import Anatomy, pruned
from penstock.models.convert.names import from_library, in_library, to_library
from penstock.models.families import ours, timm, transformers
from penstock.models.model import Model
from penstock.models.roles import Attention, Embedding, Head, Linear, Role, owned, placed, walk

_TABLE = "encoder.places"
POSITIONS = f"{_TABLE}.weight"
"""The name of the weight of the table of positions."""
_TOKENS = ("class_token", "distil_token")


def to_hf(state: Mapping[str, Tensor], config: ViTConfig, *, modules: bool = False) -> dict[str, Tensor]:
    """Penstock's state dict in the stored names and shapes of transformers' ViTForImageClassification, or with
    `modules` in the names of its modules in version 5; or in those of the model of `config.theirs.backbones` that
    computes the same. Raises ConfigError if transformers has no such model.
    """
    if (written := written_as(config)) and written[0].model_type != "vit":
        one, values = written
        prefix = one.prefix if values["architectures"] == [one.classes[0]] else ""
        named = _projections_joined(to_library(state, config, one.names(config))).items()
        return {name if name.startswith("classifier.") else prefix + name: tensor for name, tensor in named}
    require_vit(config)
    names = [f"vit.{'layers' if modules else 'encoder.layer'}.{i}." for i in range(config.depth)]
    return translate(_outward(state, config), ours.anatomy(config.graph), _hf(names, config))


def from_hf(state: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """A state dict of ViTForImageClassification or ViTModel, of either naming and with or without the prefix `vit.`,
    in Penstock's names and shapes; or one of a model of `config.theirs.backbones`.

    Positions keep the grid they were trained on; names that the model lacks are kept.
    """
    if one := backbone_in(state):
        state = _projections_apart(
            {name.removeprefix(one.prefix): tensor for name, tensor in state.items() if tensor.numel()}
        )
        expected, table = dict(Model(config, device="meta").state_dict()), one.names(config)
        places = state.get(table[POSITIONS].names[0]) if POSITIONS in table else None
        if places is not None and places.ndim > 1:
            expected[POSITIONS] = places.new_empty(places.shape[-2:], device="meta")
        made = from_library(state, config, table, expected)
        # A weight that does not fit is refused under its name here, a superfluous one under its own name.
        odd = {
            name: state[key]
            for name in made.misfits
            for key in in_library(name, expected[name], config, table)
        }
        return made.state | odd | {name: state[name] for name in made.left}
    require_vit(config)
    state = {re.sub(r"^(?!vit\.|classifier\.)", "vit.", name): tensor for name, tensor in state.items()}
    return _inward(translate(state, pruned(_hf(state, config), state), ours.anatomy(config.graph)))


_JOINED = "head.attention.in_proj_"
"""Prefix of the projections that torch's MultiheadAttention stores as one, in the head of SigLIP's tower."""


def _projections_joined(state: dict[str, Tensor]) -> dict[str, Tensor]:
    for kind in ("weight", "bias"):
        names = [f"head.attention.{one}_proj.{kind}" for one in "qkv"]
        if names[0] in state:
            state[_JOINED + kind] = torch.cat([state.pop(name) for name in names])
    return state


def _projections_apart(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `_projections_joined`."""
    for kind in ("weight", "bias"):
        if (joined := state.pop(_JOINED + kind, None)) is not None:
            state |= {f"head.attention.{one}_proj.{kind}": part for one, part in zip("qkv", joined.chunk(3))}
    return state


def _hf(names: Collection[str], config: ViTConfig) -> Anatomy:
    inside = {name.removeprefix("vit.") for name in names}
    (stack,) = placed(transformers.vit_stacks(inside, config.heads), "vit.")
    return Anatomy(family="hf_vit", stacks=(replace(stack, after=(*stack.after, Head("classifier"))),))


def to_timm(state: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """Penstock's state dict in timm's names and shapes. Raises ConfigError where timm has no such model."""
    names = [f"blocks.{i}." for i in range(config.depth)]
    target = _timm(names, config)
    written = translate(_outward(state, config), ours.anatomy(config.graph), target)
    if config.classifier == "token" or config.pool_norm == "before":
        return written
    return {re.sub(r"^norm\.", "fc_norm.", name): tensor for name, tensor in written.items()}


def from_timm(state: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """timm's state dict in Penstock's names and shapes; names that the model lacks are kept.

    Positions keep the grid they were trained on. If timm's learned tokens have no positions (`no_embed_class`), they
    get positions of zeros, which is the same model.
    """
    source = pruned(_timm(state, config), state)
    named = _inward(translate(state, source, ours.anatomy(config.graph)))
    positions = named.get(POSITIONS)
    if positions is not None and "class_token" in named and math.isqrt(len(positions)) ** 2 == len(positions):
        named[POSITIONS] = torch.cat([positions.new_zeros(1 + config.distilled, config.width), positions])
    return named


def _timm(names: Collection[str], config: ViTConfig) -> Anatomy:
    if config.stem != "patchify":
        raise ConfigError(
            "timm's VisionTransformer has no convolutional stem, so a model with model.stem=conv cannot be written in "
            "its names; save it in Penstock's format with save_pretrained."
        )
    if config.experts:
        raise ConfigError(
            "timm's VisionTransformer has no mixtures of experts, so a model with model.experts cannot be written in "
            "its names; save it in Penstock's format with save_pretrained."
        )
    return Anatomy(family="timm_vit", stacks=(timm.vit_stack(names, config.heads),))


def _outward(state: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """Tensors in the shapes of both libraries: the stem as a convolution, tokens and positions with a batch of one."""
    kernel = (config.width, config.channels, config.patch_size, config.patch_size)
    shapes = {
        "stem.proj.weight": kernel, POSITIONS: (1, -1, config.width), **dict.fromkeys(_TOKENS, (1, 1, -1)),
    }  # fmt: skip
    # Their positions are a parameter and not a table: its name is the table's, without `.weight`.
    return {
        _TABLE if name == POSITIONS else name: tensor.reshape(shapes.get(name, tensor.shape))
        for name, tensor in state.items()
    }


def _inward(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `_outward`."""
    ends = {"stem.proj.weight": (4, (1, -1)), _TABLE: (3, (0, 1)), **dict.fromkeys(_TOKENS, (3, (0, -1)))}
    for name, (dimensions, _) in ends.items():
        if name in state and state[name].ndim != dimensions:
            raise ConfigError(
                f"{name} has shape {tuple(state[name].shape)}, but must have {dimensions} dimensions. "
                f"Use weights of transformers' ViT or of timm's VisionTransformer."
            )
    return {
        POSITIONS if name == _TABLE else name: tensor.flatten(*ends[name][1]) if name in ends else tensor
        for name, tensor in state.items()
    }


def resize_positions(positions: Tensor, tokens: int, *, learned: int, antialias: bool = True) -> Tensor:
    """Bicubic interpolation of (tokens', D) on its square grid to (tokens, D), in fp32.

    The rows of the `learned` tokens, such as the class token, come first and are not changed. timm uses `antialias`;
    transformers does not, nor does Penstock for weights from there.

    Raises ConfigError when either number of tokens is no square grid.
    """
    if positions.shape[0] == tokens:
        return positions
    old, new = (math.isqrt(max(n - learned, 0)) for n in (positions.shape[0], tokens))
    if not old or old * old + learned != positions.shape[0] or new * new + learned != tokens:
        raise ConfigError(
            f"Position embeddings of {positions.shape[0]} tokens cannot be resized to {tokens}: without {learned} "
            "learned tokens, both numbers must be squares. Check that model.classifier and model.distilled are as they "
            "were in training."
        )
    grid = positions[learned:].float().T.reshape(1, -1, old, old)
    grid = F.interpolate(grid, size=(new, new), mode="bicubic", align_corners=False, antialias=antialias)
    patches = grid.reshape(-1, new * new).T.to(positions.dtype)
    return torch.cat([positions[:learned], patches])


def translate(state: Mapping[str, Tensor], source: Anatomy, target: Anatomy) -> dict[str, Tensor]:
    """Rename the tensors of `state` from the anatomy `source` to `target`. Linears that only one of them stores
    transposed are transposed, and queries, keys and values are fused or separated as in the target. A tensor that is in
    no part of the source, or has no part in the target, keeps its name.
    """
    renamed: dict[str, Tensor] = {}
    taken: set[str] = set()
    places: dict[Role, Role] = {}
    for old, new in _corresponding(source, target):
        if not isinstance(old, Attention) or not isinstance(new, Attention):
            places[old] = new
            continue
        for kind in (".weight", ".bias"):
            given = [part.name + kind for part in old.projections]
            if all(name in state for name in given):
                rows = [_turned(state[name], part) for name, part in zip(given, old.projections)]
                _require_alike(given, rows, parts=old.heads * (3 if len(rows) == 1 else 1))
                for part, tensor in zip(new.projections, _joined(new, _separate(old, rows))):
                    renamed[part.name + kind] = _turned(tensor, part)
                taken |= set(given)
    for name, tensor in state.items():
        role = source.role_of(name)
        place = None if role is None else places.get(role)
        if role is not None and place is not None:
            renamed[place.name + name.removeprefix(role.name)] = _turned(_turned(tensor, role), place)
        elif name not in taken:
            renamed[name] = tensor
    return renamed


def _require_alike(names: Sequence[str], rows: Sequence[Tensor], *, parts: int) -> None:
    """Raise an error unless queries, keys and values have shapes that allow them to be separated and joined."""
    shapes = {tuple(tensor.shape) for tensor in rows}
    (shape, *others) = shapes
    if others or not 1 <= len(shape) <= 2 or not all(shape) or shape[0] % parts:
        raise ConfigError(
            f"The projections {', '.join(names)} have the shapes {', '.join(map(str, sorted(shapes)))}, which cannot "
            f"be queries, keys and values of one attention layer. Build the model with the configuration that the "
            f"weights were trained with."
        )


def _turned(tensor: Tensor, part: Role) -> Tensor:
    """Convert a weight between (out, in) and its stored form, which is transposed if the part says so."""
    return tensor.T if isinstance(part, Linear) and part.transposed and tensor.ndim == 2 else tensor


def _corresponding(source: Anatomy, target: Anatomy) -> Iterator[tuple[Role, Role]]:
    """Pairs of parts that have one role and the same place: before the blocks, in block i, or after the blocks."""
    for old, new in zip(source.stacks, target.stacks):
        blocks = [(one.parts, other.parts) for one, other in zip(old.blocks, new.blocks)]
        for given, wanted in [(old.before, new.before), *blocks, (old.after, new.after)]:
            places = _by_role(wanted)
            for role, parts in _by_role(given).items():
                yield from zip(parts, places.get(role, []))


def _by_role(parts: tuple[Role, ...]) -> dict[Any, list[Role]]:
    """Attentions, and all other roles with parameters except their projections, by role."""
    by_role: dict[Any, list[Role]] = {}
    inside: set[Role] = set()
    for part in walk(parts):
        if isinstance(part, Attention):
            by_role.setdefault(Attention, []).append(part)
            by_role.setdefault("norms of heads", []).extend(part.norms)
            inside |= {*part.projections, *part.norms}
        elif owned(part) and part not in inside:
            role = part.kind if isinstance(part, Embedding) else type(part)
            by_role.setdefault(role, []).append(part)
    return by_role


def _separate(attention: Attention, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Rows of queries, of keys and of values, from fused or separate linears."""
    if len(tensors) > 1:
        return tuple(tensors)
    if len(attention.projections[0].fused) > 1:
        return tensors[0].chunk(3)
    by_head = tensors[0].reshape(attention.heads, 3, -1, *tensors[0].shape[1:])
    return tuple(rows.flatten(0, 1) for rows in by_head.unbind(1))


def _joined(attention: Attention, rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The inverse of `_separate`."""
    if len(attention.projections) > 1:
        return tuple(tensor.contiguous() for tensor in rows)
    if len(attention.projections[0].fused) > 1:
        return (torch.cat(list(rows)),)
    by_head = [tensor.reshape(attention.heads, -1, *tensor.shape[1:]) for tensor in rows]
    return (torch.stack(by_head, dim=1).flatten(0, 2),)
