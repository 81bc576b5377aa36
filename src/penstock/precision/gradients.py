"""Measures the gradients of a model on its batches, in fp32, by passes that leave nothing behind."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.containers import replaced, tensors
from penstock.errors import ConfigError
from penstock.precision.copies import is_half, own_buffers, plain
from penstock.precision.forward import precision_on, unwrapped
from penstock.precision.histogram import GradientHistogram, Meter
from penstock.precision.overflow import tensors_of
from penstock.precision.session import device_of

Loss = Callable[[nn.Module, Any], Tensor]
"""Runs the model on a batch and returns a 0-d loss."""


def gradient_histogram(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    loss: Loss | None = None,
    between: Callable[[Any], None] | None = None,
) -> GradientHistogram:
    """Measure the gradients of a model on batches, in fp32, leaving weights, gradients, buffers and generators alone.

    `loss(model, batch)` returns a scalar; without it the model's own loss is taken, or the cross entropy of an (inputs,
    targets) pair. Accelerated models are measured as if they were not. `between(batch)` is called after each batch: a
    training step there lets the histogram cover training and not the first weights alone, as the paper's does.

    Raises:
        ConfigError: there is no batch, no loss, or nothing to train.
    """
    bare = unwrapped(model)
    device = device_of([bare])
    activations, weights = Meter(), Meter()
    count = 0
    for batch in batches:
        placed = replaced(batch, lambda tensor: tensor.to(device))
        passed = _in_fp32(bare)
        with _undisturbed(passed), torch.autocast(device.type, enabled=False), torch.enable_grad():
            with _watched(passed, activations):
                of_weights = _gradients(passed, _checked((loss or _default_loss)(passed, placed)))
            for gradient in of_weights:
                if gradient is not None:
                    weights.add(gradient)
        count += 1
        if between is not None:
            between(batch)
    if not count:
        raise ConfigError("There is no batch to measure gradients on; give at least one.")
    return GradientHistogram(activations=activations.read(), weights=weights.read(), batches=count)


@contextmanager
def _watched(model: nn.Module, meter: Meter) -> Iterator[None]:
    """Inside, `meter` counts each gradient of a layer's output that a backward pass computes.

    Layers are modules without children and those with parameters of their own; a tensor that passes through
    several (Identity, a container's result) counts once, for the first.
    """
    seen: dict[int, weakref.ref[Tensor]] = {}

    def look(module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tensors_of(args):
            seen[id(tensor)] = weakref.ref(tensor)
        for tensor in tensors_of(output):
            before = seen.get(id(tensor))
            if tensor.requires_grad and not (before is not None and before() is tensor):
                seen[id(tensor)] = weakref.ref(tensor)
                tensor.register_hook(meter.add)  # type: ignore[no-untyped-call]

    with ExitStack() as hooks:
        for module in model.modules():
            leaf = next(module.children(), None) is None
            if leaf or next(module.parameters(recurse=False), None) is not None:
                hooks.enter_context(module.register_forward_hook(look))
        yield


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Afterwards buffers and random generators are as they were; compiled parts run eagerly, so that hooks are called.

    Gradients are the caller's to leave alone: `_gradients` does.
    """
    accelerators = {p.device for p in model.parameters() if p.device.type != "cpu"}
    kind = next((device.type for device in accelerators), "cuda")
    buffers = [
        (module, key, value, value.detach().clone())
        for module in model.modules()
        for key, value in own_buffers(module)
    ]
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=list(accelerators), device_type=kind))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            yield
        finally:
            with torch.no_grad():
                for module, key, value, kept in buffers:
                    setattr(module, key, value)
                    value.copy_(kept)


def _in_fp32(model: nn.Module) -> nn.Module:
    """The same model, computing in fp32 throughout: itself where it does, else a copy that shares its fp32 weights, and
    has the master weights, or the half ones widened, in place of others.
    """
    if any(precision_on(module) for module in model.modules()):
        model = plain(model)
    if any(map(is_half, (*model.parameters(), *model.buffers()))):
        model = copy.deepcopy(model).float()
    return model


def _gradients(model: nn.Module, loss: Tensor) -> Sequence[Tensor | None]:
    """The gradient of each trained parameter. No `.grad` changes, and no hook that steps an optimizer runs."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained or not loss.requires_grad:
        raise ConfigError(
            "No gradient flows from this loss to a parameter: all are frozen, or the loss was computed without "
            "gradients. Give a model with parameters that require gradients, and a loss that depends on them."
        )
    return torch.autograd.grad(loss, trained, allow_unused=True)


def _checked(loss: Any) -> Tensor:
    """The loss as a 0-d tensor. Raises ConfigError for anything else."""
    if not isinstance(loss, Tensor) or loss.ndim != 0 or not loss.is_floating_point():
        kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(f"loss(model, batch) returned {kind}, but must return a scalar tensor.")
    return loss


def _default_loss(model: nn.Module, batch: Any) -> Tensor:
    """The model's own loss where it returns one, else mean cross entropy of (inputs, targets) with class targets.

    A mapping holds the model's keyword arguments; a pair, or a dataclass with a field `targets` and another tensor, the
    model's inputs and the targets; anything else is its one argument.

    Raises:
        ConfigError: neither is there; give `loss=`.
    """
    targets: Any = None
    if is_dataclass(batch) and hasattr(batch, "targets") and len(pair := list(tensors(batch))) == 2:
        batch = pair if pair[1] is batch.targets else pair[::-1]
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, Sequence) and len(batch) == 2:
        inputs, targets = batch
        output = model(inputs)
    else:
        output = model(batch)
    own = getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    if isinstance(output, Tensor) and output.ndim == 0:
        return output
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    classes = isinstance(targets, Tensor) and not targets.is_floating_point()
    if isinstance(logits, Tensor) and classes and targets.shape == logits.shape[:-1]:
        return F.cross_entropy(logits.float().reshape(-1, logits.shape[-1]), targets.reshape(-1).long())
    raise ConfigError(
        f"The model returned {type(output).__name__}, from which no loss follows; give loss=, a function "
        "loss(model, batch) that returns a scalar tensor, such as "
        "`lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1])`."
    )
