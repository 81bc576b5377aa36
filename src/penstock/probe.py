"""Measure a machine: matrix products, memory, the cost of one operator, and all-reduce where ranks are connected.

Every rate is the lower quartile of repeated calls' times, because other processes can only lengthen them; matrices
are random (zeros draw less power and run faster on GPUs). A probe leaves nothing behind: torch's precision settings,
its random state and its gradient mode are as they were.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F

from penstock.config.machine import (
    GemmSample,
    Machine,
    cache_path,
    cached_machine,
    match_datasheet,
    save_machine,
)
from penstock.errors import EnvironmentProblem, PenstockError

log = logging.getLogger(__name__)

Shape = tuple[int, int, int]

# (m, k) @ (k, n). Square shapes give the peak; the others are a ViT's: token rows into the MLP's two halves and the
# attention's three projections, and products so small that their launch costs more than their sums.
_CPU_SHAPES: dict[str, Shape] = {
    "square": (2048, 2048, 2048),
    "mlp in": (1576, 1536, 384),
    "mlp out": (1576, 384, 1536),
    "square half": (1024, 1024, 1024),
    "qkv": (1576, 1152, 384),
    "tiny": (64, 64, 64),
}
_CPU_QUICK = ("square half", "mlp in", "mlp out")
_CUDA_SHAPES: dict[str, Shape] = {
    "square": (8192, 8192, 8192),
    "deep": (2048, 2048, 13312),
    "mlp in": (25216, 3072, 768),
    "mlp out": (25216, 768, 3072),
    "wide mlp in": (25216, 5120, 1280),
    "wide mlp out": (25216, 1280, 5120),
    "square half": (4096, 4096, 4096),
    "qkv": (25216, 2304, 768),
    "medium": (1024, 1024, 1024),
}
_CUDA_QUICK = ("square", "mlp in", "mlp out", "square half")
# The first product of each type. A CPU without units for a type can be hundreds of times slower in it, so that the
# large shapes would take minutes: those that this one, on a single thread, predicts to take longer than the patience
# are left out. On a single thread, because a busy neighbour can slow short products on several threads a hundredfold.
_FIRST_SHAPE: Shape = (256, 256, 256)
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class _Kind:
    """One way to multiply matrices: what it is called, how operands are made, and the fp32 setting it runs under."""

    name: str
    operands: Callable[[Shape, torch.device, torch.Generator], tuple[Any, ...]]
    product: Callable[..., torch.Tensor]
    matmul: str = "highest"


def probe(device: str | torch.device = "auto", *, quick: bool = False) -> Machine:
    """Measure `device` (`auto`: the current GPU, else the CPU) in about a minute, or in seconds with `quick`.

    Returns a Machine with `source="measured"`: GEMM rates per type and shape, memory bandwidth, launch latency, and
    the bus bandwidth of all-reduce if torch.distributed is initialised (then every rank must call this at once). On a
    GPU that a datasheet is shipped for, `peak_flops`, links and power are the datasheet's and `achievable_flops` is
    measured; elsewhere the peak is the best rate measured. Raises `EnvironmentProblem` if there is no such device.
    """
    where = resolve_device(device)
    with _undisturbed(), torch.no_grad():
        budget = (0.1 if quick else 0.6) if where.type == "cpu" else (0.05 if quick else 0.3)
        samples = _gemm_samples(where, quick, budget)
        bandwidth = _memory_bandwidth(where, budget)
        launch = _launch_seconds(where)
        page = _page_seconds() if where.type == "cpu" else 0.0
        collective = _all_reduce_bandwidth(where, quick)
    best: dict[str, float] = {}
    for sample in samples:
        best[sample.dtype] = max(best.get(sample.dtype, 0.0), sample.flops_per_second)
    machine = Machine(
        name=machine_name(where),
        device="cuda" if where.type == "cuda" else "cpu",
        source="measured",
        peak_flops=best,
        achievable_flops=dict(best),
        memory_bytes=_memory_bytes(where),
        memory_bytes_per_second=bandwidth,
        launch_seconds=launch,
        page_seconds=page,
        collective_bytes_per_second=collective,
        gemm=tuple(samples),
        notes=(_version_note(), f"peaks are measured, with {torch.get_num_threads()} CPU threads"),
    )
    return _with_datasheet(machine, where)


def machine_for(device: str | torch.device = "auto") -> Machine:
    """The Machine that `device` is: as `penstock probe` measured it, else by datasheet, else measured quickly now.

    A quick measurement is kept in the cache folder, so that it is made once per machine and torch version.
    """
    where = resolve_device(device)
    kept = cached_machine(machine_name(where))
    if kept is not None and _version_note() in kept.notes:
        return kept
    if where.type == "cuda":
        memory = torch.cuda.get_device_properties(where).total_memory
        sheet = match_datasheet(torch.cuda.get_device_name(where), memory)
        if sheet is not None:
            return sheet
    log.info(
        "measuring this machine (%s), once; `penstock probe` measures it more closely", machine_name(where)
    )
    machine = probe(where, quick=True)
    keep(machine)
    return machine


def keep(machine: Machine) -> Path | None:
    """Store a measured Machine in the cache folder; a folder that cannot be written is logged, and gives none."""
    try:
        return save_machine(machine, cache_path(machine.name))
    except PenstockError as error:
        log.warning("%s", error)
        return None


def resolve_device(device: str | torch.device) -> torch.device:
    """The torch device that `auto`, `cpu`, `cuda` or `cuda:N` names. Raises `EnvironmentProblem` if it is absent."""
    if isinstance(device, str) and device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise EnvironmentProblem(f"There is no device {device!r}; use auto, cpu, cuda or cuda:N.") from error
    if where.type not in ("cpu", "cuda"):
        raise EnvironmentProblem(f"Penstock runs on cpu and cuda devices, not on {where}; use --device cpu.")
    if where.type == "cuda":
        count = torch.cuda.device_count()
        index = cast("int | None", where.index)  # torch's stubs forget that `cuda` alone has none
        if not torch.cuda.is_available() or (index or 0) >= count:
            raise EnvironmentProblem(
                f"The device {where} was asked for, but torch sees {count or 'no'} GPU(s) here; use --device cpu, or "
                "run `penstock doctor` to see why."
            )
        if index is None:
            where = torch.device("cuda", torch.cuda.current_device())
    return where


def machine_name(device: torch.device) -> str:
    """What a measured Machine of this device is called: the chip, and for a CPU the number of threads used."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def cpu_name() -> str:
    """The CPU's own name, with the vector instructions that torch uses on it."""
    chip = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                chip = line.partition(":")[2].strip()
                break
    except OSError:
        pass  # not Linux: the general name serves
    return f"{chip} {torch.backends.cpu.get_cpu_capability()}"


def _with_datasheet(machine: Machine, device: torch.device) -> Machine:
    if device.type != "cuda":
        return machine
    sheet = match_datasheet(torch.cuda.get_device_name(device), machine.memory_bytes)
    if sheet is None:
        return replace(machine, devices_per_node=torch.cuda.device_count())
    # What could not be computed here stays out, even where the datasheet has it.
    peaks = {name: sheet.peak_flops.get(name, rate) for name, rate in machine.peak_flops.items()}
    return replace(
        machine,
        peak_flops=peaks,
        link_bytes_per_second=sheet.link_bytes_per_second,
        devices_per_node=sheet.devices_per_node,
        node_bytes_per_second=sheet.node_bytes_per_second,
        power_watts=sheet.power_watts,
        notes=(_version_note(), f"peaks, links and power are the datasheet's ({sheet.name})", *sheet.notes),
    )


def _version_note() -> str:
    return f"torch {torch.__version__}"


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Run fp32 matrix products in `precision` (torch's words), and put every setting back that this moves.

    torch keeps the choice twice: as one word, and per library, where the initial value "none" cannot be reached by
    setting the word back.
    """
    word = torch.get_float32_matmul_precision()
    libraries: tuple[Any, ...] = (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
    settings = [getattr(library, "fp32_precision", None) for library in libraries]
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(word)
        for library, setting in zip(libraries, settings):
            if setting is not None:
                library.fp32_precision = setting


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Autocast off, and torch's warnings about beta features kept from the user, as long as it measures."""
    with (
        warnings.catch_warnings(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False) if torch.cuda.is_available() else _nothing(),
    ):
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _float_operands(dtype: torch.dtype) -> Callable[[Shape, torch.device, torch.Generator], tuple[Any, ...]]:
    def make(shape: Shape, device: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
        m, n, k = shape
        a = torch.randn(m, k, device=device, generator=generator).to(dtype)
        # Weights lie as (out, in), as in nn.Linear; on CPUs the other order can be two hundred times slower.
        b = torch.randn(n, k, device=device, generator=generator).to(dtype)
        return a, b

    return make


def _int8_operands(shape: Shape, device: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    m, n, k = shape
    a = torch.randint(-127, 128, (m, k), device=device, generator=generator, dtype=torch.int8)
    b = torch.randint(-127, 128, (n, k), device=device, generator=generator, dtype=torch.int8)
    return a, b.t()


def _fp8_operands(shape: Shape, device: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    a, b = _float_operands(torch.float8_e4m3fn)(shape, device, generator)
    return a, b.t(), torch.ones((), device=device), torch.ones((), device=device)


def _fp8_product(a: Any, b: Any, scale_a: Any, scale_b: Any) -> torch.Tensor:
    result: torch.Tensor = torch._scaled_mm(
        a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return result


def _kinds(device: torch.device) -> list[_Kind]:
    """Every way to multiply that this device may have; those it lacks fail in their first product."""
    fp32 = _float_operands(torch.float32)
    kinds = [_Kind("fp32", fp32, F.linear)]
    if device.type == "cpu":
        kinds.append(_Kind("fp32_medium", fp32, F.linear, matmul="medium"))
    elif _has_tensor_cores(device):
        kinds.append(_Kind("tf32", fp32, F.linear, matmul="high"))
    # GPUs without bf16 units emulate it at a tenth of the speed of fp16; that is not a type to plan with.
    if device.type == "cpu" or _has_tensor_cores(device):
        kinds.append(_Kind("bf16", _float_operands(torch.bfloat16), F.linear))
    kinds.append(_Kind("fp16", _float_operands(torch.float16), F.linear))
    kinds.append(_Kind("int8", _int8_operands, torch._int_mm))
    if device.type == "cuda" and hasattr(torch, "_scaled_mm"):
        kinds.append(_Kind("fp8", _fp8_operands, _fp8_product))
    return kinds


def _has_tensor_cores(device: torch.device) -> bool:
    """Whether a GPU has TF32 and bf16 units: NVIDIA from compute capability 8.0, and AMD's Instinct from gfx90a."""
    major, _ = torch.cuda.get_device_capability(device)
    return major >= 8


def _gemm_samples(device: torch.device, quick: bool, budget: float) -> list[GemmSample]:
    shapes = _CPU_SHAPES if device.type == "cpu" else _CUDA_SHAPES
    names = (_CPU_QUICK if device.type == "cpu" else _CUDA_QUICK) if quick else tuple(shapes)
    patience = 0.5 if quick else 15.0
    generator = torch.Generator(device=device).manual_seed(0)
    samples: list[GemmSample] = []
    for kind in _kinds(device):
        with matmul_precision(kind.matmul):
            try:
                with _one_thread():
                    alone = _gemm_sample(kind, _FIRST_SHAPE, device, generator, 0.0).flops_per_second
                asked = [shapes[name] for name in names if 2.0 * math.prod(shapes[name]) / alone < patience]
                samples += [
                    _gemm_sample(kind, shape, device, generator, budget) for shape in (_FIRST_SHAPE, *asked)
                ]
            except (RuntimeError, NotImplementedError, ValueError) as error:
                log.info("%s products do not run on %s: %s", kind.name, device, str(error).partition("\n")[0])
    return samples


def _gemm_sample(
    kind: _Kind, shape: Shape, device: torch.device, generator: torch.Generator, budget: float
) -> GemmSample:
    operands = kind.operands(shape, device, generator)
    seconds = _seconds(lambda: kind.product(*operands), device, budget)
    m, n, k = shape
    return GemmSample(dtype=kind.name, m=m, n=n, k=k, flops_per_second=2.0 * m * n * k / seconds)


def _seconds(call: Callable[[], object], device: torch.device, budget: float) -> float:
    """Lower quartile of the times of one `call` over about `budget` seconds, three at least, after a warm-up."""
    call()
    once = _time(call, device, 1)
    if once > budget:
        return once
    # Short calls are timed in batches of a millisecond or more, so that the clock and a GPU's queue cost nothing.
    batch = max(1, min(1000, int(1e-3 / max(once, 1e-7))))
    rounds = max(3, min(50, int(budget / max(once * batch, 1e-7))))
    return sorted(_time(call, device, batch) for _ in range(rounds))[rounds // 4]


def _time(call: Callable[[], object], device: torch.device, batch: int) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(batch):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / batch


def _memory_bandwidth(device: torch.device, budget: float) -> float:
    """Bytes per second of an addition of two arrays into a third (STREAM's ADD), larger than any cache."""
    elements = 2**24 if device.type == "cpu" else 2**27
    a, b = torch.ones(2, elements, device=device)
    out = torch.empty_like(a)
    return 3.0 * float(a.nbytes) / _seconds(lambda: torch.add(a, b, out=out), device, budget)


def _launch_seconds(device: torch.device) -> float:
    """What one small operator costs in a long row of them, its output allocated as in any model."""
    a, b = torch.ones(2, 16, device=device)
    return _seconds(lambda: torch.add(a, b), device, 0.05)


def _page_seconds() -> float:
    """What the first touch of a page costs over a later one: the kernel clears and maps it."""
    size = 2**26

    def fill(memory: mmap.mmap) -> float:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        start = time.perf_counter()
        ctypes.memset(address, 1, size)
        return time.perf_counter() - start

    extra = []
    for _ in range(5):
        with mmap.mmap(-1, size) as memory:
            extra.append(fill(memory) - fill(memory))
    return max(0.0, statistics.median(extra)) / (size // _PAGE_BYTES)


def _all_reduce_bandwidth(device: torch.device, quick: bool) -> float | None:
    """Bus bandwidth of all-reduce: 2 (n - 1) / n times the bytes reduced, per second (nccl-tests' convention)."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    ranks = torch.distributed.get_world_size()
    if ranks < 2:
        return None
    values = torch.ones((2**22 if quick else 2**25) if device.type == "cuda" else 2**20, device=device)
    for _ in range(2):
        torch.distributed.all_reduce(values, op=torch.distributed.ReduceOp.MAX)
    # The same number of rounds on every rank: a rank that stopped by its own clock would leave the others waiting.
    times = [
        _time(lambda: torch.distributed.all_reduce(values, op=torch.distributed.ReduceOp.MAX), device, 1)
        for _ in range(5 if quick else 20)
    ]
    return 2.0 * (ranks - 1) / ranks * float(values.nbytes) / statistics.median(times)


def _memory_bytes(device: torch.device) -> float:
    """Memory of the GPU, or of this computer less what its container forbids."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, float(Path(limit).read_text(encoding="utf-8")))
        except (OSError, ValueError):
            continue  # no such limit, or the word "max"
    return total
