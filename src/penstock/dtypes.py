"""torch's types of the formats in `penstock.config.formats`."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.config import formats
from penstock.config.formats import FORMATS, Dtype, HalfDtype

DTYPES: dict[Dtype, torch.dtype] = {name: getattr(torch, row.dtype) for name, row in FORMATS.items()}
"""The type that holds numbers of each format."""
HALVES: dict[torch.dtype, HalfDtype] = {DTYPES[name]: name for name in formats.HALVES}
"""The types of half precision, with the names of their formats."""
FLOATS: tuple[torch.dtype, ...] = tuple(DTYPES[name] for name in ("fp32", "bf16", "fp16", "fp64"))
"""The types of a model's weights and activations."""


def sums_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which elements of `dtype` are summed: fp64 for fp64, fp32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widened(x: Tensor) -> Tensor:
    """x in the type in which its elements are summed."""
    return x.to(sums_type(x.dtype))


def format_of(dtype: torch.dtype) -> Dtype:
    """The format of a tensor of this type. Raises KeyError for a type without a format."""
    return _FORMATS[dtype]


_FORMATS: dict[torch.dtype, Dtype] = {dtype: name for name, dtype in reversed(DTYPES.items())}
