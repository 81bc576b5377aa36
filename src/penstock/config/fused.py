"""Fused operators: the words of `Plan.fuse`, one row each. Their modules are replaced by `penstock.models.fuse`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FUSED_FORM = "fused_"
"""Prefix that names the measurement of an activation computed by `bias_activation`: `fused_gelu`."""
FusedName = Literal["residual_norm", "bias_activation"]
Fuse = Literal["auto", "residual_norm", "bias_activation"]


@dataclass(frozen=True, slots=True)
class FusedOperator:
    """One operator that replaces several."""

    title: str
    """A few words, for tables."""
    why: str
    """The work that it merges, and the reason why that should be faster, for the ladder's page."""
    devices: tuple[str, ...] = ("cpu",)
    """Devices with a kernel for it, under torch's names."""


FUSED: dict[FusedName, FusedOperator] = {
    "residual_norm": FusedOperator(
        "residual + norm",
        "A branch is dropped out, added to the residual stream and normed in one pass; the backward pass makes the "
        "gradients of both and of the norm's weights in another.",
        devices=("cpu", "cuda"),
    ),
    "bias_activation": FusedOperator(
        "activations",
        "The activation adds the bias as it reads the product; its backward pass sums the bias's gradient as it "
        "writes that of the product.",
    ),
}
"""All fused operators, in the order in which they are applied."""
