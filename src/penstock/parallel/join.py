"""How this process joins the others that train with it, and finds its device among theirs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import distributed

from penstock.config.plan import Plan
from penstock.errors import EnvironmentProblem
from penstock.parallel.dims import ALONE, ParallelDims, require_size


def launched() -> int:
    """How many processes the launcher started, from `WORLD_SIZE`; 1 where there is no launcher."""
    if "RANK" not in os.environ:
        return 1
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_device(device: torch.device) -> torch.device:
    """The device of this rank on its node: with a launcher, `cuda` means the GPU whose number is `LOCAL_RANK`."""
    if str(device) != "cuda" or launched() == 1:  # a GPU given by number is that GPU
        return device
    local, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= found:
        raise EnvironmentProblem(
            f"Process {local} of this node has no GPU of its own: the node has {found}. Start at most {found} "
            "processes per node."
        )
    return torch.device("cuda", local)


@contextmanager
def joined(plan: Plan, device: torch.device, *, timeout: float = 1800.0) -> Iterator[ParallelDims]:
    """Inside, this process belongs to the ranks that `torchrun` or `penstock launch` started, and is one of them.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. An existing process group is used and kept;
    otherwise one is made (gloo, and nccl beside it for tensors on GPUs) and ended. `timeout` seconds
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
        yield dims_of(plan, device)
        if own:
            distributed.barrier()  # a rank that leaves first breaks the connections of the others
    finally:
        if own:
            distributed.destroy_process_group()


def dims_of(plan: Plan, device: torch.device | str) -> ParallelDims:
    """This rank's place in the existing process group, for code that made one itself. Raises as `joined` does."""
    size = distributed.get_world_size() if distributed.is_initialized() else 1
    require_size(plan, size)
    if size == 1:
        return ALONE
    return ParallelDims.of(plan, rank=distributed.get_rank()).connect(torch.device(device))
