"""Formats: how numbers are stored. Types are strings, so planning needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp8_e5m2", "int8", "int4"]
HalfDtype = Literal["bf16", "fp16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How a number is stored."""

    dtype: str
    """The torch type that holds it. Two numbers of `int4` share one of its bytes."""
    bits: int
    group: int = 0
    """Numbers that share a scale of 16 bits. 0: as many as a row has at least, so that scales take next to nothing, or
    there are no scales."""

    @property
    def bytes(self) -> float:
        """Bytes of one number, with its share of a scale."""
        return self.bits / 8 + (2 / self.group if self.group else 0.0)


FORMATS: dict[Dtype, Format] = {
    "fp64": Format(dtype="float64", bits=64),
    "fp32": Format(dtype="float32", bits=32),
    "tf32": Format(dtype="float32", bits=32),
    "bf16": Format(dtype="bfloat16", bits=16),
    "fp16": Format(dtype="float16", bits=16),
    "fp8": Format(dtype="float8_e4m3fn", bits=8),
    "fp8_e5m2": Format(dtype="float8_e5m2", bits=8),
    "int8": Format(dtype="int8", bits=8),
    "int4": Format(dtype="uint8", bits=4, group=32),
}
BYTES: dict[Dtype, float] = {name: format.bytes for name, format in FORMATS.items()}
"""Bytes of one number of each format."""
HALVES: tuple[HalfDtype, ...] = ("bf16", "fp16")
"""The formats of half precision."""
