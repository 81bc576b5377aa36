"""How long calls take, and the rates of memory, launches and pages that follow."""

from __future__ import annotations

import ctypes
import mmap
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import distributed

from penstock.report import record

_PAGE_BYTES = 4096
_sharing = ContextVar("_sharing", default=0.0)
"""Elapsed over processor time of a computing rank, where ranks measure together; 0 where they do not."""
_WAITS_SECONDS = 1.0
"""Time that ranks compute to learn how long they wait: many turns of the scheduler."""


@contextmanager
def shared(device: torch.device) -> Iterator[None]:
    """Inside, the ranks of a process group begin each measurement together: processes that share a machine then find
    what each of them gets of it while the others do the same work."""
    token = _sharing.set(_waits(device))
    try:
        yield
    finally:
        _sharing.reset(token)


def agreed(value: float) -> float:
    """The largest value over the ranks of a figure by which they choose what to measure together; `value` where this
    process measures alone. Ranks that chose by their own figures would wait for each other for ever."""
    if not _sharing.get():
        return value
    largest = torch.tensor(value, dtype=torch.float64)
    distributed.all_reduce(largest, op=distributed.ReduceOp.MAX)
    return float(largest)


def _waits(device: torch.device) -> float:
    """Elapsed over processor time of a computing rank, on average over ranks: with more ranks than processors they wait
    for these in turns. One short measurement fits into a turn and does not show it, nor does processor time."""
    if _clock(device) is not time.process_time:
        return 1.0
    factor = torch.rand(384, 384)
    distributed.barrier()
    start, worked = time.perf_counter(), time.process_time()
    while time.perf_counter() - start < _WAITS_SECONDS:
        factor @ factor
    ratio = (time.perf_counter() - start) / (time.process_time() - worked)
    ratio_sum = torch.tensor(ratio, dtype=torch.float64)
    distributed.all_reduce(ratio_sum)
    return max(1.0, float(ratio_sum) / distributed.get_world_size())


def seconds(call: Callable[[], object], device: torch.device, budget: float) -> float:
    """Median time of one `call` over about `budget` seconds, three times at least, after a warm-up: what a step gets,
    too, where other guests of a host come and go."""
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
    """One thread's work is timed in its processor time, which other processes lengthen less than the wall clock's."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time if alone else time.perf_counter


def wait(device: torch.device) -> None:
    """Return when a device has computed all that it was given."""
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
    """The cost of one small operator in a long row of them; each allocates its output, as in any model."""
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
        # Private, as what is allocated is: pages that processes could share take longer.
        with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            extra.append(fill(memory) - fill(memory))
    return max(0.0, statistics.median(extra)) / (size // _PAGE_BYTES)


def memory_bytes(device: torch.device) -> float:
    """Memory of the GPU, or of this computer or its container."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(record.memory_bytes())
