"""The types in which a training step stores and computes: derived from the Plan here and nowhere else.

The levels are those of NVIDIA Apex; their mechanisms are those of Micikevicius et al., "Mixed Precision
Training", ICLR 2018. Types are strings, so planning needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from penstock.config.formats import HALVES, Dtype, Products
from penstock.config.optimizers import OPTIMIZERS, Algorithm
from penstock.config.plan import Plan, Precision

Masters = Literal["none", "copy", "shards"]

MASTER_BYTES: dict[Masters, float] = {"none": 0.0, "copy": 4.0, "shards": 0.0}
"""Bytes of a master weight, in addition to the weight that forward and backward read. With `shards`, each device stores
a shard of the fp32 weights, from which half weights are gathered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """The types of one training step. Made by `numerics_of`, or with other properties by
    `penstock.precision.properties_of`."""

    level: Precision
    weights: Dtype
    """Type of the weights on a device between steps."""
    gathered: Dtype
    """Type of the weights that forward and backward read; for shards, the type in which they are gathered."""
    gathered_linears: Dtype
    """The same for linear layers of the blocks that multiply in 8 bits."""
    by_lists: bool
    """Whether the op lists choose the type of each operation (autocast), or the arguments' type is used."""
    compute: Dtype
    """Type that matrix products read and write: the activations of linear layers and attention."""
    factors: Dtype
    """Type to which matrix products round their factors, except in linear layers with other `products`."""
    products: Products
    """How linear layers multiply."""
    residual: Dtype
    """Type of the residual stream."""
    norms: Dtype
    """Type of the weights and the arithmetic of normalisation layers."""
    gradients: Dtype
    """Type of a weight's gradient after the backward pass."""
    reduction: Dtype
    """Type in which gradients are accumulated over micro-batches and reduced over replicas."""
    masters: Masters
    """Where the fp32 value of a half weight is stored."""
    moments: Dtype
    """Type of the optimizer's state."""
    moments_per_weight: int
    """Elements of optimizer state per weight; for matrices, if the optimizer treats them differently."""
    loss_scale: float | Literal["dynamic"]
    """Factor of the loss before the backward pass, so that small gradients do not vanish in fp16."""
    outputs: Literal["fp32", "keep"]
    """Whether floating-point outputs of the model are cast to fp32, for losses that are computed outside."""
    lists: Any = None
    """An `OpLists` of `penstock.precision.lists`; None for the default of the type."""

    @property
    def master_bytes(self) -> float:
        """Bytes of one master weight, in addition to the weight."""
        return MASTER_BYTES[self.masters]

    @property
    def half(self) -> bool:
        """Whether anything is computed in half precision."""
        return self.compute in HALVES

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled at all."""
        return self.loss_scale != 1.0

    def describe(self) -> str:
        """One line with all differences from plain fp32."""
        if not self.half:
            return f"{self.level}: fp32 throughout"
        parts = [f"weights {self.weights}"]
        parts.append("each operation by the op lists" if self.by_lists else f"compute {self.compute}")
        parts.append(f"norms {self.norms}")
        if self.masters == "copy":
            parts.append("fp32 master weights")
        parts.append(f"loss scale {self.loss_scale}" if self.scales else "no loss scale")
        if self.products != "plain":
            parts.append(f"matrix products in {self.products}")
        return f"{self.level} in {self.compute}: " + ", ".join(parts)


_latest: tuple[Plan, Numerics] | None = None


def numerics_of(plan: Plan) -> Numerics:
    """The types that `plan` trains in. Sharding changes them only if there are several replicas."""
    global _latest
    latest = _latest  # read once: threads may predict beside each other
    if latest is not None and plan is latest[0]:  # a prediction calls this some twenty times for one Plan
        return latest[1]
    sharding = plan.sharding if plan.replicas > 1 else "ddp"
    numerics = _numerics(
        plan.precision, plan.dtype, plan.matmul, sharding, plan.gradients, plan.algorithm, plan.products, plan.norms,
        plan.gather,
    )  # fmt: skip
    _latest = (plan, numerics)
    return numerics


@lru_cache(maxsize=512)
def _numerics(
    precision: Precision, dtype: Dtype, matmul: str, sharding: str, gradients: str, algorithm: Algorithm,
    products: Products, norms: str, gather: str,
) -> Numerics:  # fmt: skip
    sharded = sharding in ("fsdp", "hsdp")
    compute: Dtype = "fp32" if precision == "O0" else dtype
    factors: Dtype = "tf32" if precision == "O0" and matmul in ("high", "medium") else compute
    masters: Masters = "none"
    if sharded and precision in ("O1", "O2"):
        masters = "shards"
    elif precision == "O2" or (precision == "O1" and sharding in ("zero1", "zero2")):
        # If the optimizer's states are sharded, each device holds whole half weights and a shard of fp32
        # ones, at O1 as at O2.
        masters = "copy"
    weights: Dtype = compute if precision == "O3" or masters == "copy" else "fp32"
    gathered: Dtype = compute if precision == "O1" and sharding != "ddp" else weights
    if masters == "shards":
        gathered = compute
    in_fp8 = sharded and gather == "products"
    # Sharded weights are updated in fp32, so their gradients are summed in fp32.
    added: Dtype = "fp32" if precision == "O1" or (precision == "O2" and sharding != "ddp") else weights
    reduction: Dtype = {"weights": added, "fp32": "fp32", "half": compute}[gradients]
    moments: Dtype = compute if precision == "O3" else "fp32"
    return Numerics(
        level=precision, weights=weights, gathered=gathered, gathered_linears="fp8" if in_fp8 else gathered,
        by_lists=precision in ("O1", "O2"),
        compute=compute, factors=factors, products=products,
        residual=compute if precision in ("O2", "O3") else "fp32",
        norms=compute if precision == "O3" or norms == "half" else "fp32",
        # Weights gathered in fp8 get gradients in the type of unsharded weights.
        gradients="fp32" if in_fp8 and precision == "O1" else gathered,
        reduction=reduction, masters=masters, moments=moments,
        moments_per_weight=OPTIMIZERS[algorithm].moments, loss_scale="dynamic" if compute == "fp16" else 1.0,
        outputs="keep" if compute == "fp32" else "fp32",
    )  # fmt: skip
