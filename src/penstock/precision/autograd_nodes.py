"""Which module each node of the autograd graph belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from penstock.containers import tensors


class NodeModules:
    """While attached, follows the forward pass, and calls `found(node, layer)` for each node that a module makes.

    A node belongs to the innermost module that was running when it was made; `found` returns the handles of hooks that
    it added, which go when this is detached. The nodes behind a module's inputs belong to whoever called it. Casts
    that hooks of a module make are the module's own.
    """

    def __init__(
        self, models: Iterable[nn.Module], found: Callable[[Node, str], list[RemovableHandle]]
    ) -> None:
        self._models = list(models)
        self._found = found
        self._running: list[str] = []
        self._known: dict[Node, str] = {}
        """Holding the nodes keeps their identity."""
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Begin."""
        for model in self._models:
            for name, module in model.named_modules():
                full = name or type(model).__name__
                self._handles += [
                    module.register_forward_pre_hook(self._entering(full), prepend=True, with_kwargs=True),
                    module.register_forward_hook(self._leaving(full), with_kwargs=True, always_call=True),
                ]

    def detach(self) -> None:
        """End, and take all hooks off again."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._known, self._running = [], {}, []

    @property
    def running(self) -> str | None:
        """The innermost module whose forward pass is under way."""
        return self._running[-1] if self._running else None

    @property
    def around(self) -> str | None:
        """The module whose forward pass has called the one that is under way."""
        return self._running[-2] if len(self._running) > 1 else None

    def own(self, made: Iterable[Tensor], layer: str) -> None:
        """Give all nodes behind some tensors to a layer, but for those that have an owner."""
        left = [tensor.grad_fn for tensor in made if tensor.grad_fn is not None]
        while left:
            node = left.pop()
            if node in self._known or hasattr(node, "variable"):  # where a parameter's gradient is kept
                continue
            self._known[node] = layer
            self._handles += self._found(node, layer)
            left += [behind for behind, _ in node.next_functions if behind is not None]

    def _entering(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._running:
                self.own(tensors_of((args, kwargs)), self._running[-1])
            self._running.append(name)

        return hook

    def _leaving(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.own(tensors_of(output), name)
            self._running.pop()

        return hook


def tensors_of(value: Any) -> list[Tensor]:
    """The floating tensors of a nest."""
    return [tensor for tensor in tensors(value) if tensor.is_floating_point()]
