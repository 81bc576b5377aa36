"""The backward pass of a script without a loss scale: gradients are scaled while it runs, and true before and after.

The scale is a power of two unless the user sets another, so multiplying the earlier gradients and dividing the sum
afterwards changes no bit of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.optim import Optimizer

from penstock.errors import ConfigError
from penstock.optim.clip import unscale_
from penstock.optim.tensors import parameters_of
from penstock.precision.copies import is_half
from penstock.precision.scaling import Gradients
from penstock.precision.stepping import gradients_beside


def scaled_backward(
    original: Callable[..., None], optimizers: Sequence[Optimizer], tensors: Any, grad_tensors: Any, inputs: Any,
    **options: Any,
) -> None:  # fmt: skip
    """Run `original`, torch's backward pass, for some accelerated optimizers; `tensors` to `inputs` are as for
    torch.autograd.backward.

    Raises:
        ConfigError: the gradients are to be differentiated again, which a loss scale does not support.
        NumericError: gradients overflow at the lowest scale.
    """
    all_of = [gradients_beside(optimizer) for optimizer in optimizers]
    for gradients in all_of:
        gradients.collect()
    roots, starts = listed(tensors), None
    taking, others = _taking_part([own for own in all_of if own.session.scalers], roots, inputs)
    if taking:
        with torch.enable_grad():
            starts = _started(roots, grad_tensors)
    if starts is None:
        original(tensors, grad_tensors, inputs=inputs, **options)
        for gradients in all_of:
            gradients.collect()
        return
    if options.get("create_graph"):
        raise ConfigError(
            "backward(create_graph=True) asks for gradients of gradients, which a loss scale would multiply; use "
            "--dtype bf16, which needs no loss scale, or torch.autograd.grad for the inner gradients."
        )
    _run_scaled(functools.partial(original, inputs=inputs, **options), taking, others, *starts)


@torch.no_grad()
def _run_scaled(
    run: Callable[..., None], taking: list[Gradients], others: list[Tensor], roots: list[Tensor], starts: list[Tensor]
) -> None:  # fmt: skip
    """Run the backward pass from `roots` with scaled gradients, and unscale all that it leaves behind."""
    scale = _scale(taking)
    leaves = [*others, *(p for gradients in taking for p in parameters_of(gradients.optimizer))]
    held = _distinct(leaf.grad for leaf in leaves)
    unscale_(held, scale.double().reciprocal())  # multiplies by the scale: it divides by its inverse
    before = {id(leaf): (leaf.grad, -1 if leaf.grad is None else leaf.grad._version) for leaf in leaves}
    for gradients in taking:
        gradients.in_backward = True
    try:
        with torch.enable_grad():
            run(roots, [start * scale.to(start.device) for start in starts])
    except BaseException:
        unscale_(held, scale)
        raise
    finally:
        for gradients in taking:
            gradients.in_backward = False
    done: set[int] = set()
    for gradients in taking:
        _unscale(gradients, scale, before, done)
    unscale_([g for g in _distinct(leaf.grad for leaf in others) if id(g) not in done], scale)


def _unscale(
    own: Gradients, scale: Tensor, before: dict[int, tuple[Tensor | None, int]], done: set[int]
) -> None:
    """Unscale an optimizer's gradients, and record whether new ones overflowed."""
    own.collect()
    new = False
    gradients: list[Tensor] = []
    for parameter in parameters_of(own.optimizer):
        if parameter.grad is None:
            continue
        gradient, version = before[id(parameter)]
        new = new or parameter.grad is not gradient or parameter.grad._version != version
        gradients.append(parameter.grad)
    # Two optimizers may hold the same parameter; the second then only checks it.
    fresh = [g for g in gradients if id(g) not in done]
    again = [g for g in gradients if id(g) in done]
    overflow = unscale_(fresh, scale)
    earlier = unscale_(again, torch.ones_like(scale))
    done.update(map(id, fresh))
    if not new:
        return
    flags = [f for f in (overflow, earlier, *(flag for _, flag in own.overflows)) if f is not None]
    own.scaler = own.session.scalers[0]
    own.overflows = [(own.scaler, torch.stack([f.to(flags[0].device) for f in flags]).amax())]
    own.prepared = True


def _taking_part(
    scaled: list[Gradients], roots: list[Any], inputs: Any
) -> tuple[list[Gradients], list[Tensor]]:
    """The optimizers whose parameters this backward pass reaches, and all other tensors that get a gradient."""
    if not scaled:
        return [], []
    hidden = False
    if inputs is None:
        reached, hidden = leaves_behind(root.grad_fn for root in roots if isinstance(root, Tensor))
    else:
        reached = {id(t): t for t in listed(inputs) if isinstance(t, Tensor)}
    taking = []
    owned: set[int] = set()
    for own in scaled:
        own_leaves = _leaves_of(own)
        if hidden or not own_leaves.isdisjoint(reached):
            taking.append(own)
            owned |= own_leaves
    return taking, [leaf for key, leaf in reached.items() if key not in owned]


def _leaves_of(own: Gradients) -> set[int]:
    """Ids of the leaves at which an optimizer's gradients accumulate."""
    leaves = {id(p) for p in parameters_of(own.optimizer)}
    if own.session.masters is not None:
        leaves |= {id(half) for half in own.session.masters.weights_of(own.optimizer)}
    return leaves


def _scale(taking: list[Gradients]) -> Tensor:
    """The smallest loss scale of these optimizers, after the scales have been updated by the last steps' overflows."""
    for gradients in taking:
        if gradients.prepared and not any(p.grad is not None for p in parameters_of(gradients.optimizer)):
            gradients.discard()  # the script cleared its gradients itself
    sessions = {id(gradients.session): gradients.session for gradients in taking}
    for session in sessions.values():
        if not any(gradients.prepared for gradients in session.gradients):
            session.move_scales()  # never between the micro-batches of one step
    scales = [session.scalers[0].scale for session in sessions.values()]
    return torch.stack([scale.to(scales[0].device) for scale in scales]).amin()


def leaves_behind(starts: Iterable[Any]) -> tuple[dict[int, Tensor], bool]:
    """By id, every tensor that gets a gradient from a backward pass from these nodes; and whether one of the nodes may
    run its own backward pass, as checkpointing does, whose leaves cannot be found from here.
    """
    nodes = list(nodes_behind(starts))
    leaves = (getattr(node, "variable", None) for node in nodes)
    hidden = any(isinstance(node, torch.autograd.function.BackwardCFunction) for node in nodes)
    return {id(leaf): leaf for leaf in leaves if leaf is not None}, hidden


def nodes_behind(starts: Iterable[Any]) -> Iterator[Any]:
    """Every node of the autograd graph that a backward pass from some nodes reaches."""
    nodes = [start for start in starts if start is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        yield node
        for behind, _ in node.next_functions:
            if behind is not None and behind not in seen:
                seen.add(behind)
                nodes.append(behind)


# -- tensors


def _started(roots: list[Any], grad_tensors: Any) -> tuple[list[Tensor], list[Tensor]] | None:
    """Roots in at least fp32 and the gradients they start with; None if torch itself will report an error."""
    start_gradients = [None] * len(roots) if grad_tensors is None else listed(grad_tensors)
    if len(start_gradients) != len(roots):
        return None
    wide: list[Tensor] = []
    starts: list[Tensor] = []
    for root, gradient in zip(roots, start_gradients):
        if isinstance(root, GradientEdge) or not isinstance(root, Tensor) or not root.requires_grad:
            return None
        if gradient is None and (root.numel() != 1 or not root.is_floating_point()):
            return None
        # The first scale, 65,536, cannot be represented in fp16.
        half = is_half(root)
        wide.append(root.float() if half else root)
        start = torch.ones_like(root) if gradient is None else gradient
        starts.append(start.float() if half else start)
    return wide, starts


def listed(value: Any) -> list[Any]:
    if isinstance(value, Tensor | GradientEdge):
        return [value]
    return list(value.values() if isinstance(value, dict) else value)


def _distinct(gradients: Iterable[Tensor | None]) -> list[Tensor]:
    return list({id(g): g for g in gradients if g is not None}.values())
