"""How a model runs: the central datum. It prints and parses as one line, and is stored with every run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["O0", "O1", "O3"]
HalfDtype = Literal["bf16", "fp16"]
Matmul = Literal["highest", "high", "medium"]
OptimizerForm = Literal["loop", "foreach", "fused", "contiguous"]
Layout = Literal["batch_first", "batch_second"]
AttentionBackend = Literal["auto", "plain", "sdpa", "flash", "efficient", "cudnn", "math"]
Compile = Literal["none", "blocks", "whole"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a model runs on a machine. The defaults are the plain baseline that every optimisation is measured from."""

    precision: Precision = "O0"
    """O0: fp32 throughout. O1: autocast, fp32 weights. O3: weights, activations and gradients in `dtype`."""
    dtype: HalfDtype = "bf16"
    """The half-width type that O1 and O3 compute in."""
    matmul: Matmul = "highest"
    """Precision of fp32 matrix products, in torch's words: `high` is TF32 on a GPU, `medium` bf16 passes on a CPU."""
    optimizer: OptimizerForm = "loop"
    """One launch per tensor, per chunk of tensors, per group (fused), or one flat buffer per group and dtype."""
    layout: Layout = "batch_first"
    """Order of the token tensor inside the blocks: (batch, sequence, width) or (sequence, batch, width)."""
    attention: AttentionBackend = "sdpa"
    """`sdpa` is torch's own choice; `plain` the two matrix products; the others pin one backend of SDPA;
    `auto` is Penstock's choice by device, dtype and sequence length."""
    compile: Compile = "none"
    """torch.compile: of each repeated block (`blocks`, one compilation serves all), or of the whole model."""
    micro_batch: int = 8
    """Samples per forward pass on one device."""
    accumulate: int = 1
    """Forward and backward passes per optimizer step."""
