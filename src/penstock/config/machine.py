"""What a model runs on: rates, sizes and latencies, from a datasheet or measured by `penstock probe`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmSample:
    """One measured matrix product, (m, k) @ (k, n)."""

    dtype: str
    m: int
    n: int
    k: int
    flops_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One kind of device, and how such devices are linked. All rates are per device and in SI units.

    `peak_flops` maps a compute type to its peak in FLOP/s: `fp32` (no tensor cores), `tf32`, `bf16`, `fp16`, `fp8`,
    and on CPUs `fp32_medium`. A type that is absent cannot be computed in on this machine.
    """

    name: str
    device: Literal["cuda", "cpu"]
    source: Literal["datasheet", "measured"]
    peak_flops: dict[str, float]
    achievable_flops: dict[str, float] = field(default_factory=dict)
    """Best rate ever seen of a large matrix product, by type: published sweeps, or measured here."""
    memory_bytes: float = 0.0
    memory_bytes_per_second: float = 0.0
    launch_seconds: float = 0.0
    """What one more operator costs, however small."""
    link_bytes_per_second: float | None = None
    """To devices in the same node, one direction."""
    devices_per_node: int = 1
    node_bytes_per_second: float | None = None
    """Out of a node, over all its adapters."""
    collective_bytes_per_second: float | None = None
    """Measured bus bandwidth of all-reduce, where a probe ran distributed."""
    power_watts: float | None = None
    gemm: tuple[GemmSample, ...] = ()
    """Measured shapes, for efficiency curves."""
    notes: tuple[str, ...] = ()
