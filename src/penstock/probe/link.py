"""Speed of collectives between the ranks of a process group: time of a call of each kind, and bytes per second."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from penstock.config.machine import Link, LinkRates
from penstock.probe.rates import wait

_all_gather, _reduce_scatter = (
    # torch 2.13 warns of the older names, which are all that torch 2.11 has.
    getattr(distributed, new, None) or getattr(distributed, old)
    for new, old in (
        ("all_gather_single", "all_gather_into_tensor"),
        ("reduce_scatter_single", "reduce_scatter_tensor"),
    )
)

SMALL, LARGE = 64, 1 << 20
"""Elements that are sent to learn the cost of a call by itself, and the rate of many bytes."""
REPEATS = 9
BETWEEN_SECONDS, MEETINGS, TURNS = 5e-3, 10, 4
"""Seconds that ranks compute between two calls, calls in a series, and number of series, to learn the cost of
a call in a step. Tensor parallel layers of a few million weights meet as often."""
TURN_SECONDS = 0.125
"""Time that a rank computes to learn how fast it is: many turns of the scheduler."""


def measure_link(device: torch.device) -> Link:
    """Measure between the ranks, all of which call this at once; two or more. Every rank gets the same figures: of each
    call the time of the rank that waits longest. It takes about a second on a CPU, and two with more than two ranks,
    of which pairs are measured too.

    On a CPU a call's own time is that between products, in which ranks wait for whichever the machine held up. Right
    behind a barrier it is shorter.

    A gather's bandwidth counts (n - 1) / n of the bytes that each of n ranks ends with, an all-reduce's twice that
    (nccl-tests' bus bandwidth).
    """
    every, ranks = _link(device, None), distributed.get_world_size()
    if device.type != "cpu" or ranks == 2 or ranks % 2:
        return Link(**asdict(every))
    pair, _ = distributed.new_subgroups(2)  # type: ignore[no-untyped-call]
    pairs = _link(device, pair)
    distributed.destroy_process_group(pair)
    return Link(**asdict(every), pairs=pairs)


def _link(device: torch.device, group: ProcessGroup | None) -> LinkRates:
    """Within each `group` of this size while the others do the same, or between all ranks."""
    ranks, rank = distributed.get_world_size(group), distributed.get_rank()

    def numbers(count: int) -> Tensor:
        return torch.zeros(-(-count // ranks) * ranks, device=device)

    def reduced(count: int) -> float:
        values = numbers(count)
        return _seconds(lambda: distributed.all_reduce(values, group=group), device)

    whole = numbers(LARGE)
    part = whole.chunk(ranks)[rank % ranks].clone()

    def sent() -> None:
        # A pipeline's stages mostly send one way at a time.
        if rank % 2:
            distributed.recv(whole, rank - 1)
        elif rank + 1 < distributed.get_world_size():
            distributed.send(whole, rank + 1)

    call = reduced(SMALL)
    bytes_, share = float(whole.nbytes), (ranks - 1) / ranks

    def rate(elapsed: float, moved: float) -> float:
        return moved / max(elapsed - call, 0.1 * elapsed)

    return LinkRates(
        collective_bytes_per_second=rate(reduced(LARGE), 2.0 * share * bytes_),
        collective_seconds=max(call, _meeting(device, group)) if device.type == "cpu" else call,
        gather_bytes_per_second=rate(
            _seconds(lambda: _all_gather(whole, part, group=group), device), share * bytes_
        ),
        scatter_bytes_per_second=rate(
            _seconds(lambda: _reduce_scatter(part, whole, group=group), device), share * bytes_
        ),
        send_bytes_per_second=rate(_seconds(sent, device), bytes_),
    )


def alone_speedup(device: torch.device) -> float:
    """How many times as fast a rank multiplies while the others wait, where ranks share a CPU; all call this at once.
    It takes 0.5 s, and as long for each rank.
    """
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    products = _Products(device)
    shared = alone = 0
    # By turns, for the machine's speed changes. In a fixed time each, for one of a few products fits into one turn on
    # a processor, in which a rank is as fast as alone.
    for _ in range(TURNS):
        shared += products.done(TURN_SECONDS)
        for turn in range(ranks):
            alone += products.done(TURN_SECONDS if turn == rank else 0.0)
    products_done = _summed(torch.tensor([shared, alone], dtype=torch.float64, device=device))
    return max(1.0, float(products_done[1] / products_done[0]))


def _meeting(device: torch.device, group: ProcessGroup | None) -> float:
    """Seconds that a small all-reduce between products adds for a rank, on average."""
    products, few = _Products(device), torch.zeros(SMALL, device=device)
    longer = 0.0
    for _ in range(TURNS):
        longer -= products.seconds(MEETINGS)
        longer += products.seconds(MEETINGS, lambda: distributed.all_reduce(few, group=group))
    each = float(_summed(torch.tensor(longer, dtype=torch.float64, device=device)))
    return max(0.0, each / (distributed.get_world_size() * TURNS * MEETINGS))


class _Products:
    """Rows of products that take about `BETWEEN_SECONDS` where all ranks compute, as many on each rank."""

    def __init__(self, device: torch.device) -> None:
        drawn = torch.Generator(device=device).manual_seed(0)
        self.factor, self.count = torch.rand(384, 384, device=device, generator=drawn), 1
        self.seconds(8)
        once = torch.tensor(self.seconds(32) / 32, dtype=torch.float64, device=device)
        self.count = max(1, round(BETWEEN_SECONDS * distributed.get_world_size() / float(_summed(once))))

    def seconds(self, rows: int, after: Callable[[], object] = lambda: None) -> float:
        """Seconds of `rows` rows of products, with a call of `after` behind each."""
        distributed.barrier()
        start = time.perf_counter()
        for _ in range(rows):
            for _ in range(self.count):
                self.factor @ self.factor
            after()
        return time.perf_counter() - start

    def done(self, seconds: float) -> int:
        """Products in `seconds` seconds."""
        distributed.barrier()
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            self.factor @ self.factor
            count += 1
        return count


def _summed(values: Tensor) -> Tensor:
    distributed.all_reduce(values)
    return values


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median seconds of one call, of the rank for which it is longest."""
    times = []
    for _ in range(REPEATS):
        distributed.barrier()
        start = time.perf_counter()
        call()
        wait(device)
        times.append(time.perf_counter() - start)
    longest = torch.tensor(sorted(times)[REPEATS // 2], dtype=torch.float64, device=device)
    distributed.all_reduce(longest, op=distributed.ReduceOp.MAX)
    return float(longest)
