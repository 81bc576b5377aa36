"""Sets the type in which each sharded parameter is gathered, if types differ within a unit.

torch's `fully_shard` has one type per unit. Under mixed precision the matrices of a block should be gathered in half
precision, which halves what is sent and held, and its norms in fp32. Autocast would cast the matrices anyway, but only
after they were gathered in fp32, and it keeps each copy until the backward pass: the whole half-precision model, on
every rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from penstock.config.formats import PRODUCTS
from penstock.config.numerics import numerics_of
from penstock.config.plan import Plan
from penstock.models.anatomy import anatomy_of, is_norm
from penstock.models.roles import Linear
from penstock.models.wrap import class_under, set_class
from penstock.parallel.parts import OfRanks
from penstock.precision.forward import precision_on
from penstock.precision.lists import fp32_modules_of
from penstock.precision.settings import half_type, relisted
from penstock.products.eight_bits import Fp8Linear, RoundedLinear
from penstock.products.fp8 import E4M3, quantize, scale_to

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
    except that weights in fp8 or int8 are rounded to bf16 first. With `gather=products`, linear layers that multiply in
    fp8 with one scale per weight are gathered in fp8, and what is multiplied is bit-identical to an unsharded layer's.
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
    in_fp8 = plan.gather == "products"
    wide = fp32_modules_of(model, own.lists)

    def in_half(module: nn.Module, name: str) -> bool:
        if module in wide:
            return False
        if numerics.residual == "fp32":
            # If operations have other lists, products may also be computed in fp32.
            if relisted(own) or (in_fp8 and isinstance(module, RoundedLinear)):
                return False
            return _multiplied(module, name, module in linears)
        return own.norms != "fp32" or not is_norm(module)

    (stored, rounded, unit), weights = _records(), list[Any]()
    for group in groups_of(units):
        kinds = set()
        for entry in group.fsdp_params:
            holders = owners[id(entry.sharded_param)]
            # Integer weights in few bits, which older versions of torch would cast too, have no gradients.
            whole = not entry.sharded_param.is_floating_point()
            half = not whole and all(in_half(module, name) for module, name in holders)
            kinds |= set() if whole else {half}
            if in_fp8 and all(
                isinstance(module, Fp8Linear) and name == "weight" and module not in wide
                for module, name in holders
            ):
                entry.holders = [module for module, _ in holders]
                entry.unsharded_type = half_type(numerics) if half else entry.sharded_param.dtype
                weights.append(set_class(entry, rounded))
            elif not half:
                set_class(entry, stored)
        if len(kinds) == 2:
            set_class(group, unit)
    if weights:
        model.register_forward_pre_hook(functools.partial(_agree_on_scales, weights), prepend=True)


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


@functools.cache
def _records() -> tuple[Any, Any, Any]:
    """Classes for torch's records of a parameter gathered in its stored type, of a weight gathered in fp8, and of the
    parameters of a unit. Each rank rounds its shard of such a weight with the scale of the whole weight. A parameter in
    fp8 would get its gradient in fp8; so the linear reads the weight from `gathered`, and its parameter is a stand-in
    without memory, of the unsharded weight's type."""
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    class AsStored(FSDPParam):
        def init_dtype_attrs(self, mp_policy: MixedPrecisionPolicy) -> None:
            super().init_dtype_attrs(MixedPrecisionPolicy(reduce_dtype=mp_policy.reduce_dtype))

    class InFp8(AsStored):
        holders: list[Fp8Linear]
        unsharded_type: torch.dtype
        scale: Tensor
        inverse_scale: Tensor

        @property
        def all_gather_inputs(self) -> list[Tensor]:
            shard = self._sharded_param_data.to(self.device, self.unsharded_type, non_blocking=True)
            return [quantize(shard, E4M3, self.scale).view(torch.uint8)]  # not every backend sends fp8

        def init_unsharded_param(self) -> None:
            if not hasattr(self, "_unsharded_param"):
                # A view: torch frees this memory after each pass, and gathers into it again.
                rows, shape = self.all_gather_outputs[0].view(E4M3), self.sharded_param.shape
                self.rounded = rows[: shape.numel()].view(shape)
                nothing = torch.full((), math.nan, dtype=self.unsharded_type, device=self.device)
                self._unsharded_param = nn.Parameter(nothing.expand(shape), self.sharded_param.requires_grad)

        def _setattr_on_modules(self, param: nn.Parameter) -> None:
            super()._setattr_on_modules(param)
            for linear in self.holders:
                sharded = param is self.sharded_param
                linear.gathered = None if sharded else (self.rounded, self.inverse_scale)

    class MixedUnit(FSDPParamGroup):
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def post_backward(self, *unused: Any) -> None:
            # torch needs all gradients of a unit in one type: here fp32, in which they are reduced anyway.
            for entry in self.fsdp_params:
                if hasattr(entry, "unsharded_param"):
                    entry.accumulate_unsharded_grad_if_needed()
                    entry.to_accumulated_grad_if_needed()
            super().post_backward(*unused)

    return AsStored, InFp8, MixedUnit


@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.no_grad()
def _agree_on_scales(weights: Sequence[Any], *unused: Any) -> None:
    """A hook before the model's forward pass: the scales of whole weights, by one reduction of their shards' maxima."""
    first = weights[0]
    largest = torch.stack(torch._foreach_norm([weight._sharded_param_data for weight in weights], math.inf))
    largest = largest.to(first.device)
    distributed.all_reduce(largest, distributed.ReduceOp.MAX, group=first.mesh_info.shard_process_group)
    scales = scale_to(largest.to(first.unsharded_type), E4M3)
    # New tensors: the backward pass of an earlier forward pass may still need the old ones.
    for weight, *of_weight in zip(weights, scales.unbind(), scales.reciprocal().unbind(), strict=True):
        weight.scale, weight.inverse_scale = of_weight
