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

from penstock.report import record

_PAGE_BYTES = 4096
_sharing = ContextVar("_sharing", default=False)


@contextmanager
def shared() -> Iterator[None]:
    """Inside, the ranks of a process group begin each measurement together: processes that share a machine then find
    what each of them gets of it while the others do the same work."""
    token = _sharing.set(True)
    try:
        yield
    finally:
        _sharing.reset(token)


def seconds(call: Callable[[], object], device: torch.device, budget: float) -> float:
    """Median time of one `call` over about `budget` seconds, three times at least, after a warm-up: what a step gets,
    too, where other guests of a host come and go."""
    if _sharing.get():
        torch.distributed.barrier()
    call()
    start = time.perf_counter()
    once = _time(call, device, 1)
    if once > budget:
        return once * _waits(device, start, once)
    # Short calls are timed in batches of at least a millisecond, so that the clock and a GPU's queue do not matter.
    batch = max(1, min(1000, int(1e-3 / max(once, 1e-7))))
    rounds = max(3, min(50, int(budget / max(once * batch, 1e-7))))
    taken = [_time(call, device, batch) for _ in range(rounds)]
    return statistics.median(taken) * _waits(device, start, once + batch * sum(taken))


def _waits(device: torch.device, start: float, worked: float) -> float:
    """What ranks that share processors wait for these in turns, which their own time does not show: the time since
    `start` over what this one `worked`."""
    hidden = _sharing.get() and _clock(device) is time.process_time
    return max(1.0, (time.perf_counter() - start) / worked) if hidden else 1.0


def _clock(device: torch.device) -> Callable[[], float]:
    """One thread's work is timed in its processor time, which other processes lengthen less than the wall clock's."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time if alone else time.perf_counter


def _time(call: Callable[[], object], device: torch.device, batch: int) -> float:
    """Seconds of one of `batch` calls."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    clock = _clock(device)
    start = clock()
    for _ in range(batch):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
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
        with mmap.mmap(-1, size) as memory:
            extra.append(fill(memory) - fill(memory))
    return max(0.0, statistics.median(extra)) / (size // _PAGE_BYTES)


def memory_bytes(device: torch.device) -> float:
    """Memory of the GPU, or of this computer or its container."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(record.memory_bytes())
