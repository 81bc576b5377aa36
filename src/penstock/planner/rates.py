"""What one device does per second under a Plan: a Machine's figures as the time model wants them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from penstock.config.machine import KernelSample, Machine
from penstock.config.plan import Plan
from penstock.errors import ConfigError
from penstock.planner.attention import exponentials_per_second, products_rate
from penstock.planner.constants import DEFAULT, Constants

DEFAULT_MULTIPROCESSORS = 128
ASSUMED_HOST_LINK = 16e9
"""Of a device whose Machine does not say: sixteen lanes of the third generation of PCI Express."""
HOST_LINK_SHARE = 0.8
"""What copies of pinned memory reach of it, less the headers of its packets."""
FUSED = ("auto", "sdpa", "flash", "efficient", "cudnn")
"""Backends that keep no scores."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rates:
    """Rates of one device, in SI units. Compared and hashed by identity, so that caches find them at once."""

    peak: float
    """Of the type that linear layers compute in, from the datasheet: the base of MFU."""
    peak_name: str
    gemm: float
    """Large matrix products of linear layers."""
    half: float
    """Large matrix products outside linear layers: attention's and the output's where linear layers use fp8."""
    attention: float
    """The products of fused attention's forward pass."""
    attention_backward: float
    """Those of its backward pass, which forms the scores again."""
    exponentials: float
    """Of softmax, per second."""
    memory: float
    """Streaming kernels, bytes per second."""
    multiprocessors: int
    kernel_seconds: float
    launch_seconds: float
    cpu: bool
    kernels: tuple[KernelSample, ...]
    """What was measured of a CPU's operators in fp32; none in other types."""
    stream: int
    """Bytes of a number of the residual stream."""
    compute: int
    """Bytes of a number that goes into a matrix product."""
    linear: int
    """The same in linear layers: 1 with fp8."""
    tile_depth: float
    link: float
    """Bus bandwidth inside a node, of one device."""
    node: float
    """Bus bandwidth out of a node, of all its devices together."""
    per_node: int
    link_step: float
    node_step: float
    ramp_seconds: float
    ramp_bytes: float
    taken: float
    """Share of the multiprocessors that a collective keeps from what runs beside it."""
    step_seconds: float
    straggling: float
    host: float
    """Between a device and host memory, one direction."""


def compute_type(plan: Plan, machine: Machine) -> str:
    """The key of `machine.peak_flops` that linear layers run under."""
    return "fp8" if plan.fp8 else product_type(plan, machine)


def product_type(plan: Plan, machine: Machine) -> str:
    """The key of `machine.peak_flops` that products outside fp8 layers run under."""
    if plan.precision != "O0":
        return plan.dtype
    if plan.matmul == "highest":
        return "fp32"
    wish = "tf32" if machine.device == "cuda" else "fp32_medium"
    return wish if wish in machine.peak_flops else "fp32"


def peak_of(machine: Machine, type_: str) -> float:
    """FLOP/s of a type at the peak. Raises ConfigError where the machine cannot compute in it."""
    if type_ not in machine.peak_flops:
        raise ConfigError(
            f"Machine {machine.name} has no rate for {type_}, which the plan computes in; it has "
            f"{', '.join(machine.peak_flops)}. Choose another plan.dtype or plan.precision, or leave plan.fp8 out."
        )
    return machine.peak_flops[type_]


def rates_of(machine: Machine, plan: Plan, constants: Constants = DEFAULT) -> Rates:
    """The rates of `machine` under `plan`. Raises ConfigError where the machine cannot compute in the plan's type."""
    return _rates(machine, compute_type(plan, machine), plan.precision, plan.attention, constants)


@lru_cache(maxsize=512)
def _rates(machine: Machine, type_: str, precision: str, attention: str, constants: Constants) -> Rates:
    peak = peak_of(machine, type_)
    half_type = type_
    if type_ == "fp8":
        half_type = "bf16" if "bf16" in machine.peak_flops else "fp16"
    gemm = _sustained(machine, type_, constants)
    cpu = machine.device == "cpu"
    link = (machine.link_bytes_per_second or machine.memory_bytes_per_second or 1e9) * constants.link_share
    if machine.collective_bytes_per_second:
        link = machine.collective_bytes_per_second
    per_node = machine.devices_per_node
    node = (machine.node_bytes_per_second or link * per_node) * constants.node_share
    compute = 4 if precision == "O0" else 2
    multiprocessors = machine.multiprocessors or DEFAULT_MULTIPROCESSORS
    exponentials = (
        math.inf if cpu else exponentials_per_second(machine.peak_flops[half_type], multiprocessors)
    )
    forward, backward = _attention(machine, half_type, attention, constants, exponentials)
    return Rates(
        peak=peak,
        peak_name=type_,
        gemm=gemm,
        half=_sustained(machine, half_type, constants),
        attention=forward,
        attention_backward=backward,
        exponentials=exponentials,
        memory=(machine.memory_bytes_per_second or math.inf) * (1.0 if cpu else constants.memory_share),
        multiprocessors=multiprocessors,
        kernel_seconds=(machine.operator_seconds or machine.launch_seconds)
        if cpu
        else constants.kernel_seconds,
        launch_seconds=machine.launch_seconds,
        cpu=cpu,
        kernels=machine.kernels if precision == "O0" else (),
        stream=4 if precision in ("O0", "O1") else 2,
        compute=compute,
        linear=1 if type_ == "fp8" else compute,
        tile_depth=constants.tile_depth,
        link=link,
        node=node,
        per_node=per_node,
        link_step=constants.link_step_seconds,
        node_step=constants.node_step_seconds,
        ramp_seconds=constants.ramp_seconds,
        ramp_bytes=constants.ramp_bytes,
        taken=0.0 if cpu else min(0.5, constants.collective_multiprocessors / multiprocessors),
        step_seconds=0.0 if cpu else constants.step_seconds,
        straggling=constants.straggling,
        host=(machine.host_bytes_per_second or ASSUMED_HOST_LINK) * HOST_LINK_SHARE,
    )


def _sustained(machine: Machine, type_: str, constants: Constants) -> float:
    """The rate of long runs of large products: measured where it was, else the sweep's, else from the peak."""
    measured = [sample.flops_per_second for sample in machine.gemm if sample.dtype == type_]
    if measured:
        return max(measured)
    best = machine.achievable_flops.get(type_)
    if best is None and type_ == "fp16":
        best = machine.achievable_flops.get("bf16")
    if machine.device == "cpu":
        return best or machine.peak_flops[type_]
    return (best or constants.unmeasured_share * machine.peak_flops[type_]) * constants.gemm_share


def _attention(
    machine: Machine, type_: str, backend: str, constants: Constants, exponentials: float
) -> tuple[float, float]:
    """Rates of the products of fused attention, forward and backward: what kernels of each generation are known to
    reach with heads of `CITED_FEATURES`, less their exponentials.

    Backward has 2.5 times the FLOPs, because the scores are formed again (Dao 2023, section 4.1).
    """
    if machine.device == "cpu":
        rate = _sustained(machine, type_, constants)
        return rate, rate
    peak = machine.peak_flops[type_]
    hopper = "fp8" in machine.peak_flops
    if backend == "efficient" or "bf16" not in machine.peak_flops:
        both = peak * constants.fused_attention_share * (0.6 if hopper else 1.0)
        ratio = constants.fused_backward
        forward, backward = both * (1 + ratio) / 3.5, both * (1 + 1 / ratio) * 2.5 / 3.5
    elif hopper:
        forward = backward = peak * (
            constants.cudnn_share_hopper if backend == "cudnn" else constants.flash_share_hopper
        )
    else:
        forward = backward = peak * constants.flash_share
    return products_rate(forward, exponentials, 1.0), products_rate(backward, exponentials, 2.5)
