"""Times of calls, and from them the rates of memory, launches, pages and of collectives between ranks."""

from __future__ import annotations

import ctypes
import mmap
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from penstock.config.machine import Link, LinkRates
from penstock.report import record

_PAGE_BYTES = 4096
_sharing = ContextVar("_sharing", default=0.0)
"""Elapsed over processor time of a computing rank, where ranks measure together; 0 where they do not."""
_WAITS_SECONDS = 1.0
"""Time that ranks compute to learn how long they wait: many turns of the scheduler."""


@contextmanager
def shared(device: torch.device) -> Iterator[None]:
    """Context in which the ranks of a process group begin each measurement together: processes that share a machine
    then measure what each gets while the others do the same work."""
    token = _sharing.set(_waits(device))
    try:
        yield
    finally:
        _sharing.reset(token)


def agreed(value: float) -> float:
    """The largest `value` over the ranks, or `value` itself where this process measures alone. Ranks decide by it what
    to measure together: with a decision each they would wait for each other for ever."""
    return _over_ranks(value, torch.device("cpu"), largest=True) if _sharing.get() else value


def _waits(device: torch.device) -> float:
    """Elapsed time over processor time of a computing rank, averaged over ranks: with more ranks than processors they
    take turns. A short measurement fits into one turn and does not show the wait, nor does processor time."""
    if _clock(device) is not time.process_time:
        return 1.0
    factor = torch.rand(384, 384)
    distributed.barrier()
    start, worked = time.perf_counter(), time.process_time()
    while time.perf_counter() - start < _WAITS_SECONDS:
        factor @ factor
    ratio = (time.perf_counter() - start) / (time.process_time() - worked)
    return max(1.0, _over_ranks(ratio, device) / distributed.get_world_size())


def seconds(call: Callable[[], object], device: torch.device, budget: float) -> float:
    """Median seconds of one `call`, repeated for about `budget` seconds and at least three times, after a warm-up. A
    step too takes the median time while other guests of the host come and go."""
    sharing = _sharing.get()
    if sharing:
        distributed.barrier()
    waits = sharing if sharing and _clock(device) is time.process_time else 1.0
    call()
    once = _time(call, device, 1)
    if once > budget:
        return once * waits
    # Short calls are timed in batches of at least a millisecond, so that the clock and a GPU's queue do not matter.
    batch = max(1, min(1000, int(1e-3 / max(once, 1e-7))))
    rounds = max(3, min(50, int(budget / max(once * batch, 1e-7))))
    return statistics.median(_time(call, device, batch) for _ in range(rounds)) * waits


def _clock(device: torch.device) -> Callable[[], float]:
    """The clock for `device`: processor time for one thread's work, because other processes lengthen it less than
    wall-clock time."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time if alone else time.perf_counter


def wait(device: torch.device) -> None:
    """Wait until a device has finished all work in its queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _time(call: Callable[[], object], device: torch.device, batch: int) -> float:
    """Seconds of one of `batch` calls."""
    wait(device)
    clock = _clock(device)
    start = clock()
    for _ in range(batch):
        call()
    wait(device)
    return (clock() - start) / batch


def memory_bandwidth(device: torch.device, budget: float) -> float:
    """Bytes per second of an addition of two arrays into a third (STREAM's ADD), larger than any cache."""
    elements = 2**24 if device.type == "cpu" else 2**27
    a, b = torch.ones(2, elements, device=device)
    out = torch.empty_like(a)
    return 3.0 * float(a.nbytes) / seconds(lambda: torch.add(a, b, out=out), device, budget)


def launch_seconds(device: torch.device) -> float:
    """The cost of one small operator in a long sequence of them; each allocates its output, as in any model."""
    a, b = torch.ones(2, 16, device=device)
    return seconds(lambda: torch.add(a, b), device, 0.05)


def page_seconds() -> float:
    """How much longer the first access to a page takes than a later one: the kernel clears and maps it."""
    size = 2**26

    def fill(memory: mmap.mmap) -> float:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        # One thread does all of it, with the kernel's part. The wall clock would add other processes' time.
        start = time.thread_time()
        ctypes.memset(address, 1, size)
        return time.thread_time() - start

    extra = []
    for _ in range(5):
        # Private, like allocated memory: pages that processes could share take longer.
        with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            extra.append(fill(memory) - fill(memory))
    return max(0.0, statistics.median(extra)) / (size // _PAGE_BYTES)


def memory_bytes(device: torch.device) -> float:
    """Memory of the GPU, or of this computer or its container."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(record.memory_bytes())


# -- speed of collectives between the ranks of a process group


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
a call in a step. Ranks of tensor-parallel layers with a few million weights communicate as often."""
TURN_SECONDS = 0.125
"""Time that a rank computes to learn how fast it is: many turns of the scheduler."""


def measure_link(device: torch.device) -> Link:
    """Measure collectives between two or more ranks, all of which call this at once. Every rank gets the same figures:
    the time of each call on the rank that waits longest. It takes about a second on a CPU, and two seconds with more
    than two ranks, because pairs are measured too.

    On a CPU a call is timed between matrix products, where ranks wait for the one that the machine delayed. Right after
    a barrier it would be shorter.

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
    """Measure within `group` while all groups of its size do the same, or between all ranks if it is None."""
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

    large = reduced(LARGE)  # all ranks measure in this order
    call_in_step = max(call, _meeting(device, group)) if device.type == "cpu" else call
    gather = _seconds(lambda: _all_gather(whole, part, group=group), device)
    scatter = _seconds(lambda: _reduce_scatter(part, whole, group=group), device)
    return LinkRates(
        collective_bytes_per_second=rate(large, 2.0 * share * bytes_), collective_seconds=call_in_step,
        gather_bytes_per_second=rate(gather, share * bytes_), scatter_bytes_per_second=rate(scatter, share * bytes_),
        send_bytes_per_second=rate(_seconds(sent, device), bytes_),
    )  # fmt: skip


def alone_speedup(device: torch.device) -> float:
    """How many times faster a rank multiplies while the others wait, where ranks share a CPU; all ranks call this at
    once. It takes 0.5 s, and 0.5 s more for each rank.
    """
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    products = _Products(device)
    shared = alone = 0
    # In turns, because the machine's speed changes; for a fixed time each, because a few products would fit into one
    # turn on a processor, in which a rank is as fast as alone.
    for _ in range(TURNS):
        shared += products.done(TURN_SECONDS)
        for turn in range(ranks):
            alone += products.done(TURN_SECONDS if turn == rank else 0.0)
    return max(1.0, _over_ranks(alone, device) / _over_ranks(shared, device))


def _meeting(device: torch.device, group: ProcessGroup | None) -> float:
    """Seconds that a small all-reduce between products adds for a rank, on average."""
    products, few = _Products(device), torch.zeros(SMALL, device=device)
    longer = 0.0
    for _ in range(TURNS):
        longer -= products.seconds(MEETINGS)
        longer += products.seconds(MEETINGS, lambda: distributed.all_reduce(few, group=group))
    return max(0.0, _over_ranks(longer, device) / (distributed.get_world_size() * TURNS * MEETINGS))


class _Products:
    """A number of matrix products, the same on each rank, that take about `BETWEEN_SECONDS` while all ranks compute."""

    def __init__(self, device: torch.device) -> None:
        drawn = torch.Generator(device=device).manual_seed(0)
        self.factor, self.count = torch.rand(384, 384, device=device, generator=drawn), 1
        self.seconds(8)
        mean = _over_ranks(self.seconds(32) / 32, device) / distributed.get_world_size()
        self.count = max(1, round(BETWEEN_SECONDS / mean))

    def seconds(self, rows: int, after: Callable[[], object] = lambda: None) -> float:
        """Seconds of `rows` sequences of matrix products, each followed by a call of `after`."""
        distributed.barrier()
        start = time.perf_counter()
        for _ in range(rows):
            for _ in range(self.count):
                self.factor @ self.factor
            after()
        return time.perf_counter() - start

    def done(self, seconds: float) -> int:
        """Number of matrix products computed in `seconds` seconds."""
        distributed.barrier()
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            self.factor @ self.factor
            count += 1
        return count


def _over_ranks(value: float, device: torch.device, *, largest: bool = False) -> float:
    """The sum of a value over the ranks, or the `largest`; all ranks call this."""
    values = torch.tensor(value, dtype=torch.float64, device=device)
    distributed.all_reduce(values, op=distributed.ReduceOp.MAX if largest else distributed.ReduceOp.SUM)
    return float(values)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median seconds of one call on the rank where it takes longest."""
    times = []
    for _ in range(REPEATS):
        distributed.barrier()
        start = time.perf_counter()
        call()
        wait(device)
        times.append(time.perf_counter() - start)
    return _over_ranks(statistics.median(times), device, largest=True)
