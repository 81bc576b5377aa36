"""Recomputation: a block saves little for the backward pass, and recomputes the other activations then (Chen et al.,
"Training Deep Nets with Sublinear Memory Cost", 2016; attention's scores only: Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022).
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.checkpoint import set_checkpoint_early_stop as early_stop

from penstock.config.model import ModelConfig
from penstock.config.plan import Plan
from penstock.cpu import kind_of, this_cpu
from penstock.errors import ConfigError
from penstock.models.anatomy import Block, anatomy_of, set_switch
from penstock.models.experts import mixtures_of
from penstock.models.roles import Attention, Experts, Perceptron, Role, walk
from penstock.models.router import same_choices
from penstock.models.wrap import Around, put_around
from penstock.planner.describe import describe
from penstock.planner.memory import pass_bytes
from penstock.planner.recompute import KEPT_PRODUCTS, allowed_bytes, block_kinds, every_nth

_log = logging.getLogger(__name__)
_PRODUCTS = frozenset(
    {"aten::mm", "aten::addmm", "aten::linear", "aten::_grouped_mm", "penstock::native_grouped",
     "penstock::probed_product"}
)  # fmt: skip
"""Products with weights; a policy keeps the output of one in `every`."""
_ATTENTION = "scaled_dot_product"
_MODULES: dict[str, tuple[type[Role], ...]] = {"attention": (Attention,), "mlp": (Perceptron, Experts)}


def recompute_blocks(
    model: nn.Module, plan: Plan, config: ModelConfig | None = None, device: torch.device | str = "cpu"
) -> None:
    """Make blocks recompute, in place, each in a way that `penstock.planner.recompute` describes. A budget is chosen by
    the operators of `config` on `device`.

    Call it before the model is compiled or sharded: the weights of a block are then gathered once for recomputation and
    backward pass together. The same random numbers are drawn again, so results are the same. Raises ConfigError if the
    blocks of a foreign model cannot be found, and for a budget without a configuration.
    """
    if plan.recompute == "none":
        return
    blocks = [block for stack in anatomy_of(model).stacks for block in stack.blocks]
    if plan.recompute == "budget":
        kinds = _chosen(model, plan, config, torch.device(device))
    else:
        kinds = every_nth(plan, len(blocks))
    for block, kind in zip(blocks, kinds, strict=True):
        _apply(model, block, kind)


def _chosen(model: nn.Module, plan: Plan, config: ModelConfig | None, device: torch.device) -> list[str]:
    """The choices of `recompute=budget`, by block."""
    if config is None:
        raise ConfigError(
            f"plan.recompute=budget chooses by the operators of a model's configuration, and {type(model).__name__} "
            "was given as a module; use recompute=early with recompute_every, or one of Penstock's own models."
        )
    work = describe(config, plan, device.type, avx512=this_cpu().avx512, kind=kind_of(device.type))
    needed = pass_bytes(work, plan).blocks
    if needed > 1.001 * allowed_bytes(work, plan):
        least = plan.budget * needed / max(allowed_bytes(work, plan), 1.0)
        _log.warning(
            "plan.budget=%g GiB is less than blocks save even if all of them recompute: %.3g GiB are expected.",
            plan.budget,
            least,
        )
    return block_kinds(config, plan, work)


def _apply(model: nn.Module, block: Block, kind: str) -> None:
    if kind in ("early", "full", *KEPT_PRODUCTS):
        _recompute(model.get_submodule(block.name), kind)
        return
    for word in kind.split("+"):
        if word == "selective":
            set_switch(model, "recompute", block.name)
        elif word in _MODULES:
            roles = [role for role in walk(block.parts) if isinstance(role, _MODULES[word])]
            # Shared experts are recomputed with the mixture that contains them.
            inside = {role.shared for role in roles if isinstance(role, Experts)}
            for role in roles:
                if role not in inside:
                    _recompute(model.get_submodule(role.name), "early")


def _recompute(module: nn.Module, how: str) -> None:
    put_around(module, _Recomputed(module.forward, how, mixed=bool(mixtures_of(module))))


class _Recomputed(Around):
    """A module's forward pass that saves only its input."""

    kind = "recomputation"

    def __init__(self, forward: Callable[..., Any], how: str, *, mixed: bool = False) -> None:
        super().__init__(forward)
        self.how = how
        self.mixed = mixed
        """Whether it contains a choice of experts."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if kwargs.get("past_key_values") is not None:
            # A transformers cache is filled by the block as it runs: in the recomputation it would be full already.
            kwargs = {**kwargs, "past_key_values": None}
        contexts = _contexts_of_mixtures if self.mixed else _contexts
        if every := KEPT_PRODUCTS.get(self.how):
            kwargs["context_fn"] = functools.partial(contexts, every)
        elif self.mixed:
            kwargs["context_fn"] = same_choices
        with early_stop(self.how != "full"):
            return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)


def _contexts_of_mixtures(every: int) -> Any:
    """Reuse the same choices of experts, and keep what `_contexts` keeps. Experts may be sharded and gathered inside,
    by different operators in the two passes, which torch's own contexts do not support."""
    kept: deque[Any] = deque()

    @contextmanager
    def both(choices: Any, again: bool) -> Iterator[None]:
        with choices, _KeptProducts(kept, every, again=again):
            yield

    forward, backward = same_choices()
    return both(forward, again=False), both(backward, again=True)


class _KeptProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the outputs of attention and of one in `every` products; in the second pass it returns them."""

    def __init__(self, kept: deque[Any], every: int, *, again: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept, self.every, self.again, self.products = kept, every, again, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        self.products += name in _PRODUCTS
        keeps = _keeps(name, self.products, self.every)
        if keeps and self.again:
            return _detached(self.kept.popleft())
        out = func(*args, **(kwargs or {}))
        if keeps:
            self.kept.append(_detached(out))
        return out


def _keeps(name: str, products: int, every: int) -> bool:
    """Whether an operator's output is kept; if it is a product with weights, it is the `products`-th. Plain attention's
    scores fill memory more than anything else, so they are kept only if every product is."""
    if name in _PRODUCTS:
        return (products - 1) % every == 0
    return _ATTENTION in name or (every == 1 and "bmm" in name)


def _detached(made: Any) -> Any:
    return tree_map_only(torch.Tensor, torch.Tensor.detach, made)


def _contexts(every: int) -> Any:
    """Keep the outputs of attention and of one in `every` matrix products, and recompute the rest."""
    products = {False: 0, True: 0}  # counts in the forward pass and in the recomputation

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = operator.name().partition(".")[0]
        products[context.is_recompute] += name in _PRODUCTS
        kept = _keeps(name, products[context.is_recompute], every)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
