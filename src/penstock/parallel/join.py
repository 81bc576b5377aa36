"""Joins this process to the process group of its run, and chooses its device."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from traceback import extract_tb

import torch
from torch import distributed
from torch.distributed import distributed_c10d

from penstock.config.plan import Plan
from penstock.config.run import WAIT_SECONDS
from penstock.errors import EnvironmentProblem, Hang
from penstock.parallel.dims import ALONE, ParallelDims, require_size


def launched() -> int:
    """Number of processes that the launcher started, from `WORLD_SIZE`; 1 without a launcher."""
    if "RANK" not in os.environ:
        return 1
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_device(device: torch.device) -> torch.device:
    """The device of this rank on its node: under a launcher, `cuda` means the GPU with the number `LOCAL_RANK`."""
    if str(device) != "cuda" or launched() == 1:  # a GPU with a number is that GPU
        return device
    local, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= gpus:
        raise EnvironmentProblem(
            f"Process {local} of this node has no GPU of its own: the node has {gpus}. Start at most {gpus} "
            "processes per node."
        )
    return torch.device("cuda", local)


_PACKAGE = Path(__file__).parents[1]
_IN_VAIN = re.compile("timed out waiting", re.IGNORECASE)
"""Words of gloo's error; nccl's own watchdog ends the process."""


@contextmanager
def joined(plan: Plan, device: torch.device, *, timeout: float = WAIT_SECONDS) -> Iterator[ParallelDims]:
    """Make this process one of the ranks that `torchrun` or `penstock launch` started, inside the context.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. An existing process group is used and kept;
    otherwise one is made (gloo, plus nccl for tensors on GPUs) and destroyed. A collective of any group made inside
    ends after `timeout` seconds without an answer from a peer.

    Raises:
        Hang: another rank did not answer.
        ConfigError: the Plan's degrees do not match the number of ranks.
    """
    size = distributed.get_world_size() if distributed.is_initialized() else launched()
    require_size(plan, size)
    if size == 1:
        yield ALONE
        return
    creates = not distributed.is_initialized()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if creates:
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(seconds=timeout),
            device_id=device if device.type == "cuda" else None,
        )
    try:
        with _timeouts(timeout) if creates else nullcontext():
            yield dims_of(plan, device)
            if creates:
                distributed.barrier()  # else a rank that leaves first breaks the other ranks' connections
    finally:
        if creates:
            distributed.destroy_process_group()


@contextmanager
def _timeouts(seconds: float) -> Iterator[None]:
    """Set the timeout of new groups inside, an argument that torch's meshes lack; a rank whose wait times out reports
    where."""
    torchs = vars(distributed_c10d)
    usual = {name: torchs[name] for name in ("default_pg_timeout", "default_pg_nccl_timeout")}
    try:
        torchs.update(dict.fromkeys(usual, timedelta(seconds=seconds)))
        yield
    except RuntimeError as error:
        if not _IN_VAIN.search(str(error)):
            raise
        frames = (
            f.name for f in extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(_PACKAGE)
        )
        where = " > ".join(name for name in frames if name not in ("joined", "_timeouts"))
        raise Hang(
            f"Rank {distributed.get_rank()} waited {seconds:g} s for another rank, which hangs or takes longer than "
            f"that, in {where}. `penstock launch` restarts all ranks, and with a lower --hang-seconds shows where "
            "each waits. Where one rank rightly takes so long, raise wait_seconds."
        ) from error
    finally:
        torchs.update(usual)


def dims_of(plan: Plan, device: torch.device | str) -> ParallelDims:
    """This rank's dims in an existing process group, for code that made the group itself. Raises as `joined` does."""
    size = distributed.get_world_size() if distributed.is_initialized() else 1
    require_size(plan, size)
    if size == 1:
        return ALONE
    return ParallelDims.of(plan, rank=distributed.get_rank()).connect(torch.device(device))
