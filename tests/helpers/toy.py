"""A machine that need not be probed."""

from __future__ import annotations

from pathlib import Path

from penstock.config.machine import Machine, save_machine


def toy_machine(folder: Path) -> str:
    """The file of a slow CPU with bf16, written to `folder`."""
    made = Machine(
        name="toy", device="cpu", source="measured", peak_flops={"fp32": 5e10, "fp32_medium": 6e10, "bf16": 5e9},
        memory_bytes=8e9, memory_bytes_per_second=1e10, launch_seconds=2e-6,
    )  # fmt: skip
    return str(save_machine(made, folder / "toy.toml"))
