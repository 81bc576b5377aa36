"""The processes that train together: how this one joins them, and where it stands among them.

Data parallel ranks are numbered replica group by replica group: rank = group · shard + place in the group, so that the
ranks of one sharding group are neighbours, on one node as long as it holds them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import distributed

from penstock.config.plan import Plan
from penstock.errors import ConfigError, EnvironmentProblem

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

REPLICATE, SHARD = "replicate", "shard"
"""Names of the mesh's dimensions: whole copies of the model, and the ranks that share one copy out among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """All processes of a run, seen from one of them."""

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    """Of the data parallel ranks, (replicate, shard); None where one process trains alone."""

    @property
    def main(self) -> bool:
        """Whether this rank is the one that writes and displays."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether there is nobody to talk to."""
        return self.mesh is None


ALONE = World()
"""A process that trains by itself."""


def launched() -> int:
    """How many processes the launcher started, from `WORLD_SIZE`; 1 where there is no launcher."""
    if "RANK" not in os.environ:
        return 1
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_device(device: torch.device) -> torch.device:
    """The device of this rank on its node: with a launcher, `cuda` means the GPU whose number is `LOCAL_RANK`."""
    if str(device) != "cuda" or launched() == 1:  # a GPU that was named by number is taken at its word
        return device
    local, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= found:
        raise EnvironmentProblem(
            f"Process {local} of this node has no GPU of its own: the node has {found}. Start at most {found} "
            "processes per node."
        )
    return torch.device("cuda", local)


@contextmanager
def joined(plan: Plan, device: torch.device, *, timeout: float = 1800.0) -> Iterator[World]:
    """Inside, this process belongs to the ranks that `torchrun` or `penstock launch` started, and is one of them.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. A process group that is there already is used and
    left standing; otherwise one is made (gloo, and nccl beside it for tensors on GPUs) and ended. `timeout` seconds
    without an answer from a peer end a collective with an error.

    Raises:
        ConfigError: the Plan's degrees are not those of the ranks there are.
    """
    size = distributed.get_world_size() if distributed.is_initialized() else launched()
    require_size(plan, size)
    if size == 1:
        yield ALONE
        return
    own = not distributed.is_initialized()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if own:
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(seconds=timeout),
            device_id=device if device.type == "cuda" else None,
        )
    try:
        yield World(rank=distributed.get_rank(), size=size, mesh=_mesh(plan, device))
        if own:
            distributed.barrier()  # who leaves first breaks the connections of those still at work
    finally:
        if own:
            distributed.destroy_process_group()


def world_of(plan: Plan, device: torch.device | str) -> World:
    """The World of the process group that stands, for code that joined by itself. Raises as `joined` does."""
    size = distributed.get_world_size() if distributed.is_initialized() else 1
    require_size(plan, size)
    if size == 1:
        return ALONE
    return World(rank=distributed.get_rank(), size=size, mesh=_mesh(plan, torch.device(device)))


def require_size(plan: Plan, size: int) -> None:
    """Raise `ConfigError` unless `size` processes are what the Plan needs; says which Plans these could run.

    A Plan that no processes can run is refused for that: starting as many as it takes would not help.
    """
    plan.refuse_unrunnable()
    if plan.gpus == size:
        return
    if size == 1:
        raise ConfigError(
            f"plan.dp={plan.dp} needs {plan.gpus} processes, and this is one by itself; start them with "
            f"`torchrun --nproc-per-node {plan.gpus} -m penstock train …`, or use plan.dp=1."
        )
    raise ConfigError(
        f"The launcher started {size} processes, but the plan is for {plan.gpus} (plan.dp={plan.dp}). "
        f"{_remedy(plan, size)}"
    )


def _remedy(plan: Plan, size: int) -> str:
    try:
        other = fit_to_world(plan, size)
    except ConfigError as error:
        return str(error)
    same = f"micro_batch={other.micro_batch} accumulate={other.accumulate}"
    return (
        f"Start {plan.gpus} processes, or use plan.dp={size}, with {same} if the global batch of "
        f"{plan.global_batch} shall stay."
    )


def fit_to_world(plan: Plan, size: int) -> Plan:
    """The Plan for another number of data parallel ranks that keeps the global batch, so that a run can go on with as
    many ranks as are left. Micro-batches stay as large as they are where that divides, else shrink to what does.

    Raises `ConfigError` with the numbers of ranks that do divide the batch, if `size` does not.
    """
    from dataclasses import replace

    batch = plan.global_batch
    fits = [n for n in valid_sizes(plan, up_to=max(size, plan.dp)) if n == size]
    if not fits:
        sizes = ", ".join(str(n) for n in valid_sizes(plan, up_to=max(size, plan.dp)))
        raise ConfigError(
            f"The global batch of {batch} samples (plan.micro_batch={plan.micro_batch} × "
            f"plan.accumulate={plan.accumulate} × plan.dp={plan.dp}) cannot be shared out evenly by {size} ranks in "
            f"groups of plan.shard={plan.shard}. It can by {sizes}."
        )
    each = batch // size
    micro = max(m for m in range(1, min(plan.micro_batch, each) + 1) if each % m == 0)
    return replace(plan, dp=size, micro_batch=micro, accumulate=each // micro)


def valid_sizes(plan: Plan, *, up_to: int) -> list[int]:
    """Numbers of data parallel ranks, at most `up_to`, that share the Plan's global batch out evenly."""
    return [n for n in range(1, up_to + 1) if plan.global_batch % n == 0 and n % plan.shard == 0]


def _mesh(plan: Plan, device: torch.device) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    shard = {"ddp": 1, "hsdp": plan.shard}.get(plan.sharding, plan.dp)
    return init_device_mesh(device.type, (plan.dp // shard, shard), mesh_dim_names=(REPLICATE, SHARD))
