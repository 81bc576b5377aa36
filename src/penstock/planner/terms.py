"""Settings that decide which operators run, in addition to the model: the Plan's, properties of a run's software that
no Plan states, and for inference how weights are stored.

A CPU's probe measures layers that store their weights in few bits (`weights=int8`) as they run there: rounding,
product, scales and bias, in one kernel if there is one. For a Machine without that measurement, such as a datasheet,
they are priced as training's products in the same 8 bits, with rounding and scaling as separate operators, or as
products of plain weights that are read in fewer bytes.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import penstock.kernels.choices as choices
from penstock.config.activations import KERNELS, UNGATED
from penstock.config.formats import BYTES, PRODUCTS, Dtype, Products
from penstock.config.fused import FusedName
from penstock.config.machine import GemmSample, Machine
from penstock.config.numerics import numerics_of
from penstock.config.plan import AttentionBackend, Plan
from penstock.config.stack import Stack
from penstock.planner.operators import PENSTOCK, BlockKind, Op, Part, Software

Form = Literal["plain", "fused", "math"]


class OpTerms(NamedTuple):
    """How the operators of a model run."""

    samples: int = 1
    tp: int = 1
    sp: bool = False
    cp: int = 1
    ep: int = 1
    stream: float = 4.0
    """Bytes of an element of the residual stream."""
    product: float = 4.0
    """Bytes of an element that goes into a matrix product."""
    casts: bool = False
    """Whether autocast copies each weight to the type of products."""
    products: Products = "plain"
    """How linear layers of blocks multiply."""
    rounded: bool = False
    """Whether those layers get their weights in fp8."""
    attention: AttentionBackend = "sdpa"
    compute: Dtype = "fp32"
    """The type of matrix products."""
    avx512: bool = True
    """Whether a CPU has AVX-512."""
    fused: bool = False
    """Whether neighbouring pointwise operators are one kernel."""
    whole: bool = False
    """Whether the loss is compiled too."""
    copies: bool = False
    """Whether the sample dimension comes before tokens: then plain attention copies queries, keys and values, and
    sequence parallelism copies the data that devices send."""
    host: bool = False
    """Whether the device is a CPU."""
    loops: bool = False
    """Whether experts multiply one after the other."""
    exact: bool = False
    """Whether products are in fp32 regardless of the precision."""
    serving: bool = False
    """Whether the model is served: then tensor parallel devices also split experts, into `ep` groups."""
    one_pass: bool = False
    """Whether a layer whose `products` store its weights rounds, multiplies and scales in one operator."""
    heads: bool = False
    """Whether `products` applies to heads, too."""
    gathers_keys: bool = False
    """Whether context parallel devices gather all keys and values before attention, instead of passing them round."""
    cached: int = 0
    """Tokens of each sequence whose keys and values are in the cache."""
    weight: float = 0.0
    """Bytes of a weight as it is read; 0 if the same as `product`."""
    cache: float = 0.0
    """The same for an element of the cache."""
    chunked: bool = False
    """Whether the loss over a vocabulary is computed in chunks of tokens."""
    real: float = 1.0
    """Share of an encoder's tokens that are computed."""
    words: float = 1.0
    """Share of tokens that the output and the loss are computed for."""
    uneven: float = 1.0
    """Visits to the busiest of the devices that split experts, over the mean."""
    fuses: frozenset[str] = frozenset()
    """Fused operators of `Plan.fuse` that the device has kernels for, alone or with a variant: see
    `penstock.planner.describe.fused_operators`."""
    norms: float = 4.0
    """Bytes per element in which norms compute."""
    software: Software = PENSTOCK

    def fuses_as(self, name: FusedName, variant: str) -> bool:
        """Whether the fused operator supports a variant, i.e. the kind of its norm or activation."""
        return not self.fuses.isdisjoint((name, f"{name} {variant}"))

    def form(
        self, block: BlockKind, rows: float, seen: int, *, cross: bool, causal: bool
    ) -> tuple[Form, int]:
        """How attention of `rows` to `seen` tokens of each sample is computed: by a kernel that never holds all scores
        (`fused`), by ours that does (`plain`), or composed by torch in fp32 (`math`); and the number of keys that a
        query is compared with (an average, for attention in blocks; 0 is all)."""
        stack, queries = block.stack, round(rows * self.cp / (self.samples * block.share * block.samples))
        window = 0 if cross or block.layer.window >= seen else block.layer.window
        cut = (
            choices.window_blocks(window, seen, causal=causal)
            if window and self.host and not stack.biased
            else None
        )
        kernel = choices.attention_kernel(
            self.attention, self.device, self.compute, cut[0] if cut else queries, avx512=self.avx512,
            dropout=stack.weights_dropout > 0 and not self.serving, shared=self.cp > 1,
            learned_bias=stack.positions == "relative" and not cross and not self.serving,
            capped=block.layer.score_cap is not None, sinks=block.layer.sinks and not cross,
            masked=window > 0 or block.layer.head_width % 8 > 0,
        )  # fmt: skip
        form: Form = "fused" if not choices.holds_scores(kernel) else "plain" if kernel == "plain" else "math"
        if self.host and window:
            return form, sum(cut) if cut else 0
        halved = form == "plain" and choices.cuts_causal(self.device, seen, seen, causal=causal)
        return form, (seen + choices.CAUSAL_BLOCK) // 2 if halved else window

    def unpads(self, stack: Stack, tokens: int) -> bool:
        """Whether attention runs sample by sample, and so computes no padding: see `penstock.kernels.padding`."""
        drops = stack.weights_dropout > 0
        biased = stack.biased or stack.sinks or stack.score_cap is not None
        varlen = choices.knows_lengths(
            self.attention, self.device, self.compute, dropout=drops, biased=biased
        )
        least = choices.least_mean_unpadded(self.device, self.product, varlen=varlen)
        return self.cp == 1 and self.real < 1 and tokens * self.real >= least

    @property
    def device(self) -> str:
        """The kind of device, under torch's name."""
        return "cpu" if self.host else "cuda"

    @property
    def spread(self) -> int:
        """Number of devices that split the rows of activations that tensor parallelism leaves whole."""
        return self.tp if self.sp else 1

    @property
    def kept(self) -> float:
        """Bytes per element of a linear layer's input that is kept for the backward pass."""
        row = PRODUCTS[self.products]
        return BYTES[row.saved_inputs] if row.saved_inputs else self.product

    @property
    def statistic(self) -> float:
        """Bytes per row of a norm's or softmax's statistic: fp32 on a GPU."""
        return self.stream if self.host else 4.0


ATTENTION = "attention_block"
"""Name in `Machine.kernels` of the rate of attention in blocks that are computed in one call."""
Basis = Literal["stored", "training", "plain"]
"""Products whose rates price layers with stored weights: the layers' own, training's, or products of plain weights."""


def stored_samples(machine: Machine, weights: Products) -> list[GemmSample]:
    """The measured layers of `machine` that store their weights in the form `weights`."""
    return [sample for sample in machine.gemm if sample.form == "stored" and sample.dtype == weights]


def basis_of(machine: Machine, weights: Products) -> Basis:
    """The best rates that `machine` has for layers that store their weights in the form `weights`."""
    row = PRODUCTS[weights]
    if stored_samples(machine, weights):
        return "stored"
    return "training" if row.passes and row.weights in machine.peak_flops else "plain"


def assumption(machine: Machine, weights: Products) -> str:
    """A sentence that states the assumption of a prediction with stored `weights`; "" if there is none."""
    basis = basis_of(machine, weights)
    if basis == "stored" or PRODUCTS[weights].weights is None:
        return ""
    other = f"{weights} products in training" if basis == "training" else "products of plain weights"
    remedy = "; measure it with penstock probe" if machine.device == "cpu" else ""
    return f"{machine.name} has no rate of inference with weights={weights}, so the rate of {other} is assumed{remedy}."


class Storing(NamedTuple):
    """How the layers of a model store their weights for inference."""

    weights: Products
    basis: Basis
    heads: bool
    """Whether layers of heads store their weights too, and not only layers of blocks."""

    def terms(self, plain: OpTerms) -> OpTerms:
        """The terms of inference with such layers."""
        stored, plain = PRODUCTS[self.weights].weights, plain._replace(serving=True)
        if stored is None:
            return plain
        if self.basis == "plain":
            return plain._replace(weight=BYTES[stored])
        return plain._replace(products=self.weights, one_pass=self.basis == "stored", heads=self.heads)


_ALONE = ("norm", "activation", "pointwise", "copy")
"""Operators that a block in one call computes while it reads and writes the factors of its products."""
_IN_ATTENTION = ("rotary", "axial", "alibi", "relative")
"""Position encodings inside attention that the call does not support."""


def joined(part: Part, machine: Machine, plan: Plan, weights: Products) -> tuple[Op, ...]:
    """The forward operators of a part in inference. Blocks that `penstock.products.blocks` computes in one call become
    one operator of their products and of its own attention, if `machine` has a rate of that. Launching the call and
    allocating its memory takes as long as launching two operators."""
    called = weights == "int8" and plan.attention in ("auto", "sdpa") and numerics_of(plan).compute == "fp32"
    rated = any(sample.name == ATTENTION for sample in machine.kernels)
    if part.block is None or not (called and rated and in_one_call(part.block)):
        return part.forward
    ops = [op._replace(launches=0) for op in part.forward if op.kind not in _ALONE]
    ops = [op._replace(function=ATTENTION) if op.kind == "attention" else op for op in ops]
    return (ops[0]._replace(launches=2), *ops[1:])


def in_one_call(block: BlockKind) -> bool:
    """Whether a block can be computed in one call, by its sizes; `penstock.products.blocks` checks the same on its
    modules."""
    stack, layer, mlp = block.stack, block.layer, block.layer.perceptron
    masked = (
        block.causal or block.cross or layer.window or block.inputs > 1 or stack.positions in _IN_ATTENTION
    )
    more = any((
        block.modulated, layer.norms_branches, layer.norm.zero_centred, layer.parallel, layer.qk_norm, layer.sinks,
        layer.score_cap is not None, layer.layer_scale is not None, layer.shifted,
    ))  # fmt: skip
    alike = (
        layer.heads == layer.kv_heads
        and layer.head_width % 16 == 0
        and mlp.activation in KERNELS - UNGATED.keys()
    )
    return alike and not (masked or more or layer.mixture or layer.routed)


def storing(machine: Machine, weights: Products, *, heads: bool = False) -> Storing:
    """Layers that store their weights as `weights` says, on `machine`."""
    return Storing(weights, basis_of(machine, weights), heads)
