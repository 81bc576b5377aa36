"""Properties of a run's software that no Plan states; the defaults are those of Penstock's own training."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Software(NamedTuple):
    """How a run's software differs from Penstock's."""

    launch_blocking: bool = False
    """Whether each launch waits for its kernel's end, as under CUDA_LAUNCH_BLOCKING=1."""
    host_waits: bool = False
    """Whether the devices wait between two steps of a distributed run until the host has read the loss."""
    adds_in_products: bool = False
    """Whether the products that make gradients of weights add them to those of earlier micro-batches, as Megatron's do:
    then no separate pass does."""
    softmax_apart: bool = False
    """Whether the softmax of scores is computed in fp32, by single operators, even where other operators are fused."""
    casts_gradients: bool = False
    """Whether gradients in half precision are copied to fp32 before they are added to those of earlier micro-batches,
    as by DeepSpeed's optimizer for bf16 (`update_hp_grads` of its `bf16_optimizer.py`)."""
    sums_whole: bool = False
    """Whether replicas sum all gradients, even where each of them updates a share of the weights, as DeepSpeed's
    pipeline does for that optimizer (`_bf16_reduce_grads` of its `pipe/engine.py`)."""
    divides_gradients: bool = False
    """Whether a separate pass divides sharded gradients by the number of replicas, as torch's FSDP 1 does. For FSDP 2
    nccl divides them during the reduction (`_get_gradient_divide_factors` of its `_fsdp_collectives.py`)."""
    shards_in_place: bool = False
    """Whether sharded weights are gathered directly where they are used, and gradients reduced directly where they are
    made, as in Megatron's FSDP (its README: zero copy), instead of being copied through flat buffers."""
    norms_apart: bool = False
    """Whether torch composes an RMSNorm from single operators on a GPU too, as it did before torch 2.9."""
    casts_norms: bool = False
    """Whether a norm under autocast writes fp32 and a separate operator casts it, even where others are fused."""
    layers_apart: bool = False
    """Whether queries, keys and values, and both inputs of a gated perceptron, are separate layers, whose products
    `recompute=operators` counts one by one."""
    adds_parts: bool = False
    """Whether one kernel weights a part of context parallel attention and adds it to the result, as in Transformer
    Engine (`flash_attn_fwd_out_correction` of its `context_parallel.py`)."""
    even_stages: bool = False
    """Whether a pipeline's stages all have equally many blocks, regardless of the output's cost, as in Megatron."""
    loss: Literal["penstock", "torch", "megatron"] = "penstock"
    """Whose operators make the loss. Unlike Penstock's, both cast logits to fp32: torch's are a log-softmax and a
    gather, Megatron's are single operators in place (its `cross_entropy.py`)."""

    experts_apart: bool = False
    """Whether each expert multiplies in a separate kernel, on concurrent streams, as in Transformer Engine
    (`multi_stream_cublas_gemm` of its `cublaslt_gemm.cu`)."""
    scaling: Literal["", "delayed", "current", "blockwise"] = ""
    """How Transformer Engine finds fp8 scales; "" if unused: see `penstock.planner.listing.QUANTIZERS`."""
    sends_once: bool = False
    """Whether a token goes once to each node and to each device that holds some of its experts, as DeepEP sends it, and
    not once to each expert."""
    block_host_seconds: float = 0.0
    """The host's time for a block besides its launches, half of it in the forward pass: autograd calls one function for
    each function of that pass."""
    hides_exchange: bool = False
    """Whether tokens travel to experts and back while another micro-batch computes."""


PENSTOCK = Software()
