"""Rates of layers that store their weights in few bits for inference (`weights=int8`).

A CPU's probe measures such layers as they run there: rounding, product, scales and bias, in one kernel if there is one.
For a Machine without that measurement, such as a datasheet, they are priced as training's products in the same 8 bits,
with rounding and scaling as separate operators, or as products of plain weights that are read in fewer bytes.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from penstock.config.activations import KERNELS, UNGATED
from penstock.config.formats import BYTES, PRODUCTS, Products
from penstock.config.machine import GemmSample, Machine
from penstock.config.numerics import numerics_of
from penstock.config.plan import Plan
from penstock.planner.operators import Op, Part
from penstock.planner.shapes import BlockKind
from penstock.planner.terms import OpTerms

ATTENTION = "attention_block"
"""The rate of attention in such a call, by its name in `Machine.kernels`."""
Basis = Literal["stored", "training", "plain"]
"""Products whose rates price such layers: the layers' own, training's, or those with plain weights."""


def stored_samples(machine: Machine, weights: Products) -> list[GemmSample]:
    """The measured layers of `machine` with weights stored so."""
    return [sample for sample in machine.gemm if sample.form == "stored" and sample.dtype == weights]


def basis_of(machine: Machine, weights: Products) -> Basis:
    """The best rates that `machine` has for layers with weights stored so."""
    row = PRODUCTS[weights]
    if stored_samples(machine, weights):
        return "stored"
    return "training" if row.passes and row.weights in machine.peak_flops else "plain"


def assumption(machine: Machine, weights: Products) -> str:
    """A sentence that states what a prediction with weights stored so assumes; "" if nothing."""
    basis = basis_of(machine, weights)
    if basis == "stored" or PRODUCTS[weights].weights is None:
        return ""
    other = f"{weights} products in training" if basis == "training" else "products of plain weights"
    remedy = "; measure it with penstock probe" if machine.device == "cpu" else ""
    return f"{machine.name} has no rate of inference with weights={weights}, so that of {other} is assumed{remedy}."


class Storing(NamedTuple):
    """How the layers of a model store their weights for inference."""

    weights: Products
    basis: Basis
    heads: bool
    """Whether layers of heads do so too, besides those of blocks."""

    def terms(self, plain: OpTerms) -> OpTerms:
        """The terms of inference with layers that store their weights so."""
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
    """Whether that call supports a block, by its sizes; `penstock.products.blocks` checks the same on its modules."""
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
