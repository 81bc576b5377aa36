"""Every fitted number of the planner, each with the measurements that it was fitted to.

There are no constants per model, per table or per row. Figures of datasheets and probes are in `Machine`, and what
follows from the algorithms is counted; the rest is here. `tools/calibration` refits `Constants` and shows what errors
remain, with each model left out in turn; the figures before it are published, measured or assumed.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_MULTIPROCESSORS = 128
ASSUMED_HOST_LINK = 16e9
"""Host link of a device whose Machine does not state it: sixteen lanes of PCI Express 3.0."""
HOST_LINK_SHARE = 0.8
"""Share of the host link's rate that copies of pinned memory reach, after the headers of its packets."""
CITED_FEATURES = 128
"""Features of a head for which the rates of attention kernels are published."""
EXPONENTIALS_PER_CLOCK = 16
"""Exponentials of one multiprocessor per clock, on every chip since Volta (CUDA C++ Programming Guide, arithmetic
instructions)."""
SLOWEST_CLOCK = 1.2e9
"""A clock (Hz) below every training chip's, and above half of it."""
OLD_UNITS = 0.6
"""Share of a Hopper chip's peak that kernels written for Ampere can reach."""
PRODUCTS_IN_FP32 = 3
"""TF32 products that make up one product of nearly fp32 accuracy in torch's memory-efficient kernel
(aten/src/ATen/native/transformers/cuda/mem_eff_attention/gemm_kernel_utils.h)."""
CPU_HALF_FUSED_SHARE = 0.12
"""Share of the half-precision product rate that torch's fused attention reaches on a CPU, if the Machine does not state
it: the kernel converts types on the fly. fp32 has no such loss."""
NATIVE_SHARE = 0.55
"""The same share of Penstock's own attention kernel (`native/attention.cpp`): 98 to 115 of 200 GFLOP/s for ViT-S, BERT
and GPT-2 on one core with AVX512-BF16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """The planner's constants; `DEFAULT` holds the calibrated ones."""

    gemm_share: float = 0.93
    """Share of a chip's best matrix-product rate (`Machine.achievable_flops`) that long runs sustain: fitted."""
    gemm_share_hopper: float = 0.781
    """The same for chips with fp8 units, whose clock falls further under their power limit: fitted on H100. For B200
    and MI300X it is a guess."""
    unmeasured_share: float = 0.80
    """Share of the peak that is assumed as the best rate where no sweep is known; published ceilings are near it."""
    memory_share: float = 0.8523
    """Share of the memory bandwidth that streaming kernels reach: fitted."""
    tile_depth: float = 32.0
    """Inner length at which a tile's prologue and epilogue take as long as its products."""
    fused_attention_share: float = 0.294
    """Share of the peak that first-generation fused attention (`efficient`) reaches in long sequences with heads of
    128, both passes together: fitted. The shares below are for such sequences and heads too."""
    fused_backward: float = 5.0
    """How many times longer that kernel's backward pass takes than its forward pass."""
    fp32_attention_share: float = 0.48
    """Share of a third of the TF32 peak that the same kernel's forward pass reaches in fp32: 45 to 51 % on A100 in the
    table of NVIDIA/cutlass#662, with heads of 64 and 256 or 4,096 tokens and heads of 128 and 8,192. Its backward pass
    is slower by `fused_backward` here, too: 18 % in facebookresearch/xformers#467, of 197 tokens in whole tiles."""
    flash_share: float = 0.60
    """Share of the peak that `flash` reaches on an Ampere chip: 0.50 to 0.73 in the abstract of Dao 2023."""
    flash_share_hopper: float = 0.35
    """The same kernel on Hopper, as the abstract of Shah et al. 2024 states it."""
    cudnn_share_hopper: float = 0.55
    """Kernels written for Hopper: between the forward rate (0.75) of Shah et al. 2024 and its backward's."""
    link_share: float = 0.78
    """Bus bandwidth of large collectives as a share of a node's link rate: nccl-tests on A100 (78 %), H200 rings (82
    %)."""
    node_share: float = 0.9495
    """Share of a node's adapters' rate that large collectives between nodes reach: fitted."""
    link_step_seconds: float = 2.9e-6
    """Latency of one step of a ring inside a node: 40 µs for an all-reduce of 8 in nccl-tests."""
    node_step_seconds: float = 6.0e-6
    """Latency of one step between nodes: nccl-tests on 4 nodes."""
    ramp_seconds: float = 57e-6
    """Cost of starting a pipelined collective of at least `ramp_bytes`; below, it grows with the root of the size."""
    ramp_bytes: float = 44e6
    collective_multiprocessors: float = 20.0
    """Multiprocessors that a collective takes from concurrent kernels: between the 16 and the 24 channels, a thread
    block each, that nccl's logs name in nodes of eight devices."""
    straggling: float = 0.00966
    """Share of a step that replicas wait for the slowest of them, per doubling of the nodes that they span: fitted."""
    kernel_seconds: float = 2.28e-6
    """Gap between two dependent kernels of a GPU, where the host runs ahead: fitted."""
    blocking_seconds: float = 20e-6
    """Extra gap where each launch waits for its kernel's end (CUDA_LAUNCH_BLOCKING=1): an eager operator's time on the
    host, which is then not overlapped. An estimate, not a fit."""
    fragmentation: float = 0.05
    """Memory that the allocator loses, as a share of activations."""
    routing_seconds: float = 3.2e-9
    """Time to read the destinations of one token of a group, before tokens that are sent once per device leave: each
    device reads the routes of all. From the README of HybridEP, 16 to 64 H100 with 4,096 tokens each: the time of its
    calls minus the time of its kernels, in bf16 and in fp8, without the part that grows with the bytes."""
    exchange_hidden_share: float = 0.3655
    """Share of an exchange that overlaps products and attention of another micro-batch: a profile of Qwen3-30B-A3B on
    16 H100 (Megatron-Bridge, its page on overlap of expert parallelism)."""
    host_wait_seconds: float = 0.0457
    """Time that devices wait between two steps of a distributed run, for the host to read the loss and the norm, to
    log, and to launch ahead again. A step on one device need not wait."""


DEFAULT = Constants()
