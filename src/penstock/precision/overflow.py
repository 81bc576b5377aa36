"""The origin of an overflow: the first module that makes a non-finite value or gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from penstock.containers import tensors

Where = Literal["input", "computation", "output", "backward pass", "gradient of the output", "gradient"]


@dataclass(frozen=True, slots=True)
class Overflow:
    """The place of the first non-finite value."""

    layer: str
    """Qualified name of the module, or of the parameter if nothing else was recorded."""
    where: Where
    """`output` and `backward pass`: the module made it there; `computation`: between the modules inside it. `input` and
    `gradient of the output`: it came from the caller, or from the loss. `gradient`: a parameter's gradient."""
    before: str | None = None
    """For a `computation`, the inner module that first received its result."""

    def __str__(self) -> str:
        if self.where == "computation":
            return f"the computation of {self.layer} itself, before {self.before}"
        return f"the {self.where} of {self.layer}"


class OverflowTrace:
    """While attached, records on the device which modules make non-finite values and gradients.

    `first` then returns the earliest. Compiled parts run eagerly meanwhile, because their code calls no hooks. A node
    of the autograd graph belongs to the innermost module that was running when it was made. Nodes that made a module's
    inputs belong to its caller. Casts by a module's hooks belong to the module.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._models = list(models)
        self._notes: list[tuple[Overflow, Tensor]] = []
        self._eager: Any = None
        self._running: list[str] = []
        """The modules whose forward pass is running, innermost last."""
        self._known: dict[Node, str] = {}
        """Owner of each node; holding the nodes keeps their ids from being reused."""
        self._handles: list[RemovableHandle] = []

    def attach(self) -> OverflowTrace:
        """Start recording; forget earlier records."""
        self.detach()
        self._notes = []
        self._follow()
        self._eager = torch.compiler.set_stance("force_eager")
        return self

    def detach(self) -> None:
        """Stop recording, and remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._known, self._running = [], {}, []
        if self._eager is not None:
            self._eager.__exit__(None, None, None)
            self._eager = None

    def __enter__(self) -> OverflowTrace:
        return self.attach()

    def __exit__(self, *_: Any) -> None:
        self.detach()

    def _follow(self) -> None:
        for model in self._models:
            for name, module in model.named_modules():
                full = name or type(model).__name__
                self._handles += [
                    module.register_forward_pre_hook(self._entering(full), prepend=True, with_kwargs=True),
                    module.register_forward_hook(self._leaving(full), with_kwargs=True, always_call=True),
                ]

    def _own(self, outputs: Iterable[Tensor], layer: str) -> None:
        """Assign all nodes of these tensors' graph to a layer, except those that have an owner."""
        nodes = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
        while nodes:
            node = nodes.pop()
            if node in self._known or hasattr(node, "variable"):  # where a parameter's gradient is kept
                continue
            self._known[node] = layer
            self._handles.append(self._watch(node, layer))
            nodes += [behind for behind, _ in node.next_functions if behind is not None]

    def _entering(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            inputs = tensors_of((args, kwargs))
            if self._running:
                self._own(inputs, self._running[-1])
            self._running.append(name)
            around = self._running[-2] if len(self._running) > 1 else None
            self._note(
                Overflow(name, "input") if around is None else Overflow(around, "computation", name), inputs
            )

        return hook

    def _leaving(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            outputs = tensors_of(output)
            self._own(outputs, name)
            self._running.pop()
            self._note(Overflow(name, "output"), outputs)

        return hook

    def _watch(self, node: Node, layer: str) -> RemovableHandle:
        def hook(input_gradients: Any, output_gradients: Any) -> None:
            self._note(Overflow(layer, "gradient of the output"), tensors_of(output_gradients))
            self._note(Overflow(layer, "backward pass"), tensors_of(input_gradients))

        return node.register_hook(hook)

    @torch.no_grad()
    def _note(self, place: Overflow, values: list[Tensor]) -> None:
        for value in values:
            inside = value.coalesce().values() if value.is_sparse else value
            if place.where in ("input", "computation") and not value.requires_grad:
                inside = inside.masked_fill(inside == -math.inf, 0.0)  # which masks hold on purpose
            self._notes.append((place, ~inside.isfinite().all()))

    def first(self, gradients: Iterable[tuple[str, Tensor | None]] = ()) -> Overflow | None:
        """The earliest non-finite value. `gradients`, the parameters' by name in model order, are searched if no
        backward pass was recorded. Waits for the device.
        """
        if self._notes:
            non_finite = torch.stack([bad.to("cpu") for _, bad in self._notes]).tolist()
            for (seen, _), bad in zip(self._notes, non_finite):
                if bad:
                    return seen
        if any(seen.where == "backward pass" for seen, _ in self._notes):
            return (
                None  # gradients that ranks have averaged since may not be finite, but did not become so here
            )
        # The backward pass runs from the last layers to the first.
        for name, gradient in reversed(list(gradients)):
            if gradient is not None and not bool(gradient.isfinite().all()):
                return Overflow(name, "gradient")
        return None


def tensors_of(value: Any) -> list[Tensor]:
    """The floating tensors of a nested structure."""
    return [tensor for tensor in tensors(value) if tensor.is_floating_point()]
