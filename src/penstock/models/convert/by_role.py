"""State dicts from the names of one family to those of another, by the roles of their parts.

Two families have different names for a part, and the same role. Parts of one role run in the same order in both. So the
anatomies of two families are all that a conversion needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.models.anatomy import Anatomy
from penstock.models.roles import Attention, Embedding, Linear, Role, owned, walk


def translate(state: Mapping[str, Tensor], source: Anatomy, target: Anatomy) -> dict[str, Tensor]:
    """The tensors of `state`, named as in `source`, by their names in `target`.

    Linears that one of them stores transposed are turned, and queries, keys and values are fused or taken apart as in
    the target. What no part of the source owns, or the target has no part for, keeps its name.
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
    """Queries, keys and values are taken apart and joined only where their shapes let them."""
    shapes = {tuple(tensor.shape) for tensor in rows}
    (shape, *others) = shapes
    if others or not 1 <= len(shape) <= 2 or not all(shape) or shape[0] % parts:
        raise ConfigError(
            f"The projections {', '.join(names)} have the shapes {', '.join(map(str, sorted(shapes)))}, which are no "
            f"queries, keys and values of one attention. Build the model with the configuration that the weights were "
            f"trained with."
        )


def _turned(tensor: Tensor, part: Role) -> Tensor:
    """A weight stored transposed as (out, in), and one of (out, in) as it is stored."""
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
    """Attentions, and what parameters belong to except their projections, by role."""
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
    """Rows of queries, of keys and of values, whether they are fused or not."""
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
