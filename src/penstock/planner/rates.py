"""What one device does per second under a Plan: a Machine's figures as prices want them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from penstock.config.machine import Machine
from penstock.config.numerics import BYTES, Dtype, Numerics, numerics_of
from penstock.config.plan import Plan
from penstock.errors import ConfigError
from penstock.planner.constants import DEFAULT, Constants
from penstock.planner.products import Chip, Products

DEFAULT_MULTIPROCESSORS = 128
ASSUMED_HOST_LINK = 16e9
"""Of a device whose Machine does not say: sixteen lanes of the third generation of PCI Express."""
HOST_LINK_SHARE = 0.8
"""What copies of pinned memory reach of it, less the headers of its packets."""
CITED_FEATURES = 128
"""Of a head, where the rates that are stated of attention kernels were reached."""
EXPONENTIALS_PER_CLOCK = 16
"""Of one multiprocessor, on every chip since Volta (CUDA C++ Programming Guide, arithmetic instructions)."""
SLOWEST_CLOCK = 1.2e9
"""Below what chips for training run at, and above half of it."""


NEAREST = 2
"""Measured shapes of attention between which a rate is interpolated."""


class Kernels:
    """What was measured of a CPU's operators in the types of a plan."""

    def __init__(self, machine: Machine, types: dict[str, str]) -> None:
        """Takes of `machine` what was measured of each operator that `types` names, in the type that it names."""
        self._of: dict[str, list[tuple[float, float, float]]] = {}
        for sample in machine.kernels:
            if types.get(sample.name.removesuffix("_backward")) == sample.dtype:
                shape = (math.log(sample.tokens or 1), math.log(sample.features or 1))
                self._of.setdefault(sample.name, []).append((*shape, sample.per_second))

    def rate(self, name: str, tokens: float = 1, features: float = 1) -> float | None:
        """Per second, between the nearest shapes by distance of logarithms; None if it was not measured."""
        measured = self._of.get(name)
        if not measured:
            return None
        x, y = math.log(tokens), math.log(features)
        near = sorted([((a - x) ** 2 + (b - y) ** 2, rate) for a, b, rate in measured])
        weights = [(1.0 / (apart + 1e-6), rate) for apart, rate in near[:NEAREST]]
        return sum(weight * rate for weight, rate in weights) / sum(weight for weight, _ in weights)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rates:
    """Rates of one device, in SI units. Compared and hashed by identity, so that caches find them at once."""

    machine: Machine
    constants: Constants
    peak: float
    """Of the type that linear layers compute in, from the datasheet: the base of MFU."""
    peak_name: str
    products: Products
    """Matrix products in the type that the plan computes in outside fp8."""
    fp8: Products | None
    product_rate: float
    """Of large products outside fp8."""
    attention: float
    """The products of fused attention's forward pass."""
    attention_backward: float
    """Those of its backward pass, which forms the scores again."""
    exponentials: float
    """Of softmax, per second."""
    memory: float
    """Streaming kernels, bytes per second."""
    kernel_seconds: float
    """Between two dependent kernels of a GPU."""
    operator_seconds: float
    """What a CPU takes for one more operator of a training step; of a GPU the launch."""
    page_seconds: float
    cpu: bool
    kernels: Kernels
    compute: float
    """Bytes of a number that goes into a matrix product."""
    link: float
    """Bus bandwidth inside a node, of one device."""
    node: float
    """Bus bandwidth out of a node, of all its devices together."""
    call_seconds: float
    """What each collective costs besides, between processes on a CPU."""
    taken: float
    """Share of the multiprocessors that a collective keeps from what runs beside it."""
    host: float
    """Between a device and host memory, one direction."""
    host_update: float
    """Bytes per second of one device's share of an update in host memory."""


def product_type(numerics: Numerics, machine: Machine) -> str:
    """The key of `machine.peak_flops` that products outside fp8 layers run under."""
    if numerics.products != "tf32":
        return numerics.compute
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


def rates_of(
    machine: Machine, plan: Plan, constants: Constants = DEFAULT, *, launch_blocking: bool = False
) -> Rates:
    """The rates of `machine` under `plan`. Raises ConfigError where the machine cannot compute in the plan's type."""
    numerics = numerics_of(plan)
    return _rates(
        machine, product_type(numerics, machine), numerics.compute, numerics.residual, numerics.fp8 != "none",
        plan.attention, constants, launch_blocking,
    )  # fmt: skip


@lru_cache(maxsize=512)
def _rates(
    machine: Machine,
    type_: str,
    compute: Dtype,
    residual: Dtype,
    fp8: bool,
    attention: str,
    constants: Constants,
    launch_blocking: bool,
) -> Rates:
    cpu = machine.device == "cpu"
    peak_name = "fp8" if fp8 else type_
    peak = peak_of(machine, peak_name)
    peak_of(machine, type_)
    link = (machine.link_bytes_per_second or machine.memory_bytes_per_second or 1e9) * constants.link_share
    link = machine.collective_bytes_per_second or link
    multiprocessors = machine.multiprocessors or DEFAULT_MULTIPROCESSORS
    exponentials = math.inf if cpu else exponentials_per_second(machine.peak_flops[type_], multiprocessors)
    forward, backward = _attention(machine, type_, attention, constants, exponentials)
    memory = (machine.memory_bytes_per_second or math.inf) * (1.0 if cpu else constants.memory_share)

    def products(kind: str) -> Products:
        samples = tuple(sample for sample in machine.gemm if sample.dtype == kind)
        best = _sustained(machine, kind, constants)
        chip = Chip(best, multiprocessors, constants.tile_depth, memory)
        ceiling = machine.peak_flops[kind] if samples or not cpu else best
        return Products.of(samples, ceiling, None if cpu else chip, sustained_share(machine, constants))

    return Rates(
        machine=machine,
        constants=constants,
        peak=peak,
        peak_name=peak_name,
        products=products(type_),
        fp8=products("fp8") if fp8 else None,
        product_rate=_sustained(machine, type_, constants),
        attention=forward,
        attention_backward=backward,
        exponentials=exponentials,
        memory=memory,
        kernel_seconds=0.0
        if cpu
        else constants.kernel_seconds + launch_blocking * constants.blocking_seconds,
        operator_seconds=(machine.operator_seconds if cpu else 0.0) or machine.launch_seconds,
        page_seconds=machine.page_seconds if cpu else 0.0,
        cpu=cpu,
        kernels=Kernels(
            machine,
            {"attention": type_, "bmm": type_, "gelu": compute, "softmax": compute, "norm": residual},
        ),
        compute=BYTES[compute],
        link=link,
        node=(machine.node_bytes_per_second or link * machine.devices_per_node) * constants.node_share,
        call_seconds=machine.collective_seconds if cpu else 0.0,
        taken=0.0 if cpu else min(0.5, constants.collective_multiprocessors / multiprocessors),
        host=(machine.host_bytes_per_second or ASSUMED_HOST_LINK) * HOST_LINK_SHARE,
        host_update=HOST_BYTES_PER_SECOND,
    )


HOST_BYTES_PER_SECOND = 50e9
"""Of host memory, what one device's share of an update there moves: eight of them on two sockets of 200 GB/s each."""


def _sustained(machine: Machine, type_: str, constants: Constants) -> float:
    """The rate of long runs of large products: of the best that was measured, or that a sweep found, or of the peak,
    the share that the chip sustains."""
    measured = [sample.flops_per_second for sample in machine.gemm if sample.dtype == type_]
    if measured:
        return max(measured) * sustained_share(machine, constants)
    best = machine.achievable_flops.get(type_)
    if best is None and type_ == "fp16":
        best = machine.achievable_flops.get("bf16")
    if machine.device == "cpu":
        return best or machine.peak_flops[type_]
    return (best or constants.unmeasured_share * machine.peak_flops[type_]) * sustained_share(
        machine, constants
    )


def sustained_share(machine: Machine, constants: Constants) -> float:
    """Of bursts, what the chip sustains: as measured under a minute of load, else as calibrated."""
    if machine.device == "cpu":
        return 1.0
    calibrated = constants.gemm_share_hopper if "fp8" in machine.peak_flops else constants.gemm_share
    return machine.sustained_share or calibrated


def exponentials_per_second(peak: float, multiprocessors: int) -> float:
    """Of a whole chip, from its `peak` FLOP/s in half precision.

    A multiprocessor does a power of two of FLOPs per clock, which tells the clock.
    """
    each = 1
    while peak / multiprocessors / (2 * each) >= SLOWEST_CLOCK:
        each *= 2
    return EXPONENTIALS_PER_CLOCK * peak / each


def products_rate(cited: float, exponentials: float, passes: float) -> float:
    """FLOP/s of a kernel's products alone, from the rate of all of it with heads of `CITED_FEATURES`.

    `passes` is the kernel's products over those of a forward pass: 1, or 2.5 of a backward pass.
    """
    return 1.0 / (1.0 / cited - 1.0 / (4 * CITED_FEATURES * passes * exponentials))


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
