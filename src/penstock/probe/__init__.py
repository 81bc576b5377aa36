"""Measure a machine: matrix products, memory, the cost of one operator, and collectives where ranks are connected.

Every rate comes from the median time of repeated calls. Matrices are random: zeros draw less power and run faster on
GPUs. A probe restores torch's precision settings, random state and gradient mode.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import cast

import torch
from torch import distributed

from penstock.config.machine import (
    GemmSample,
    Machine,
    cache_path,
    cached_machine,
    match_datasheet,
    save_machine,
)
from penstock.cpu import kind_of, this_cpu
from penstock.errors import EnvironmentProblem, PenstockError
from penstock.probe.operators import kernel_samples, operator_seconds
from penstock.probe.products import gemm_samples, measured_again, reading_samples, stored_samples, sustained
from penstock.probe.rates import (
    alone_speedup,
    launch_seconds,
    measure_link,
    memory_bandwidth,
    memory_bytes,
    page_seconds,
    shared,
)
from penstock.report.record import processor

__all__ = ["keep", "machine_for", "machine_name", "probe", "resolve_device"]

log = logging.getLogger(__name__)

_PROBE = 17
"""A higher number means that a probe measures more, and older measurements are not used."""
_BUSY = 1.2
"""A CPU that is this much faster than when it was measured was busy then."""


def probe(device: str | torch.device = "auto", *, quick: bool = False, alone: bool = False) -> Machine:
    """Measure `device` (`auto`: the current GPU, else the CPU) in a minute or two, or in seconds with `quick`.

    Returns a Machine with `source="measured"`: GEMM rates per type and shape, memory bandwidth, launch latency, and the
    times of collectives if torch.distributed is initialised with several ranks (then every rank must call this at once,
    unless `alone`). For a GPU whose datasheet is known, `peak_flops`, links and power come from the datasheet and
    `achievable_flops` is measured; unless `quick`, so is the share of it that a minute of load sustains. Otherwise the
    peak is the best rate measured. Raises `EnvironmentProblem` if there is no such device.
    """
    where = resolve_device(device)
    connected = distributed.is_available() and distributed.is_initialized() and not alone
    world = distributed.get_world_size() if connected else 1
    sharing = shared(where) if world > 1 and where.type == "cpu" else nullcontext()
    with _undisturbed(), torch.no_grad(), sharing:
        budget = (0.1 if quick else 0.6) if where.type == "cpu" else (0.05 if quick else 0.3)
        samples = gemm_samples(where, quick, budget)
        bandwidth = memory_bandwidth(where, budget)
        launch = launch_seconds(where)
        on_cpu = where.type == "cpu"
        page = page_seconds() if on_cpu else 0.0
        operator = operator_seconds(where) if on_cpu else 0.0
        kernels = kernel_samples(where, quick, budget / 3) if on_cpu else []
        samples += stored_samples(quick, budget / 6) if on_cpu else []
        kernels += reading_samples(budget / 6) if on_cpu else []
        share, words = (0.0, "") if on_cpu or quick else sustained(where, samples)
        link = measure_link(where) if world > 1 else None
        faster_alone = alone_speedup(where) if world > 1 and on_cpu else 0.0
    best = _best_rates(samples)
    machine = Machine(
        name=machine_name(where), device="cuda" if where.type == "cuda" else "cpu", avx512=this_cpu().avx512,
        kind=kind_of(where.type), source="measured", peak_flops=best, achievable_flops=dict(best),
        memory_bytes=memory_bytes(where), memory_bytes_per_second=bandwidth, launch_seconds=launch,
        operator_seconds=operator, page_seconds=page, sustained_share=share, alone_speedup=faster_alone,
        gemm=tuple(samples), kernels=tuple(kernels),
        notes=(_version_note(), f"peaks are measured, with {torch.get_num_threads()} CPU threads"),
    )  # fmt: skip
    machine = _with_datasheet(machine if link is None else machine.linked(link, world), where)
    return replace(machine, notes=(*machine.notes, words)) if words else machine


def machine_for(device: str | torch.device = "auto") -> Machine:
    """The Machine of `device`: the one that `penstock probe` stored, else its datasheet, else a quick measurement made
    now.

    A quick measurement is stored in the cache folder, so that it is made once per machine and torch version. It is
    repeated where a CPU is now much faster, because the CPU was busy then. One rank of a group may call this alone:
    nothing is measured that needs the others.
    """
    where = resolve_device(device)
    name = machine_name(where)
    kept = cached_machine(name)
    if kept is not None and _version_note() in kept.notes:
        if not _was_busy(kept, where):
            return replace(kept, kind=kind_of(where.type))  # missing in Machines that earlier versions stored
        log.warning("%s was busy when it was measured, and is measured again", name)
    else:
        if where.type == "cuda":
            memory = torch.cuda.get_device_properties(where).total_memory
            sheet = match_datasheet(torch.cuda.get_device_name(where), memory)
            if sheet is not None:
                return replace(sheet, kind=kind_of(where.type))
        log.warning("measuring this machine (%s), once; `penstock probe` measures it more closely", name)
        kept = None
    machine = probe(where, quick=True, alone=True)
    machine = machine if kept is None else _best_of(kept, machine)
    keep(machine)
    return machine


def _best_of(first: Machine, second: Machine) -> Machine:
    """Each figure of a CPU from the better of two measurements: other programs can only slow it down."""
    products = sorted(first.gemm + second.gemm, key=attrgetter("flops_per_second"))
    others = sorted(first.kernels + second.kernels, key=attrgetter("per_second"))
    gemm = {(s.dtype, s.form, s.m, s.n, s.k): s for s in products}
    kernels = {(s.name, s.dtype, s.tokens, s.features): s for s in others}
    best = _best_rates(gemm.values())
    return replace(
        second, peak_flops=second.peak_flops | best, achievable_flops=second.achievable_flops | best,
        memory_bytes_per_second=max(first.memory_bytes_per_second, second.memory_bytes_per_second),
        launch_seconds=min(first.launch_seconds, second.launch_seconds),
        operator_seconds=min(first.operator_seconds, second.operator_seconds),
        page_seconds=min(first.page_seconds, second.page_seconds), gemm=tuple(gemm.values()),
        kernels=tuple(kernels.values()),
    )  # fmt: skip


def _best_rates(samples: Iterable[GemmSample]) -> dict[str, float]:
    """The best rate of each compute type."""
    best: dict[str, float] = {}
    for sample in samples:
        if sample.plain:
            best[sample.dtype] = max(best.get(sample.dtype, 0.0), sample.flops_per_second)
    return best


def _was_busy(kept: Machine, where: torch.device) -> bool:
    """Whether a matrix product is so much faster now that other programs must have run while `kept` was measured."""
    products = [sample for sample in kept.gemm if sample.dtype == "fp32" and sample.form == "forward"]
    best = max(products, key=attrgetter("flops_per_second"), default=None)
    if where.type != "cpu" or best is None:
        return False
    with _undisturbed(), torch.no_grad():
        now = measured_again(best, 0.05)
    return now.flops_per_second > _BUSY * best.flops_per_second


def keep(machine: Machine) -> Path | None:
    """Store a measured Machine in the cache folder. Returns None, and logs the reason, where the folder cannot be
    written."""
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
    """The name of a measured Machine of this device: the chip, and for a CPU its vector instructions that torch uses,
    and the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor()} {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


def _with_datasheet(machine: Machine, device: torch.device) -> Machine:
    if device.type != "cuda":
        return machine
    sheet = match_datasheet(torch.cuda.get_device_name(device), machine.memory_bytes)
    if sheet is None:
        return replace(machine, devices_per_node=torch.cuda.device_count())
    # A type that could not be computed here is left out, even if the datasheet has it.
    peaks = {name: sheet.peak_flops.get(name, rate) for name, rate in machine.peak_flops.items()}
    return replace(
        machine, peak_flops=peaks, link_bytes_per_second=sheet.link_bytes_per_second,
        devices_per_node=sheet.devices_per_node, node_bytes_per_second=sheet.node_bytes_per_second,
        power_watts=sheet.power_watts,
        notes=(_version_note(), f"peaks, links and power are the datasheet's ({sheet.name})", *sheet.notes),
    )  # fmt: skip


def _version_note() -> str:
    """A stored measurement is used only while this stays the same: torch, and what a probe measures."""
    return f"torch {torch.__version__}, probe {_PROBE}"


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Turn autocast and torch's warnings about beta features off while it measures."""
    with (
        warnings.catch_warnings(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False) if torch.cuda.is_available() else nullcontext(),
    ):
        warnings.simplefilter("ignore")
        yield
