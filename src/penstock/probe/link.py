"""What collectives between the ranks of a process group take: a call of each kind, and its bytes per second."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, distributed

from penstock.config.machine import Link

SMALL, LARGE = 64, 1 << 20
"""Numbers that are sent to learn what a call costs by itself, and how fast many bytes are."""
REPEATS = 9


def measure_link(device: torch.device) -> Link:
    """Measure between the ranks, all of which call this at once; two or more. Every rank gets the same figures: of each
    call the time of the rank that waits longest. It takes about 0.3 s on a CPU.

    A gather's bandwidth counts (n - 1) / n of the bytes that each of n ranks ends with, an all-reduce's twice that
    (nccl-tests' bus bandwidth).
    """
    ranks, rank = distributed.get_world_size(), distributed.get_rank()

    def numbers(count: int) -> Tensor:
        return torch.zeros(-(-count // ranks) * ranks, device=device)

    def reduced(count: int) -> float:
        values = numbers(count)
        return _seconds(lambda: distributed.all_reduce(values), device)

    whole = numbers(LARGE)
    part = whole.chunk(ranks)[rank].clone()

    def sent() -> None:
        # A pipeline's stages mostly send one way at a time.
        if rank % 2:
            distributed.recv(whole, rank - 1)
        elif rank + 1 < ranks:
            distributed.send(whole, rank + 1)

    call = reduced(SMALL)
    bytes_, share = float(whole.nbytes), (ranks - 1) / ranks

    def rate(taken: float, moved: float) -> float:
        return moved / max(taken - call, 0.1 * taken)

    return Link(
        collective_bytes_per_second=rate(reduced(LARGE), 2.0 * share * bytes_),
        collective_seconds=call,
        gather_bytes_per_second=rate(
            _seconds(lambda: distributed.all_gather_into_tensor(whole, part), device), share * bytes_
        ),
        scatter_bytes_per_second=rate(
            _seconds(lambda: distributed.reduce_scatter_tensor(part, whole), device), share * bytes_
        ),
        send_bytes_per_second=rate(_seconds(sent, device), bytes_),
    )


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median seconds of one call, of the rank for which it is longest."""
    taken = []
    for _ in range(REPEATS):
        distributed.barrier()
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    longest = torch.tensor(sorted(taken)[REPEATS // 2], dtype=torch.float64, device=device)
    distributed.all_reduce(longest, op=distributed.ReduceOp.MAX)
    return float(longest)
