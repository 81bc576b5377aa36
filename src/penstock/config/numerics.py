"""In which type everything of a training step is kept and computed: derived from the Plan here and nowhere else.

The levels are those of NVIDIA Apex; their mechanisms those of Micikevicius et al., "Mixed Precision Training", ICLR
2018. Types go by name, so that planning needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from penstock.config.plan import Plan

Dtype = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "int8"]
Masters = Literal["none", "copy", "remainder", "shards"]

BYTES: dict[Dtype, float] = {"fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.03}
"""Of one number; one kept in 8 bits has its share of its block's scale (Dettmers et al., ICLR 2022)."""
MASTER_BYTES: dict[Masters, float] = {"none": 0.0, "copy": 4.0, "remainder": 2.0, "shards": 0.0}
"""Of a master weight beside the weight that forward and backward read. `remainder` is the 16 bits that a bf16 weight
lacks; `shards` are fp32 weights that every device keeps its share of, from which half ones are gathered."""
MOMENTS = {"adamw": 2, "adam8bit": 2, "sgd": 1, "muon": 1}
"""Numbers that an optimizer keeps per weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """The types of one training step. Made by `numerics_of`."""

    weights: Dtype
    """Of weights as they lie on a device between steps."""
    gathered: Dtype
    """Of weights as forward and backward get them: of shards, the type that they are gathered in."""
    by_lists: bool
    """Whether each operation runs in the type that the op lists give it (autocast), or in that of its arguments."""
    compute: Dtype
    """Of what matrix products read and write: the activations of linear layers and attention."""
    products: Dtype
    """That linear layers inside the blocks multiply in."""
    residual: Dtype
    """Of the stream that residual branches are added to."""
    norms: Dtype
    """Of the weights and the arithmetic of normalisation layers."""
    gradients: Dtype
    """Of a weight's gradient, as the backward pass leaves it."""
    reduction: Dtype
    """That gradients are accumulated over micro-batches and reduced over replicas in."""
    masters: Masters
    """Where the fp32 value of a half weight is."""
    moments: Dtype
    """Of what the optimizer keeps per weight."""
    moments_per_weight: int
    loss_scale: bool
    """Whether the loss is scaled, so that small gradients do not vanish in fp16."""
    fp8: Literal["none", "tensorwise", "rowwise"]
    """How products are scaled into fp8, if they are."""

    @property
    def master_bytes(self) -> float:
        """Of one master weight, beside the weight."""
        return MASTER_BYTES[self.masters]

    @property
    def state_bytes(self) -> float:
        """That the optimizer keeps per weight, master weight and moments."""
        return self.master_bytes + self.moments_per_weight * BYTES[self.moments]

    @property
    def half(self) -> bool:
        """Whether anything is computed in half precision."""
        return self.compute in ("bf16", "fp16")


def numerics_of(plan: Plan) -> Numerics:
    """The types that `plan` trains in. What sharding changes of them counts only where there are replicas to share."""
    sharding = plan.sharding if plan.dp * plan.cp > 1 else "ddp"
    return _numerics(
        plan.precision,
        plan.dtype,
        plan.master,
        plan.matmul,
        sharding,
        plan.gradients,
        plan.algorithm,
        plan.fp8,
    )


@lru_cache(maxsize=512)
def _numerics(
    precision: str, dtype: Dtype, master: Masters, matmul: str, sharding: str, gradients: str, algorithm: str,
    fp8: bool,
) -> Numerics:  # fmt: skip
    sharded = sharding in ("fsdp", "hsdp")
    compute: Dtype = "fp32" if precision == "O0" else dtype
    products: Dtype = "tf32" if precision == "O0" and matmul != "highest" else compute
    masters: Masters = "none"
    if sharded and precision in ("O1", "O2"):
        masters = "shards"
    elif precision == "O2" or (precision == "O1" and sharding in ("zero1", "zero2")):
        # With the optimizer's states sharded, whole half weights lie beside shards of fp32 ones, at O1 as at O2.
        masters = master
    weights: Dtype = compute if precision == "O3" or masters in ("copy", "remainder") else "fp32"
    gathered: Dtype = compute if precision == "O1" and sharding != "ddp" else weights
    if masters == "shards":
        gathered = compute
    # Weights that are shared out are updated in fp32, so their gradients are added up in it.
    added: Dtype = "fp32" if precision == "O1" or (precision == "O2" and sharding != "ddp") else weights
    reduction: Dtype = {"weights": added, "fp32": "fp32", "half": compute}[gradients]
    moments: Dtype = compute if precision == "O3" else "fp32"
    return Numerics(
        weights=weights,
        gathered=gathered,
        by_lists=precision in ("O1", "O2"),
        compute=compute,
        products="fp8" if fp8 else products,
        residual=compute if precision in ("O2", "O3") else "fp32",
        norms=compute if precision == "O3" else "fp32",
        gradients=gathered,
        reduction=reduction,
        masters=masters,
        moments="int8" if algorithm == "adam8bit" else moments,
        moments_per_weight=MOMENTS[algorithm],
        loss_scale=compute == "fp16",
        fp8="tensorwise" if fp8 else "none",
    )
