"""Recomputation: a block keeps its input for the backward pass, and computes the other activations again there (Chen et
al., "Training Deep Nets with Sublinear Memory Cost", 2016).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.checkpoint import set_checkpoint_early_stop as early_stop

from penstock.config.plan import Plan
from penstock.models.anatomy import anatomy_of

_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear"})
_ATTENTION = "scaled_dot_product"


def recompute_blocks(model: nn.Module, plan: Plan) -> None:
    """Let every n-th block recompute, in place; `plan.recompute_every` is n, and `plan.recompute` says what is kept.
    Where n is not whole, it is the first block from each multiple of n on.

    Call it before the model is compiled or sharded: the weights of a block are then gathered once for recomputation
    and backward pass together. Random numbers are drawn again as they were, so results are the same. Raises ConfigError
    when the blocks of a foreign model cannot be found.
    """
    if plan.recompute == "none":
        return
    blocks = anatomy_of(model).block_modules(model)
    chosen = {math.ceil(turn * plan.recompute_every) for turn in range(len(blocks))}
    for index, block in enumerate(blocks):
        if index in chosen:
            block.forward = _Recomputed(block.forward, plan.recompute)


class _Recomputed:
    """A block's forward pass that keeps only its input. A class, so that a model with it can be pickled and copied."""

    def __init__(self, forward: Callable[..., Any], how: str) -> None:
        self.forward = forward
        self.how = how
        functools.update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if kwargs.get("past_key_values") is not None:
            # A cache of transformers, which a block fills as it runs: the recomputation would find it full.
            kwargs = {**kwargs, "past_key_values": None}
        if self.how == "operators":
            return checkpoint(self.forward, *args, use_reentrant=False, context_fn=_contexts, **kwargs)
        with early_stop(self.how == "early"):
            return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)


def _contexts() -> Any:
    """Keep the outputs of attention and of every second matrix product, and compute the rest again."""
    products = {False: 0, True: 0}  # so far, in the forward pass and in the recomputation

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = operator.name().partition(".")[0]
        if name in _PRODUCTS:
            products[context.is_recompute] += 1
            kept = products[context.is_recompute] % 2 == 1
        else:
            kept = _ATTENTION in name
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
