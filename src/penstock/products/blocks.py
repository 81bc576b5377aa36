"""Inference of blocks whose linear layers all multiply in int8, in one call per block, on CPUs with AVX512-VNNI.

Separate operators write and read all tokens in between, and in a small model calling an operator takes longer than its
computation. One call (`penstock.kernels.native_blocks`) normalises while it rounds, and adds while it multiplies. Only
a block's parts decide whether it is supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from penstock.kernels.bias_activation import ACTIVATION_CODES
from penstock.kernels.documents import Documents
from penstock.kernels.native import direct
from penstock.kernels.native_blocks import VECTOR, BlockKernel, computes_blocks
from penstock.kernels.native_integers import InputScale, PackedInt8
from penstock.models.block import Block, ExpertSamples
from penstock.models.inputs import ALONE, Context
from penstock.models.sublayers import MLP, Attention, ZeroCentredNorm
from penstock.models.wrap import Around, find, put_around
from penstock.products.integers import Int8
from penstock.products.rounded import RoundedInt8


def join_blocks(model: nn.Module) -> int:
    """Let supported blocks of a model for inference run in one call each, in place; return their number. Results change
    only by rounding, which rounding to 8 bits can amplify. A block falls back to its modules once one of them is
    replaced, or if `attention` is neither `auto` nor `sdpa`."""
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    count = 0
    for block in blocks if blocks and computes_blocks() else ():
        if (kernel := _kernel_of(block)) is not None:
            put_around(block, OneCall(block, kernel))
            count += 1
    return count


_Place = tuple[dict[str, nn.Module | None], str, nn.Module]


def _places(block: Block) -> tuple[_Place, ...]:
    """The parts of a block, each with the dict that holds it: looked up there, torch's `__getattr__` is not called."""
    names = {
        block: ("attention", "mlp", "norm1", "norm2"),
        block.attention: ("qkv", "out"),
        block.mlp: ("up", "down"),
    }
    return tuple(
        (owner._modules, name, owner.get_submodule(name)) for owner, parts in names.items() for name in parts
    )


def _kernel_of(block: Block) -> BlockKernel | None:
    """The kernel of a block; None if it has parts that the kernel does not support."""
    attention, mlp, norms = block.attention, block.mlp, (block.norm1, block.norm2)
    if not isinstance(attention, Attention):
        return None
    plain = block.cross is None and type(block) is Block and find(block, ExpertSamples) is None
    bare = all(branch.scale is None and branch.norm is None for branch in (block.branch1, block.branch2))
    known = type(mlp) is MLP and mlp.activation in ACTIVATION_CODES and not mlp.activated
    heads = (
        attention.shared == 1
        and attention.q_norm is None
        and not (attention.causal or attention.windowed)
        and (attention.cap, attention.sinks, attention.shift) == (None, None, None)
    )
    if not (plain and bare and known and heads and attention.head_width % VECTOR == 0):
        return None
    if not all(_norms_fp32(norm, first=norm is block.norm1 and block.norm_first) for norm in norms):
        return None
    assert isinstance(mlp, MLP)
    layers = [_packed(layer) for layer in (attention.qkv, attention.out, mlp.up, mlp.down)]
    if any(layer is None for layer in layers):
        return None
    return BlockKernel(
        [layer for layer in layers if layer is not None], [norm for norm in norms if norm is not None],
        width=attention.head_width, scale=attention.scale, norm_first=block.norm_first, activation=mlp.activation,
    )  # fmt: skip


def _norms_fp32(norm: nn.Module | None, *, first: bool) -> bool:
    """Whether the kernel supports a norm; the `first` norm of a block may be missing."""
    if not isinstance(norm, nn.LayerNorm | nn.RMSNorm) or isinstance(norm, ZeroCentredNorm):
        return first and isinstance(norm, nn.Identity)
    tensors = [tensor for tensor in (norm.weight, getattr(norm, "bias", None)) if tensor is not None]
    return all(tensor.dtype == torch.float32 and tensor.device.type == "cpu" for tensor in tensors)


def _packed(layer: nn.Module) -> tuple[PackedInt8, InputScale] | None:
    """The int8 weights of a linear layer and how its inputs are rounded; None for other layers."""
    if isinstance(layer, RoundedInt8) and layer.fused is not None and layer.whole_rows is None:
        return layer.fused, "size" if layer.static is None else layer.static
    if type(layer) is Int8 and layer.fused is not None:
        return layer.fused, "range"
    return None


class OneCall(Around):
    """Computes a block in one kernel call as long as its parts have not changed, otherwise by its modules."""

    kind = "one call"

    def __init__(self, block: Block, kernel: BlockKernel) -> None:
        super().__init__(block.forward)
        self.block, self.kernel, self.places = block, kernel, _places(block)

    def __call__(self, x: Tensor, context: Context = ALONE) -> Tensor:
        output = None if torch.compiler.is_compiling() else self.computed(x, context)
        return self.forward(x, context) if output is None else output

    def computed(self, x: Tensor, context: Context) -> Tensor | None:
        """The kernel's output; None for inputs that it does not support."""
        if any(held.get(name) is not part or part._forward_hooks for held, name, part in self.places):
            return None
        block, attention = self.block, cast(Attention, self.block.attention)
        changed = block.training or attention.looked is not None or attention.backend not in ("auto", "sdpa")
        masked = context.real is not None or context.rotation is not None or context.causal
        if changed or masked or x.dtype != torch.float32 or torch.is_grad_enabled() or not direct(x):
            return None
        lengths = _lengths(x, context, sequence_first=block.sequence_first)
        return None if lengths is None else self.kernel(x, lengths)


def _lengths(x: Tensor, context: Context, *, sequence_first: bool) -> Sequence[int] | None:
    """Tokens of each of the concatenated samples in x, if each attends to all of its own tokens; else None."""
    mask = context.mask
    if sequence_first or not x.numel():
        return None
    if mask is None:
        return [x.shape[1]] * x.shape[0]
    if isinstance(mask, Documents) and mask.mask is None and not mask.causal and len(mask.runs) == 1:
        return mask.runs[0]
    return None
