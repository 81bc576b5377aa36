"""Machines that need not be probed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from penstock.config.machine import Machine, save_machine

TOY = Machine(
    name="toy", device="cpu", source="measured", peak_flops={"fp32": 5e10, "fp32_medium": 6e10, "bf16": 5e9},
    memory_bytes=8e9, memory_bytes_per_second=1e10, launch_seconds=2e-6,
)  # fmt: skip
"""A slow CPU with bf16."""


def toy_machine(folder: Path) -> str:
    """Its file, written to `folder`."""
    return str(save_machine(TOY, folder / "toy.toml"))


def desk(folder: Path) -> str:
    """The file of a machine as fast in every type, written to `folder`: so that a run probes nothing."""
    peaks = dict.fromkeys(("fp32", "fp32_medium", "bf16", "fp16", "int8"), 1e11)
    machine = Machine(name="desk", device="cpu", source="measured", peak_flops=peaks, launch_seconds=1e-6)
    return str(save_machine(machine, folder / "machine.json"))


def take_for_this_one() -> None:
    """Put it into the cache as what was measured of this CPU."""
    import torch

    from penstock import probe

    name = probe.machine_name(torch.device("cpu"))
    probe.keep(replace(TOY, name=name, notes=(probe._version_note(),)))
