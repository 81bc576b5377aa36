"""The features of this machine's CPU: the only module that queries them.

`ONEDNN_MAX_CPU_ISA` and `ATEN_CPU_CAPABILITY` limit oneDNN and ATen to fewer features than the CPU has. These limits
count here, so that a large CPU can stand in for a smaller one in tests.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

# oneDNN's names for the instruction sets of x86, from the smallest on; each has all before it.
_ISA = (
    "SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16",
    "AVX512_CORE_FP16", "AVX512_CORE_AMX", "AVX512_CORE_AMX_FP16",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cpu:
    """The features of a CPU that torch's kernels use."""

    avx512: bool
    """Whether oneDNN has batched matrix products in bf16, for which it needs AVX-512."""
    bf16: bool | None
    """Whether there are units that multiply bf16; None if it is not known."""
    vnni: bool
    """Whether products of int8 are summed in 32 bits (AVX512-VNNI). Without it, sums of two full-range products
    overflow."""
    packs_bf16: bool
    """Whether oneDNN accepts bf16 weights in its blocked layout."""
    isa: str = "DEFAULT"
    """torch's name of the vector instructions in its kernels: AVX2, AVX512, DEFAULT, or another architecture's."""
    amx: bool = False
    """Whether there are matrix units for bf16 (AMX)."""

    @property
    def bf16_pairs(self) -> bool:
        """Whether AVX-512 vector units multiply pairs of bf16 numbers."""
        return self.isa == "AVX512" and bool(self.bf16)

    @property
    def kind(self) -> str:
        """The kind of CPU under which measurements of kernels are stored."""
        if self.amx:
            return "amx"
        if self.avx512:
            return "avx512_bf16" if self.bf16 else "avx512"
        return "avx2" if self.isa == "AVX2" else "other"


def _detect() -> Cpu:
    has: dict[str, Any] = dict(getattr(torch.cpu, "get_capabilities", dict)())
    onednn = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    isa = torch.backends.cpu.get_cpu_capability()
    return Cpu(
        isa=isa,
        avx512=onednn and isa == "AVX512",
        bf16=_multiplies_bf16(has),
        vnni=bool(has.get("avx512_vnni")) and _allowed("AVX512_CORE_VNNI"),
        amx=bool(has.get("amx_bf16")) and _allowed("AVX512_CORE_AMX"),
        packs_bf16=onednn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    )


def _multiplies_bf16(has: dict[str, Any]) -> bool | None:
    """See `Cpu.bf16`; `has` holds the features that torch detected, by name, and is empty if it cannot detect them."""
    if not has:
        return None
    if has.get("bf16"):  # ARM
        return True
    return bool(has.get("avx512_bf16") or has.get("amx_bf16")) and _allowed("AVX512_CORE_BF16")


def _allowed(isa: str) -> bool:
    """Whether oneDNN may use an instruction set, as the environment limits it."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "")).upper()
    return limit not in _ISA or _ISA.index(isa) <= _ISA.index(limit)


# Computed once, so that compiled code can read it.
_CPU = _detect()


def this_cpu() -> Cpu:
    """The CPU of this process, restricted to features that torch may use."""
    return _CPU


def kind_of(device: str) -> str:
    """The key under which speedups are stored: a CPU's instruction sets, a GPU's name, or another device's kind."""
    return _CPU.kind if device == "cpu" else torch.cuda.get_device_name() if device == "cuda" else device
