"""Following a model's passes: which module is running, and which module each node of the autograd graph belongs to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from penstock.containers import tensors


class Follower:
    """Between `follow` and `let_go`, follows the forward passes of some models, and calls the methods below.

    A node belongs to the innermost module that was running when it was made. The nodes behind a module's inputs belong
    to whoever called it. Casts that hooks of a module make are the module's own.
    """

    def __init__(self) -> None:
        self.running: list[str] = []
        """The modules whose forward pass is under way, the innermost last."""
        self._known: dict[Node, str] = {}
        """Holding the nodes keeps their identity."""
        self._handles: list[RemovableHandle] = []

    def entered(self, layer: str, inputs: list[Tensor]) -> None:
        """The forward pass of a module has begun."""

    def left(self, layer: str, outputs: list[Tensor]) -> None:
        """It has ended."""

    def found(self, node: Node, layer: str) -> RemovableHandle:
        """A node of a layer was made; returns the handle of the hook that was added to it."""
        raise NotImplementedError

    def follow(self, models: Iterable[nn.Module]) -> None:
        """Begin."""
        for model in models:
            for name, module in model.named_modules():
                full = name or type(model).__name__
                self._handles += [
                    module.register_forward_pre_hook(self._entering(full), prepend=True, with_kwargs=True),
                    module.register_forward_hook(self._leaving(full), with_kwargs=True, always_call=True),
                ]

    def let_go(self) -> None:
        """End, and take all hooks off again."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._known, self.running = [], {}, []

    def own(self, made: Iterable[Tensor], layer: str) -> None:
        """Give all nodes behind some tensors to a layer, but for those that have an owner."""
        left = [tensor.grad_fn for tensor in made if tensor.grad_fn is not None]
        while left:
            node = left.pop()
            if node in self._known or hasattr(node, "variable"):  # where a parameter's gradient is kept
                continue
            self._known[node] = layer
            self._handles.append(self.found(node, layer))
            left += [behind for behind, _ in node.next_functions if behind is not None]

    def _entering(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            inputs = tensors_of((args, kwargs))
            if self.running:
                self.own(inputs, self.running[-1])
            self.running.append(name)
            self.entered(name, inputs)

        return hook

    def _leaving(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            outputs = tensors_of(output)
            self.own(outputs, name)
            self.running.pop()
            self.left(name, outputs)

        return hook


def tensors_of(value: Any) -> list[Tensor]:
    """The floating tensors of a nest."""
    return [tensor for tensor in tensors(value) if tensor.is_floating_point()]
