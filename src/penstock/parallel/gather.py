"""Sets the type in which each sharded parameter is gathered, if types differ within a unit.

torch's `fully_shard` has one type per unit. Under mixed precision the matrices of a block should be gathered in half
precision, which halves what is sent and held, and its norms in fp32. Autocast would cast the matrices anyway, but only
after they were gathered in fp32, and it keeps each copy until the backward pass: the whole half-precision model, on
every rank.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from penstock.config.formats import PRODUCTS
from penstock.config.numerics import numerics_of
from penstock.config.plan import Plan
from penstock.models.anatomy import anatomy_of, is_norm
from penstock.models.roles import Linear
from penstock.models.wrap import class_under
from penstock.parallel.parts import OfRanks
from penstock.precision.forward import precision_on
from penstock.precision.lists import fp32_modules_of
from penstock.precision.settings import half_type, relisted
from penstock.products.eight_bits import RoundedLinear

_PRODUCTS: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def groups_of(units: Sequence[Any]) -> Iterator[Any]:
    """The groups of parameters that torch gathers and reduces together, one for each unit with its own parameters."""
    from torch.distributed.fsdp import fully_shard

    for unit in units:
        state: Any = fully_shard.state(unit)  # type: ignore[attr-defined]
        if state._fsdp_param_group is not None:
            yield state._fsdp_param_group


def entries_of(units: Sequence[Any]) -> Iterator[Any]:
    """The records that torch keeps for each sharded parameter."""
    for group in groups_of(units):
        yield from group.fsdp_params


def mixed_policy(plan: Plan) -> Any:
    """The policy for units: with O1 and O2 they are gathered in half precision, except as set by `gather_mixed`, and
    gradients are reduced in fp32.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    numerics = numerics_of(plan)
    half = half_type(numerics) if numerics.by_lists else None
    # The forward pass runs under autocast, which casts where needed; inputs of norms, for example, are not cast.
    return MixedPrecisionPolicy(
        param_dtype=half, reduce_dtype=torch.float32 if half else None, cast_forward_inputs=False
    )


def gather_mixed(model: nn.Module, units: Sequence[Any], plan: Plan) -> None:
    """Gather each parameter of freshly sharded `units` in the type that the level computes with.

    O1: parameters read only by matrix products, which autocast would cast, in half precision; all others in fp32. O2:
    norms in fp32, all others in half precision. Values are bit-identical to gathering all in fp32 and casting later,
    except that weights in fp8 or int8 are rounded to bf16 first.
    """
    numerics = numerics_of(plan)
    if not numerics.by_lists:
        return
    anatomy = anatomy_of(model)
    roles = () if anatomy.unknown else anatomy.parts(Linear)
    modules = dict(model.named_modules())
    # Linears of experts are parameters, not modules.
    linears = {modules[linear.name] for linear in roles if linear.name in modules}
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in modules.values():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append((module, name))
    own = precision_on(model) or numerics
    wide = fp32_modules_of(model, own.lists)

    def in_half(module: nn.Module, name: str) -> bool:
        if module in wide:
            return False
        if numerics.residual == "fp32":
            # If operations have other lists, products may also be computed in fp32.
            return not relisted(own) and _multiplied(module, name, module in linears)
        return own.norms != "fp32" or not is_norm(module)

    for group in groups_of(units):
        kinds = set()
        for entry in group.fsdp_params:
            holders = owners[id(entry.sharded_param)]
            # Integer weights in few bits, which older versions of torch would cast too, have no gradients.
            whole = not entry.sharded_param.is_floating_point()
            half = not whole and all(in_half(module, name) for module, name in holders)
            kinds |= set() if whole else {half}
            if not half:
                entry.init_dtype_attrs = functools.partial(_in_fp32, weakref.ref(entry))
        if len(kinds) == 2:
            group.post_backward = functools.partial(_reduced_alike, weakref.ref(group))


def _multiplied(module: nn.Module, name: str, linear: bool) -> bool:
    """Whether this parameter is only used in half precision, by autocast or 8-bit products, and only once.

    `linear`: the model's anatomy calls the module a linear.
    """
    if isinstance(module, RoundedLinear):
        # Rounded from bf16, fp32's eight leading bits, because fp8 has four and int8 seven, at half the traffic. With
        # learned clips they are rounded from fp32, as they will be when deployed.
        return not PRODUCTS[module.products].clips
    if isinstance(module, nn.MultiheadAttention):
        return name.endswith(("proj_weight", "in_proj_bias"))
    roles_known = [base for base in _PRODUCTS if isinstance(module, base)]
    if not roles_known:
        return linear and next(module.children(), None) is None
    # A class with its own forward may use its weight otherwise, for example standardise it.
    return any(class_under(module, OfRanks).forward is base.forward for base in roles_known)


def _in_fp32(entry: weakref.ref[Any], policy: Any) -> None:
    """Replaces torch's `FSDPParam.init_dtype_attrs`: the unit's policy, but gathered in the stored type."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    alive = entry()
    if alive is not None:
        type(alive).init_dtype_attrs(alive, MixedPrecisionPolicy(reduce_dtype=policy.reduce_dtype))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _reduced_alike(group: weakref.ref[Any], *unused: Any) -> None:
    """Replaces torch's `FSDPParamGroup.post_backward`, which needs all gradients of a unit in one type: gradients of
    half weights are first cast to fp32, as they would be for their reduction anyway.
    """
    alive = group()
    if alive is None:
        return
    for entry in alive.fsdp_params:
        if hasattr(entry, "unsharded_param"):
            entry.accumulate_unsharded_grad_if_needed()
            entry.to_accumulated_grad_if_needed()
    type(alive).post_backward(alive, *unused)
