"""Passes through a model that leave nothing behind, in the precision it trains in or in fp32 for comparison."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.containers import replaced, tensors
from penstock.errors import ConfigError
from penstock.precision.copies import is_half, own_buffers, plain
from penstock.precision.forward import precision_on

Loss = Callable[[nn.Module, Any], Tensor]
"""Runs the model on a batch and returns a 0-d loss."""


def moved(batch: Any, device: torch.device) -> Any:
    """A batch on the device."""
    return replaced(batch, lambda tensor: tensor.to(device))


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Afterwards buffers and random generators are as they were; compiled parts run eagerly, so that hooks are called.

    Gradients are the caller's to leave alone: `gradients` does.
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


def in_fp32(model: nn.Module) -> nn.Module:
    """The same model, computing in fp32 throughout: itself where it does, else a copy that shares its fp32 weights, and
    has the master weights, or the half ones widened, in place of others.
    """
    if any(precision_on(module) for module in model.modules()):
        model = plain(model)
    if any(map(is_half, (*model.parameters(), *model.buffers()))):
        model = copy.deepcopy(model).float()
    return model


def gradients(model: nn.Module, loss: Tensor) -> list[tuple[str, Tensor | None]]:
    """The gradient of each trained parameter by name. No `.grad` changes, and no hook that steps an optimizer runs."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trained or not loss.requires_grad:
        raise ConfigError(
            "No gradient flows from this loss to a parameter: all are frozen, or the loss was computed without "
            "gradients. Give a model with parameters that require gradients, and a loss that depends on them."
        )
    values = torch.autograd.grad(loss, [p for _, p in trained], allow_unused=True)
    return [(name, gradient) for (name, _), gradient in zip(trained, values)]


def checked(loss: Any) -> Tensor:
    """The loss as a 0-d tensor. Raises ConfigError for anything else."""
    if not isinstance(loss, Tensor) or loss.ndim != 0 or not loss.is_floating_point():
        kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(f"loss(model, batch) returned {kind}, but must return a scalar tensor.")
    return loss


def default_loss(model: nn.Module, batch: Any) -> Tensor:
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
