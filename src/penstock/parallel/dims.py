"""The degrees of parallelism, this rank's coordinates, and the groups of ranks over which it sums.

Ranks are numbered row by row of a mesh with the dimensions

    pp             pipeline stages
    dp_replicate   whole copies of the model
    dp_shard       ranks that shard one copy
    cp             parts of a sample's tokens
    tp             parts of each layer

so that the ranks that communicate most are neighbours, on one node if it is large enough. Experts are split over the
ranks of a stage by a separate mesh: `ep` neighbours hold every expert once, however they split other weights.

| quantity | ranks over which it is summed |
|---|---|
| a loss, gradients, counts of an evaluation | `LOSS`: they have different samples, or different tokens |
| the norm of the gradients | those with different gradients: `dp_shard` and `tp` through DTensor, then `pp` |
| gradients of experts | `REPLICAS_OF_EXPERTS`: they hold the same ones; each has summed its group's tokens |
| samples | none: ranks with the same coordinates in `DATA` have the same samples |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from penstock.config.plan import Plan
from penstock.config.rules import problems, require
from penstock.errors import ConfigError
from penstock.shards import EXPERT

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Dimensions of the mesh, from the outermost to the innermost."""
DATA = ("dp_replicate", "dp_shard")
"""Ranks with different samples."""
SHARD = ("dp_shard", "cp")
"""Ranks that shard one copy of the model."""
LOSS = (*DATA, "cp")
"""Ranks whose losses and gradients are averaged."""
REPLICAS_OF_EXPERTS = ("expert_replicate", "expert_shard")
"""Ranks that hold the same experts: whole copies, and those that shard one copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDims:
    """The degrees of one run, with the coordinates of one of its ranks."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    expert_shard: int = 1
    """Ranks that shard the experts that each of them holds."""
    rank: int = 0
    mesh: DeviceMesh | None = None
    """Both data parallel dimensions, and the others with a degree above 1; None if a single process trains."""
    expert_mesh: DeviceMesh | None = None
    """The ranks of `mesh` with the dimensions pp, `REPLICAS_OF_EXPERTS` and `EXPERT`; None if ep is 1."""
    groups: Mapping[tuple[str, ...], distributed.ProcessGroup] = field(default_factory=dict)
    """Groups over several dimensions, except over all."""

    @classmethod
    def of(cls, plan: Plan, *, rank: int = 0) -> ParallelDims:
        """The degrees of a Plan, not yet connected to processes."""
        # Ranks that split a sample's tokens count in `plan.shard`.
        shard = {"ddp": 1, "hsdp": plan.shard // plan.cp}.get(plan.sharding, plan.dp)
        sharing = 1 if plan.sharding == "ddp" else shard * plan.cp * plan.tp
        return cls(
            pp=plan.pp, dp_replicate=plan.dp // shard, dp_shard=shard, cp=plan.cp, tp=plan.tp, ep=plan.ep, rank=rank,
            expert_shard=sharing // math.gcd(sharing, plan.ep),
        )  # fmt: skip

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.degree(*DIMENSIONS)

    @property
    def alone(self) -> bool:
        """Whether a single process trains."""
        return self.size == 1

    @property
    def main(self) -> bool:
        """Whether this is the rank that writes and displays."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """This rank's share of the samples, a number below `data_world`."""
        place = self.place()
        return place["dp_replicate"] * self.dp_shard + place["dp_shard"]

    @property
    def random_rank(self) -> int:
        """Number of this rank's stream of random numbers; ranks that split each layer share a stream."""
        return self.rank - self.place()["tp"]

    @property
    def data_world(self) -> int:
        """Number of shares that the samples are split into."""
        return self.degree(*DATA)

    def degree(self, *names: str) -> int:
        """Product of some dimensions' degrees."""
        return math.prod(int(getattr(self, name)) for name in names)

    def place(self) -> dict[str, int]:
        """This rank's coordinates, by dimension."""
        place, number = {}, self.rank
        for name in reversed(DIMENSIONS):
            number, place[name] = divmod(number, self.degree(name))
        return place

    def group(self, *names: str) -> distributed.ProcessGroup | None:
        """The group of ranks that differ from this one only in these dimensions, which must have several; None for all
        ranks."""
        wide = tuple(name for name in names if self.degree(name) > 1)
        if self.degree(*wide) == self.size:
            return None
        if len(wide) > 1:
            return self.groups[wide]
        assert self.mesh is not None
        return self.mesh.get_group(wide[0])

    def shard_mesh(self) -> DeviceMesh:
        """The ranks that shard one copy of the model: along `dp_shard`, and along `cp` if that is used."""
        assert self.mesh is not None
        if self.cp == 1:
            return self.mesh["dp_shard"]
        # The mesh stores it under its name, so later calls make no further groups.
        return self.mesh[SHARD]._flatten("shard")

    def replicas_mesh(self) -> DeviceMesh:
        """A mesh of two dimensions: whole copies of the model, and the ranks that shard each."""
        assert self.mesh is not None
        if self.cp == 1:
            return self.mesh[DATA]
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh._concatenate([self.mesh["dp_replicate"], self.shard_mesh()])

    def expert_replicas_mesh(self) -> DeviceMesh:
        """The ranks that hold the same experts, as a mesh for `fully_shard`."""
        assert self.expert_mesh is not None
        copies = self.size // (self.pp * self.ep * self.expert_shard)
        return self.expert_mesh[REPLICAS_OF_EXPERTS if copies > 1 else REPLICAS_OF_EXPERTS[1]]

    def connect(self, device: torch.device) -> ParallelDims:
        """A copy with mesh and groups, made from the existing process group. All ranks must call this. The same degrees
        reuse the same groups: each group has its own threads, and torch frees none.
        """
        if self.alone:
            return self
        world = distributed.group.WORLD
        key = (device.type, *(self.degree(name) for name in DIMENSIONS), self.ep, self.expert_shard)
        connected = _CONNECTED.get(key)
        if connected is None or connected[0] is not world:
            connected = _CONNECTED[key] = (world, *self._connected(device))
        return replace(self, mesh=connected[1], groups=connected[2], expert_mesh=connected[3])

    def _connected(
        self, device: torch.device
    ) -> tuple[DeviceMesh, dict[tuple[str, ...], distributed.ProcessGroup], DeviceMesh | None]:
        from torch.distributed.device_mesh import init_device_mesh

        # A dimension costs a process group even if its degree is 1; sharding refers to these two by name.
        names = tuple(name for name in DIMENSIONS if name in DATA or self.degree(name) > 1)
        shape = tuple(self.degree(name) for name in names)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        groups: dict[tuple[str, ...], distributed.ProcessGroup] = {}
        wide = tuple(name for name in LOSS if self.degree(name) > 1)
        if len(wide) > 1 and self.degree(*wide) < self.size:
            own_group, _ = distributed.new_subgroups_by_enumeration(self._ranks_by(wide))  # type: ignore[no-untyped-call]
            groups[wide] = own_group
        experts: DeviceMesh | None = None
        if self.ep > 1:
            names, inner = ("pp", *REPLICAS_OF_EXPERTS, EXPERT), self.ep * self.expert_shard
            shape = (self.pp, self.size // (self.pp * inner), self.expert_shard, self.ep)
            experts = init_device_mesh(device.type, shape, mesh_dim_names=names)
        return mesh, groups, experts

    def _ranks_by(self, names: tuple[str, ...]) -> list[list[int]]:
        """All ranks, grouped into sets that differ only in these dimensions."""
        sets: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            place = replace(self, rank=rank).place()
            sets.setdefault(tuple(place[name] for name in DIMENSIONS if name not in names), []).append(rank)
        return list(sets.values())


_CONNECTED: dict[tuple[Any, ...], tuple[Any, Any, Any, Any]] = {}
"""By device and degrees: the process group of all ranks, the mesh made from it, its groups over several dimensions, the
experts' mesh."""

ALONE = ParallelDims()
"""The dims of a process that trains alone."""


def require_size(plan: Plan, size: int) -> None:
    """Raise `ConfigError` unless the Plan needs `size` processes, naming Plans for that number.

    A Plan that cannot run at all is refused for that reason: no number of processes would help.
    """
    require(plan, run=True)
    if plan.gpus == size:
        return
    if size == 1:
        raise ConfigError(
            f"{_degrees(plan)} needs {plan.gpus} processes, and this is one by itself; start them with "
            f"`torchrun --nproc-per-node {plan.gpus} -m penstock train …`, or leave these out."
        )
    raise ConfigError(
        f"The launcher started {size} processes, but the plan is for {plan.gpus} ({_degrees(plan)}). "
        f"{_remedy(plan, size)}"
    )


def _degrees(plan: Plan) -> str:
    """The degrees that need several processes, in words."""
    degrees = [f"plan.{name}={value}" for name in ("pp", "cp", "tp") if (value := getattr(plan, name)) > 1]
    return " × ".join([*degrees, f"plan.dp={plan.dp}"] if plan.dp > 1 or not degrees else degrees)


def _remedy(plan: Plan, size: int) -> str:
    try:
        fitted = fit_to_ranks(plan, size)
    except ConfigError as error:
        return str(error)
    same = f"micro_batch={fitted.micro_batch} accumulate={fitted.accumulate}"
    return (
        f"Start {plan.gpus} processes, or use plan.dp={fitted.dp}, with {same} to keep the global batch of "
        f"{plan.global_batch}."
    )


def fit_to_ranks(plan: Plan, size: int) -> Plan:
    """The Plan for another number of ranks with the same global batch, so that a run can continue with the remaining
    ranks: only the number of replicas changes. Micro-batches keep their size if that divides the batch, else they
    shrink to a size that does.

    Raises `ConfigError` with the numbers of ranks that divide the batch, if `size` does not.
    """
    batch, each_replica = plan.global_batch, plan.gpus // plan.dp
    fits = valid_sizes(plan, up_to=max(size, plan.gpus))
    if size not in fits:
        replica_words = f", each of {each_replica} ranks" if each_replica > 1 else ""
        raise ConfigError(
            f"The global batch of {batch} samples (plan.micro_batch={plan.micro_batch} × "
            f"plan.accumulate={plan.accumulate} × plan.dp={plan.dp}{replica_words}) cannot be split evenly over {size} "
            f"ranks in groups of plan.shard={plan.shard}. It can by {', '.join(map(str, fits))}."
        )
    replicas = size // each_replica
    per_replica = batch // replicas
    micro = max(m for m in range(1, min(plan.micro_batch, per_replica) + 1) if per_replica % m == 0)
    return replace(plan, dp=replicas, micro_batch=micro, accumulate=per_replica // micro)


def valid_sizes(plan: Plan, *, up_to: int) -> list[int]:
    """Numbers of ranks, at most `up_to`, whose replicas split the Plan's global batch evenly."""
    each_replica = plan.gpus // plan.dp
    return [
        n * each_replica
        for n in range(1, up_to // each_replica + 1)
        if plan.global_batch % n == 0 and not problems(replace(plan, dp=n))
    ]
