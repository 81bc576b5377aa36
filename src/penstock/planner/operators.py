"""Operators of a step, grouped into the parts of a model: the work of one device for one micro-batch.

A model of any family is kinds of equal blocks between an entrance and an exit (`blocks_of`), in sizes only, so that
`describe` lists the operators of all families in one way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Literal, NamedTuple

from penstock.config.layer import Layer
from penstock.config.machine import ProductForm
from penstock.config.model import ModelConfig
from penstock.config.stack import Stack

OpKind = Literal[
    "gemm", "conv", "bmm", "attention", "norm", "softmax", "activation", "dropout", "torch_dropout", "pointwise",
    "copy", "reduce", "quantize", "gather", "scatter", "allreduce", "exchange", "ring",
]  # fmt: skip
Module = Literal[
    "", "attention", "cross", "perceptron", "router", "experts", "norm", "table", "condition", "shared_table", "head",
    "loss",
]  # fmt: skip
Axis = Literal["", "tensor", "expert", "context"]
Place = Literal["entrance", "block", "exit", "model"]
"""Position of a part: before the blocks, one of them, after them, or all of a model that is not divided."""
MATRIX = frozenset(("gemm", "conv", "bmm"))
BIASED = "attention_biased"
"""`Op.function` of fused attention with a bias added to the scores, which few GPU kernels support."""
COLLECTIVE = frozenset(("gather", "scatter", "allreduce", "exchange", "ring"))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKind:
    """A kind of block that the model has `count` times, with the sizes of `stack`."""

    stack: Stack
    layer: Layer
    count: int
    tokens: int
    causal: bool = False
    cross: int = 0
    """Tokens of another stack that the block also attends to; 0 is none."""
    cross_width: int = 0
    """Features of each token of the other stack."""
    modulated: bool = False
    """Whether the block is shifted, scaled and gated by each sample's condition."""
    run: int = 0
    """Index of the block's run in the model's graph."""
    samples: float = 1.0
    """Samples that the block computes per sample of a micro-batch."""
    inputs: int = 1
    """Number of inputs that these samples come from, each with its own mask."""

    @property
    def share(self) -> float:
        """Share of its run's samples that the block computes."""
        return 1 / self.stack.experts if self.layer.routed else 1.0


@lru_cache(maxsize=256)
def blocks_of(model: ModelConfig) -> tuple[BlockKind, ...]:
    """The kinds of blocks of a model, run by run, each kind once, at the position of its first block."""
    graph = model.graph
    return tuple(
        BlockKind(
            stack=run.stack, layer=layer, count=count, tokens=graph.length(run), run=number,
            causal=all(graph.hides_later(run, source) for source in graph.inputs_through(run)),
            samples=graph.samples(run), inputs=len(graph.inputs_through(run)), modulated=run.modulated,
            cross=sum(graph.length(graph.run(name)) for name in run.memories), cross_width=graph.memory_width(run),
        )
        for number, run in enumerate(graph.runs)
        for layer, count in run.stack.kinds.items()
    )  # fmt: skip


def counted_tokens(model: ModelConfig) -> int:
    """Tokens of one sample that tokens per second count: those that the last head reads."""
    return model.graph.length(model.graph.main)


class Op(NamedTuple):
    """One operator. Sizes are of one device, bytes of the types that the plan computes in.

    `gemm`, `conv` and `bmm` multiply `batch` pairs (m, k) @ (k, n) in one launch; a `conv` is listed as its equivalent
    product. `attention` is a fused kernel: `batch` heads of `m` queries, `n` keys and `k` features. Other kinds move
    `read` and `written` bytes. A collective moves `read` bytes in all, over the devices of its `axis`. For an exchange
    that sends a token once to each of its devices, `k` is the token's number of destinations (else 0), `m` the share of
    the devices that these are drawn from, and `elements` the tokens of all devices, whose routes are read first.
    """

    name: str
    kind: OpKind
    forward: bool = True
    batch: float = 1
    m: float = 0
    n: int = 0
    k: float = 0
    read: float = 0.0
    written: float = 0.0
    elements: float = 0.0
    """Elements that an operator other than a product computes; for attention, elements of all queries."""
    kept: float = 0.0
    """Bytes that a forward operator keeps for the backward pass, or that a backward operator frees."""
    group: str = ""
    """Kind of the kept bytes, such as `scores`, by which reports sum them."""
    given: float = 0.0
    """Bytes of inputs that must still be kept if the operator is recomputed."""
    weights: int = 0
    """Parameters that a forward operator uses, or whose gradients a backward operator makes."""
    tensors: int = 0
    """Tensors that these parameters are in."""
    launches: int = 1
    narrow: bool = False
    """Whether a product multiplies in the 8 bits of the Plan's `products`."""
    causal: bool = False
    window: int = 0
    """The most keys that a query may see; 0 is all."""
    axis: Axis = ""
    hides: bool = False
    """Whether a collective can overlap the gradients of weights, or an exchange another micro-batch."""
    beside: bool = False
    """Whether an exchange runs while shared experts compute, or the kernels of a product run concurrently."""
    scaled_every: int = 0
    """Number of terms after which fp32 units scale the partial sums of tensor cores in a product; 0 is never."""
    exact: bool = False
    """Whether a product multiplies in fp32 at every precision."""
    uncut: bool = False
    """Whether a collective belongs to no single product with which it could be cut into pieces."""
    function: str = ""
    """The function that an activation computes, as a probe names it: `gelu_tanh`, or `fused_gelu_tanh` of the kernels
    that `Plan.fuse` chooses. "" if unknown, priced as GELU. Attention has a function if its kernel has its own rate:
    `attention_block`."""
    row: int = 0
    """Elements in a row of a softmax; 0 where that is not known."""
    module: Module = ""
    """The operator's module: `cross` attention, `experts` of a mixture (without its shared experts), the `shared_table`
    whose gradients are added up because it is used more than once. Collectives have none."""
    in_place: bool = False
    """Whether it overwrites its input, and so allocates nothing."""
    scratch: bool = False
    """Whether its output is freed after the next operator."""
    scores: bool = False
    """Whether it is a single operator of unfused attention, on scores or values."""
    pieces: tuple[int, ...] = ()
    """Number of outputs of each projection that a product packs; empty if it is a single projection."""
    linear: str = ""
    """Name of the linear's forward product, if this is the linear's product, cast or gradient; else ""."""
    adapter: bool = False
    """Whether it belongs to an adapter, which is trained while the model's own weights are frozen."""
    fused: bool = False
    """Whether it is a kernel that `Plan.fuse` chose, which no compiler merges with its neighbours."""
    padded: bool = False
    """Whether a product over a vocabulary is padded with zeros after its entries, to a size that suits matrix units."""

    @property
    def flops(self) -> float:
        """Model FLOPs: recomputation is not counted, and masked scores of causal attention are."""
        if self.kind == "attention":
            return (4.0 if self.forward else 8.0) * self.batch * self.m * self.n * self.k
        return 2.0 * self.batch * self.m * self.n * self.k

    @property
    def repeated_flops(self) -> float:
        """FLOPs that repeat forward work: a fused attention kernel forms the scores again in its backward pass."""
        if self.kind == "attention" and not self.forward:
            return 2.0 * self.batch * self.m * self.n * self.k
        return 0.0

    @property
    def form(self) -> ProductForm:
        """Form of a product: in the backward pass, a product with `weights` makes their gradients, one without makes
        the inputs' gradients."""
        if self.forward:
            return "forward"
        return "weight" if self.weights > 0 else "input"

    @property
    def over_rows(self) -> bool:
        """Whether a product sums over rows of tokens, as the gradient of a weight does."""
        return self.kind == "gemm" and not self.forward and self.weights > 0


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
    """The library that computes the loss. torch and Megatron cast logits to fp32, for a log-softmax and a gather, or
    for single operators in place (Megatron's `cross_entropy.py`)."""
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


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Operators of one part of a model: its entrance, one of `count` equal blocks, or its exit."""

    place: Place
    count: int
    forward: tuple[Op, ...]
    backward: tuple[Op, ...]
    entering: float = 0.0
    """Bytes of its input, which recomputation of the whole part keeps."""
    parameters: int = 0
    """Parameters on one device before data parallel sharding, without those of experts."""
    experts: int = 0
    """Parameters of experts, on one device before data parallel sharding."""
    tensors: int = 0
    block: BlockKind | None = None

    @property
    def learned(self) -> int:
        """All parameters."""
        return self.parameters + self.experts

    @property
    def model_flops(self) -> float:
        """FLOPs of forward and backward."""
        return sum(op.flops for op in (*self.forward, *self.backward))


@dataclass(frozen=True, eq=False, kw_only=True)
class Workload:
    """Work of one device for one micro-batch. Equal only to itself, so that results derived from it can be cached by
    it."""

    parts: tuple[Part, ...]
    samples: int
    tokens: int = 0
    """Tokens counted for one sample; 0 if unknown."""
    tied: int = 0
    """Parameters of the entrance that the exit uses too."""
    kept_bytes: float | None = None
    """Bytes kept for the backward pass, where these were counted, as for a traced model."""
    working_bytes: float = 0.0
    """Peak bytes of the backward pass beyond these, likewise counted."""
    units: int = 1
    """Number of pieces in which sharded weights are gathered: the blocks."""
    vision: bool = False
    """Whether a sample is an image."""
    whole: Workload | None = None
    """One sample of the model on one device, whose costs decide pipeline cuts; None is this workload itself."""
    software: Software = PENSTOCK
    even: Workload | None = None
    """This workload with evenly visited experts: the average device's FLOPs; None is this workload itself."""
    learned: float = 1.0
    """Share of the parameters that learn; the others have no gradients, masters or moments."""
    learned_tensors: float = 1.0
    """Share of the tensors that they are in."""
    stored: float = 0.0
    """Share of the parameters that are stored in few bits, in `stored_bytes` each."""
    stored_bytes: float = 0.0

    @cached_property
    def blocks(self) -> tuple[Part, ...]:
        """The parts that repeat."""
        return tuple(part for part in self.parts if part.block is not None)

    @cached_property
    def stacks(self) -> tuple[tuple[Part, ...], ...]:
        """The same by run of the model's graph: an encoder's, a decoder's."""
        runs = groupby(self.blocks, lambda part: part.block.run if part.block else 0)
        return tuple(tuple(run) for _, run in runs)

    def each(self, of: Callable[[Part], float]) -> list[float]:
        """A quantity of each block, in execution order."""
        amounts: list[float] = []
        for parts in self.stacks:
            by_layer = {part.block.layer: of(part) for part in parts if part.block}
            amounts += [by_layer[layer] for layer in parts[0].block.stack.layers] if parts[0].block else []
        return amounts

    @cached_property
    def depth(self) -> int:
        """Blocks of all kinds; 0 where they are not distinguished."""
        return sum(part.count for part in self.blocks)

    @property
    def pieces(self) -> float:
        """Number of pieces in which one block's weights are gathered, or the model's if it has no blocks."""
        return self.units / max(1, self.depth)

    @cached_property
    def parameters(self) -> int:
        """Parameters on this device, with all stages and before data parallel sharding."""
        return sum(part.count * part.learned for part in self.parts)

    def weight_bytes(self, plain: float) -> float:
        """Average bytes per parameter; a parameter that is not stored in few bits takes `plain` bytes."""
        return plain + self.stored * (self.stored_bytes - plain)

    @cached_property
    def tensors(self) -> int:
        """Number of tensors that hold these parameters."""
        return sum(part.count * part.tensors for part in self.parts)

    @cached_property
    def shared_table(self) -> int:
        """Parameters of a table of embeddings that is used more than once, on one device; 0 where there is none."""
        return sum(op.n for op in self.parts[0].backward if op.module == "shared_table")

    @cached_property
    def model_flops(self) -> float:
        """FLOPs of forward and backward, attention in full: the numerator of MFU."""
        return sum(part.count * part.model_flops for part in (self.even or self).parts)

    def operators(self) -> Iterator[tuple[int, Op]]:
        """All operators of forward and backward, with how often each runs."""
        for part in self.parts:
            for op in part.forward:
                yield part.count, op
        for part in reversed(self.parts):
            for op in part.backward:
                yield part.count, op
