"""Fused operators in any model, by role: `fuse` puts them in place, `unfuse` takes them out.

A fusion is a row of `penstock.config.fused` and, for each device with a kernel, a function that lists the modules of a
model that the operator can replace. They are found through the Anatomy, so that our models, timm's and transformers'
are treated alike. Parameters and names in the state dict do not change: a module changes its class or sets a flag,
which can be undone.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.config.activations import ACTIVATIONS, KERNELS, UNGATED, Mlp
from penstock.config.fused import FUSED, Fuse, FusedName
from penstock.config.gains import variants_that_pay
from penstock.cpu import kind_of
from penstock.errors import ConfigError
from penstock.kernels.bias_activation import bias_activation
from penstock.kernels.residual_norm import residual_norm
from penstock.models.anatomy import ELSEWHERE, Anatomy, anatomy_of, uncompiled
from penstock.models.block import Block, Branch
from penstock.models.experts import MixtureOfExperts
from penstock.models.inputs import ALONE, Context
from penstock.models.roles import Norm, Perceptron
from penstock.models.sublayers import MLP, ZeroCentredNorm
from penstock.models.wrap import restore, swap

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """One module of a model that uses a fused operator after `install` was called."""

    name: str
    """Qualified name of the module."""
    variant: str
    """The kind of its norm or activation, in the words of `penstock.config.gains`."""
    install: Callable[[], Any]


def fuse(
    model: nn.Module, names: Sequence[Fuse] = ("auto",), *, device: torch.device | str | None = None,
    dtype: torch.dtype | None = None, compiled: bool = False,
) -> dict[FusedName, int]:  # fmt: skip
    """Make `model` use fused operators, in place; returns the number of modules changed for each.

    `names` are words of `Plan.fuse`; `auto` chooses those that were measured to be faster on this kind of machine for
    products of `dtype`, by default the weights' type, than eager operators, or than torch.compile's if the blocks are
    `compiled`. `device` is where the model will run, by default the device of its weights. State dicts stay as they
    are, and results change by rounding only. `unfuse` undoes it.

    Raises ConfigError for a named operator that fits no module of the model.
    """
    model = uncompiled(model)
    weights = next(model.parameters(), torch.empty(0))
    place = torch.device(weights.device if device is None else device).type
    dtype = dtype or weights.dtype
    chosen = [name for name in FUSED if name in names or "auto" in names]
    counts: dict[FusedName, int] = {}
    for name in chosen:
        able = place in FUSED[name].devices
        places = list(_FINDERS[name](model, anatomy_of(model))) if able else []
        if not places and name in names:
            raise ConfigError(
                f"plan.fuse={name} fits nowhere in {type(model).__qualname__} on {place}: "
                + (_NOWHERE[name] if able else f"it has kernels for {' and '.join(FUSED[name].devices)} only")
                + "; leave it out."
            )
        if name not in names:
            type_name = str(dtype).removeprefix("torch.")
            pays = variants_that_pay(name, kind_of(place), type_name, compiled=compiled)
            places = [one for one in places if one.variant in pays]
        for one in places:
            one.install()
        counts[name] = len(places)
    words = ", ".join(f"{name} in {count} places" for name, count in counts.items() if count)
    _log.info("Fused operators: %s.", words or "none")
    return counts


def places_for(model: nn.Module, device: str) -> dict[FusedName, int]:
    """The number of modules of `model` that each operator fits on a kind of device (torch's name for it); 0 if the
    model's parts are not known.
    """
    model = uncompiled(model)
    try:
        anatomy = anatomy_of(model)
    except ConfigError:
        return dict.fromkeys(FUSED, 0)
    return {
        name: len([*_FINDERS[name](model, anatomy)]) if device in row.devices else 0
        for name, row in FUSED.items()
    }


def unfuse(model: nn.Module) -> None:
    """Make `model` use torch's own operators again, in place."""
    for module in list(uncompiled(model).modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, _Passed):
                setattr(module, name, child.original)
        if isinstance(module, MLP):
            module.activated = False
    restore(model, _Fused)


_NOWHERE = {
    "residual_norm": "no norm of it follows a sum that Penstock knows",
    "bias_activation": "no plain linear of it is followed by one of the activations that have a kernel "
    f"({', '.join(sorted(KERNELS))})",
}


class _Fused:
    """The base of classes that extend a module's class to use a fused operator."""


class _Passed(nn.Identity):
    """The identity, in place of an activation that the linear before it computes already."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = original


class _ActivatedLinear(_Fused):
    """A linear layer that also applies the activation to its output."""

    def forward(self, x: Tensor) -> Tensor:
        own = cast(Any, self)
        product = x @ own.weight if own.transposed else F.linear(x, own.weight)
        return bias_activation(product, own.bias, own.activation, gated=own.gated)


def _activate(linear: Any, activation: Mlp, *, gated: bool = False, transposed: bool = False) -> None:
    linear.activation, linear.gated, linear.transposed = activation, gated, transposed
    swap(linear, _ActivatedLinear)


class _GatedPerceptron(_Fused):
    """down(activation(gate(x)) · up(x)), each a linear of its own."""

    def forward(self, x: Tensor) -> Tensor:
        own = cast(Any, self)
        gate, up, down = (getattr(own, name) for name in own.gated_parts)
        return down(bias_activation(gate(x), None, own.gate_activation, second=up(x)))  # type: ignore[no-any-return]


GATED: dict[Mlp, Mlp] = {gate: gated for gated, gate in UNGATED.items() if gated in KERNELS}
"""The kind of a gated perceptron, keyed by the activation of its gate."""
_KINDS: dict[str, Mlp] = {word: name for name in KERNELS for word in ACTIVATIONS[name].classes}
"""Activations by the class of their module."""


def _activation_of(module: nn.Module) -> Mlp | None:
    """The kind of activation that a module computes, if there is a kernel for it."""
    if isinstance(module, nn.GELU) and module.approximate == "tanh":
        return "gelu_tanh"
    return _KINDS.get(type(module).__name__)


def _activation_places(model: nn.Module, anatomy: Anatomy) -> Iterator[Place]:
    """The perceptrons whose first linear is a plain `nn.Linear`, and those with a separate linear for the gate."""
    for role in () if anatomy.unknown else anatomy.parts(Perceptron):
        linear = _module(model, role.up.name)
        parent = _module(model, role.up.name.rpartition(".")[0])
        if linear is None or parent is None:
            continue
        if role.gate is not None:
            names = tuple(one.name.rpartition(".")[2] for one in (role.gate, role.up, role.down))
            if kind := _gated_kind(parent, names):
                yield Place(role.name, GATED[kind], functools.partial(_activate_gated, parent, names, kind))
            continue
        plain = type(linear).forward is nn.Linear.forward or (role.up.transposed and hasattr(linear, "nf"))
        if not plain:
            continue
        if isinstance(parent, MLP):
            if parent.activation in KERNELS:
                yield Place(role.up.name, parent.activation, functools.partial(_activate_ours, parent))
            continue
        inside = [(name, kind) for name, child in parent.named_children() if (kind := _activation_of(child))]
        if len(inside) == 1 and role.up.fused == (1,):
            yield Place(
                role.up.name,
                inside[0][1],
                functools.partial(
                    _activate_foreign, parent, linear, *inside[0], transposed=role.up.transposed
                ),
            )


def _gated_kind(parent: nn.Module, names: tuple[str, ...]) -> Mlp | None:
    """The kind of a perceptron that consists of gate, up, down and an activation and nothing else; otherwise None."""
    children = dict(parent.named_children())
    others = [child for name, child in children.items() if name not in names]
    takes = [*inspect.signature(type(parent).forward).parameters]
    if len(children) != 4 or len(others) != 1 or len(takes) != 2:
        return None
    kind = _activation_of(others[0])
    return kind if kind in GATED else None


def _activate_gated(parent: Any, names: tuple[str, ...], activation: Mlp) -> None:
    parent.gated_parts, parent.gate_activation = names, activation
    swap(parent, _GatedPerceptron)


def _activate_ours(mlp: MLP) -> None:
    activation = UNGATED.get(mlp.activation, mlp.activation)
    _activate(mlp.up, activation, gated=mlp.activation in UNGATED)
    mlp.activated = True


def _activate_foreign(
    parent: nn.Module, linear: nn.Module, name: str, activation: Mlp, *, transposed: bool
) -> None:
    setattr(parent, name, _Passed(getattr(parent, name)))
    _activate(linear, activation, transposed=transposed)


def _module(model: nn.Module, name: str) -> nn.Module | None:
    """A module by its name; None if another process holds it."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


class _NormedSums(_Fused):
    """A block of ours that adds a branch and normalises the sum in one pass."""

    def forward(self, x: Tensor, context: Context = ALONE) -> Tensor:
        own = cast(Block, self)
        parts: list[tuple[Any, Branch]] = [(own.attention, own.branch1), (own.feed, own.branch2)]
        if own.cross is not None:
            parts.insert(1, (own.cross, own.cross_branch))
        norms = _norms(own)
        seen, norms = (norms[0](x), [*norms[1:], None]) if own.norm_first else (x, norms)
        # A mixture's router reads the norm's output in its own type; post-norm outputs are the tokens of the next sum.
        narrow = own.norm_first and not isinstance(own.mlp, MixtureOfExperts)
        for (part, branch), norm in zip(parts, norms, strict=True):
            made, rate = part(seen, context), branch.dropout_alone
            if norm is None:
                return x + branch(made)  # type: ignore[no-any-return]
            made, rate = (branch(made), 0.0) if rate is None else (made, rate)
            x, seen = residual_norm(x, made, norm, dropout=rate, for_products=narrow)
            x = x if own.norm_first else seen
        return x


def _norms(block: Block) -> list[Any]:
    """The norms of a block in the order in which they run."""
    return [block.norm1, *([] if block.cross is None else [block.cross_norm]), block.norm2]


def _norms_sums(block: Block) -> bool:
    """Whether all norms of a block have weights and are applied to sums that it computes."""
    norms = _norms(block)[1 if block.norm_first else 0 :]
    plain = all(isinstance(norm, nn.LayerNorm | nn.RMSNorm) for norm in norms)
    return plain and not isinstance(block.norm2, ZeroCentredNorm)


class _AddedOutput(_Fused):
    """The end of a branch of BERT and its like: a linear, dropout, and the norm of its sum with the branch's input."""

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        own = cast(Any, self)
        rate = own.dropout.p if own.training else 0.0
        return residual_norm(input_tensor, own.dense(hidden_states), own.LayerNorm, dropout=rate)[1]


def _norm_places(model: nn.Module, anatomy: Anatomy) -> Iterator[Place]:
    """Our blocks that normalise the sum of tokens and a branch, and modules of other libraries that do the same."""
    for name in anatomy.blocks:
        block = _module(model, name)
        if block.__class__ is Block and _norms_sums(block) and not block.__dict__.get(ELSEWHERE):
            variant = "rms_norm" if isinstance(block.norm2, nn.RMSNorm) else "layer_norm"
            yield Place(name, variant, functools.partial(swap, block, _NormedSums))
    for role in () if anatomy.unknown else anatomy.parts(Norm):
        parent = _module(model, role.name.rpartition(".")[0])
        if parent is not None and _adds_input(parent):
            yield Place(role.name, "layer_norm", functools.partial(swap, parent, _AddedOutput))


def _adds_input(module: nn.Module) -> bool:
    """Whether a module is the end of a branch in BERT's form."""
    children = dict(module.named_children())
    return (
        children.keys() == {"dense", "dropout", "LayerNorm"}
        and isinstance(children["LayerNorm"], nn.LayerNorm)
        and [*inspect.signature(type(module).forward).parameters] == ["self", "hidden_states", "input_tensor"]
    )


_FINDERS: dict[FusedName, Callable[[nn.Module, Anatomy], Iterable[Place]]] = {
    "residual_norm": _norm_places, "bias_activation": _activation_places,
}  # fmt: skip
