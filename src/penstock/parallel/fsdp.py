"""Sharding of weights, gradients and optimizer states over ranks (Rajbhandari et al., "ZeRO", SC 2020; Zhao et al.,
"PyTorch FSDP", VLDB 2023), through torch's `fully_shard`.

A unit is gathered as a whole. The model's Anatomy defines the units: each block is one, gathered while the previous one
computes, and the root is one with everything outside the blocks. Split experts are separate units, over the ranks that
hold the same experts. `plan.sharding` determines what happens to a unit:

- `zero1`: weights stay whole until the step's last backward pass, and gradients accumulate whole on each rank;
- `zero2`: weights likewise; the gradients of each micro-batch are reduced, so that each rank keeps its share;
- `fsdp`: as `zero2`, but weights are freed after a forward pass, and gathered again for the backward pass;
- `hsdp`: as `fsdp`, within a group; the last micro-batch sums the groups' shares of the gradients.

With `fsdp` and `hsdp`, a pipeline's stage gathers its weights once a step, keeps them, and reduces gradients once, as
`zero1` does: it runs many micro-batches in each step, with both passes interleaved (Grattafiori et al., "The Llama 3
Herd of Models", 2024, section 3.3.2).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from penstock.config.numerics import numerics_of
from penstock.config.plan import Plan
from penstock.errors import ConfigError
from penstock.models.anatomy import anatomy_of, is_norm
from penstock.models.block import ExpertSamples
from penstock.models.wrap import find
from penstock.optim.contiguous import Contiguous
from penstock.optim.tensors import MOVED, alike, local, whole
from penstock.parallel.data import DataParallel, broadcast, running_statistics
from penstock.parallel.dims import ParallelDims
from penstock.parallel.experts import split_linears
from penstock.parallel.gather import entries_of, gather_mixed, mixed_policy
from penstock.parallel.parts import cut_to_fit
from penstock.precision.master import compute_in_fp32
from penstock.shards import whole_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharded(DataParallel):
    """The tasks of a training step on a model whose weights are sharded."""

    plan: Plan
    units: Sequence[Any] = field(default_factory=list)
    """Every module that is gathered separately; the root is last."""

    def begin(self, micro_batch: int, count: int) -> None:
        """See `DataParallel`, and above for the work that is deferred to the last micro-batch."""
        last = micro_batch == count - 1
        if micro_batch == 0:
            self.drop_copies()
        kind, in_stages = self.plan.sharding, self.plan.pp > 1 and self.plan.sharding in ("fsdp", "hsdp")
        if in_stages or kind == "zero1":
            self.model.set_requires_gradient_sync(last)
        elif kind in ("hsdp", "ddp"):
            self.model.set_requires_all_reduce(last)
        if in_stages or kind in ("zero1", "zero2"):
            self.model.set_reshard_after_backward(last)

    @torch.no_grad()
    def end(self) -> None:
        """See `DataParallel`. Gradients of split experts are sums over a group's tokens, averaged over the groups."""
        for parameter in (p for linear in split_linears(self.model) for p in linear.parameters()):
            if parameter.grad is not None:
                local(parameter.grad).mul_(self.dims.tp / self.dims.ep)
        DataParallel.end(self)

    def drop_copies(self) -> None:
        """Free the whole weights that remain after a forward pass without a backward pass, as in an evaluation."""
        for unit in self.units:
            unit.reshard()

    def held_bytes(self) -> int:
        """0: gathered weights are freed within the step."""
        return 0


def shard(
    model: nn.Module, plan: Plan, dims: ParallelDims, device: torch.device, *,
    shares: Mapping[str, Tensor] | None = None, optimizers: Iterable[Optimizer] = (),
) -> Sharded:  # fmt: skip
    """Shard `model` over the ranks as `plan.sharding` says, in place: same object, same names, same call.

    Parameters become DTensors of the same type; each rank holds its rows. Parameters on the meta device get memory for
    this rank's rows only, with the values in `shares` by name. Other models first get rank 0's weights on all ranks.
    With O1 and O2 the shards are fp32, which are O2's master weights; O1's matrices, and everything except norms with
    O2, are gathered in half precision (`gather_mixed`), and gradients are reduced in fp32. `optimizers` over the
    model's parameters, with or without state, continue with the shards.

    Raises:
        ConfigError: the model's blocks cannot be found, or a parameter cannot be sharded.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    assert dims.mesh is not None
    blocks = anatomy_of(model).block_modules(model)
    scalars = [name for name, parameter in model.named_parameters() if parameter.ndim == 0]
    if scalars:
        raise ConfigError(
            f"The parameter {scalars[0]} of {type(model).__name__} is a single number without dimensions, which "
            "cannot be sharded by rows; give it the shape (1,), or use plan.sharding=ddp."
        )
    if shares is None and dims.tp == dims.ep == 1:  # else this was done before layers were split
        broadcast(model, dims)
    before = dict(model.named_parameters())
    options = _options(plan, dims, device)
    experts: list[Any] = list(split_linears(model))
    for linear in experts:
        mesh, place = dims.expert_replicas_mesh(), functools.partial(_even_placement, dims.expert_shard)
        fully_shard(linear, **{**options, "mesh": mesh, "shard_placement_fn": place})
    for block in blocks:
        _shard_block(block, options)
    # With None, torch keeps the root's weights after the forward pass, because the backward pass needs them first.
    options["reshard_after_forward"] = None if options["reshard_after_forward"] else False
    fully_shard(model, **options)
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    units = [*units[1:], units[0]]
    gather_mixed(model, units, plan)
    numerics = numerics_of(plan)
    for module in model.modules() if numerics.residual != numerics.norms else ():
        if is_norm(module) and _has_parameters(module):
            compute_in_fp32(module)
    _prefetch(model, blocks)
    if device.type == "cpu":
        for unit in units:
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    _materialise(model, units, device, shares or {})
    for entry in entries_of(units):  # torch gathers from a stored address, and optimizers may move shards
        setattr(entry.sharded_param, MOVED, functools.partial(setattr, entry, "_sharded_param_data"))
    for module in model.modules():
        if _has_parameters(module):
            module.register_load_state_dict_pre_hook(cut_to_fit)  # type: ignore[no-untyped-call]
    for optimizer in optimizers:
        _rebind(optimizer, before, model)
    return Sharded(model=model, dims=dims, plan=plan, units=units, buffers=running_statistics(model))


def shard_frozen(
    model: nn.Module, plan: Plan, dims: ParallelDims, device: torch.device, shares: Mapping[str, Tensor]
) -> Callable[[], None]:
    """Shard a model that is not trained, in place, as `shard` does. Weights of a block are whole during its forward
    pass, weights outside the blocks until the returned function is called.

    Raises ConfigError as `shard` does.
    """
    from torch.distributed.fsdp import fully_shard

    options = {**_options(replace(plan, offload="none"), dims, device), "reshard_after_forward": True}
    blocks = anatomy_of(model).block_modules(model)
    for block in blocks:
        _shard_block(block, options)
    root: Any = fully_shard(model, **{**options, "reshard_after_forward": False})
    _prefetch(model, blocks)
    _materialise(model, [*blocks, model], device, shares)
    release: Callable[[], None] = root.reshard
    return release


def _shard_block(block: nn.Module, options: Mapping[str, Any]) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(block, **options)
    if (samples := find(block, ExpertSamples)) is not None:
        samples.joins = True


def _options(plan: Plan, dims: ParallelDims, device: torch.device) -> dict[str, Any]:
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    offload = plan.offload == "optimizer"
    copies = plan.sharding == "hsdp" or dims.dp_replicate > 1
    return {
        "mesh": dims.replicas_mesh() if copies else dims.shard_mesh(),
        "reshard_after_forward": plan.sharding in ("fsdp", "hsdp") and plan.pp == 1,
        "mp_policy": mixed_policy(plan),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy(),
    }


def _even_placement(ranks: int, parameter: nn.Parameter) -> Any:
    """Shard whole experts or, if there are too few, the outputs of each, if that is even."""
    from torch.distributed.tensor import Shard

    experts, outputs = local(parameter.detach()).shape[:2]
    return Shard(1 if experts % ranks and not outputs % ranks else 0)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _prefetch(model: nn.Module, blocks: Sequence[Any]) -> None:
    """Gather one block ahead in both directions: torch would learn the backward order from the forward pass; here it is
    known."""
    for block, following in itertools.pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])
    root: Any = model
    root.set_modules_to_forward_prefetch([blocks[0]])


@torch.no_grad()
def _materialise(
    model: nn.Module, units: Sequence[Any], device: torch.device, shares: Mapping[str, Tensor]
) -> None:
    """Allocate this rank's rows for parameters without memory. Rows become their storage, so nothing is held twice."""
    missing = {id(parameter): name for name, parameter in model.named_parameters() if parameter.is_meta}
    if not missing:
        return

    def filled(tensor: Tensor, name: str) -> nn.Parameter:
        rows = shares.get(name)
        if rows is None or rows.shape != local(tensor).shape:
            raise ConfigError(
                f"The parameter {name} is on the meta device, and there are no values of shape "
                f"{tuple(local(tensor).shape)} for it; make the model by a function: build(lambda: MyModel(…), plan)."
            )
        values = whole(tensor, rows.to(device=device, dtype=tensor.dtype))
        return nn.Parameter(values, requires_grad=tensor.requires_grad)

    new_parameters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = missing.get(id(parameter))
            if name is None:
                continue
            if id(parameter) not in new_parameters:  # tied weights stay tied
                new_parameters[id(parameter)] = filled(parameter, name)
            setattr(module, key, new_parameters[id(parameter)])
    for entry in entries_of(units):
        entry.reset_sharded_param()


def whole_state(model: nn.Module, dims: ParallelDims) -> dict[str, Tensor]:
    """The model's state dict with every tensor whole, on the host of rank 0. All ranks must call this; other ranks get
    an empty dict. One tensor is gathered at a time; stages of a pipeline send theirs one after the other.
    """
    state: dict[str, Tensor] = {}
    first = all(at == 0 for name, at in dims.place().items() if name != "pp")
    for name, value in model.state_dict().items():
        gathered = whole_of(value)
        if first:
            state[name] = gathered.detach().to("cpu", copy=True)
    return _collect_stages(state, dims, first=first)


def _collect_stages(state: dict[str, Tensor], dims: ParallelDims, *, first: bool) -> dict[str, Tensor]:
    """On rank 0, the tensors of the first rank of every stage; a tensor that several of them hold is sent once."""
    if dims.pp == 1 or not first:
        return state
    group, place = dims.group("pp"), dims.place()["pp"]
    tensors_of: list[Any] = [None] * dims.pp
    described = {name: (tuple(value.shape), value.dtype) for name, value in state.items()}
    distributed.all_gather_object(tensors_of, described, group=group)
    state_of_all, earlier = dict(state), set(tensors_of[0])
    for stage in range(1, dims.pp):
        for name in [name for name in tensors_of[stage] if name not in earlier]:
            if place == stage:
                distributed.send(state[name].contiguous(), group=group, group_dst=0)
            elif place == 0:
                shape, dtype = tensors_of[stage][name]
                state_of_all[name] = torch.empty(shape, dtype=dtype)
                distributed.recv(state_of_all[name], group=group, group_src=stage)
        earlier.update(tensors_of[stage])
    return state_of_all if place == 0 else {}


@torch.no_grad()
def _rebind(optimizer: Optimizer, before: Mapping[str, nn.Parameter], model: nn.Module) -> None:
    """Replace the parameters of `before` by those of `model` in `optimizer`, name by name.

    Groups keep their order and settings. The optimizer's state of a weight is kept, sharded like the weight. Raises
    ConfigError for a parameter that is not the model's.
    """
    names = {id(parameter): name for name, parameter in before.items()}
    after = dict(model.named_parameters())
    state: dict[Any, Any] = {}
    for group in optimizer.param_groups:
        strange = [p for p in group["params"] if id(p) not in names]
        if strange:
            raise ConfigError(
                f"The optimizer holds a parameter of shape {tuple(strange[0].shape)} that is not one of "
                f"{type(model).__name__}'s; shard the model whose parameters it updates."
            )
    for group in optimizer.param_groups:
        fresh = []
        for old in group["params"]:
            new = after[names[id(old)]]
            fresh.append(new)
            if old in optimizer.state:
                state[new] = {
                    key: alike(new, value)
                    if isinstance(value, Tensor) and value.shape == old.shape and value.ndim
                    else value
                    for key, value in optimizer.state[old].items()
                }
        group["params"] = fresh
    optimizer.state.clear()
    optimizer.state.update(state)
    if isinstance(optimizer, Contiguous):
        optimizer.lay_out_again()
