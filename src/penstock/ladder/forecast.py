"""The share that each of several processes has of one machine. Free of torch.

Ranks on one CPU share it: each has its part of every rate. What their collectives take was measured between them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.config.machine import Machine


@dataclass(frozen=True, slots=True)
class Link:
    """What was measured between the ranks."""

    bandwidth: float
    """Bus bandwidth of a large all-reduce, bytes per second."""
    seconds: float
    """Of a small one."""


def rank_machine(machine: Machine, ranks: int, link: Link) -> Machine:
    """What each of `ranks` processes on this one machine has of it."""
    linked = replace(
        machine,
        devices_per_node=max(ranks, machine.devices_per_node),
        collective_bytes_per_second=link.bandwidth,
        collective_seconds=link.seconds,
    )
    if machine.device != "cpu":
        return linked
    return replace(
        linked,
        peak_flops={name: rate / ranks for name, rate in machine.peak_flops.items()},
        achievable_flops={name: rate / ranks for name, rate in machine.achievable_flops.items()},
        memory_bytes=machine.memory_bytes / ranks,
        memory_bytes_per_second=machine.memory_bytes_per_second / ranks,
        gemm=tuple(replace(s, flops_per_second=s.flops_per_second / ranks) for s in machine.gemm),
        kernels=tuple(replace(s, per_second=s.per_second / ranks) for s in machine.kernels),
    )
