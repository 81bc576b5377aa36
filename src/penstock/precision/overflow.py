"""Where an overflow begins: the first module whose output, or whose output's gradient, is not finite."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True, slots=True)
class Overflow:
    """The first value that left the finite numbers."""

    layer: str
    """Qualified name of the module, or of the parameter where hooks saw nothing (inside compiled code)."""
    where: str
    """`output`, `gradient of its output` or `gradient`."""

    def __str__(self) -> str:
        return f"the {self.where} of {self.layer}"


class OverflowTrace:
    """While attached, notes on the device which modules' outputs and output gradients are not finite.

    `first` then says which came first in time. Hooks added to a compiled model are not seen by its compiled code: what
    is left there are the gradients of the parameters.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._models = list(models)
        self._notes: list[tuple[str, str, Tensor]] = []
        self._handles: list[RemovableHandle] = []

    def attach(self) -> OverflowTrace:
        """Begin to look; forget what was seen before."""
        self.detach()
        self._notes = []
        for model in self._models:
            for name, module in model.named_modules():
                self._handles.append(module.register_forward_hook(self._hook(name or type(model).__name__)))
        return self

    def detach(self) -> None:
        """Stop looking."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __enter__(self) -> OverflowTrace:
        return self.attach()

    def __exit__(self, *_: Any) -> None:
        self.detach()

    def _hook(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            for tensor in _tensors(output):
                self._note(name, "output", tensor)
                if tensor.requires_grad:
                    tensor.register_hook(  # type: ignore[no-untyped-call]
                        lambda g: self._note(name, "gradient of its output", g)
                    )

        return hook

    def _note(self, name: str, where: str, value: Tensor) -> None:
        if self._handles:
            self._notes.append((name, where, ~value.detach().isfinite().all()))

    def first(self, gradients: Iterable[tuple[str, Tensor | None]] = ()) -> Overflow | None:
        """The first non-finite value in time; `gradients` are those of the parameters, by name, in model order.

        Waits for the device.
        """
        if self._notes:
            seen = torch.stack([bad.to("cpu") for _, _, bad in self._notes]).tolist()
            for (name, where, _), bad in zip(self._notes, seen):
                if bad:
                    return Overflow(name, where)
        # The backward pass runs from the last layers to the first.
        for name, gradient in reversed(list(gradients)):
            if gradient is not None and not bool(gradient.isfinite().all()):
                return Overflow(name, "gradient")
        return None


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
