"""Logits that are computed only if something other than their cross entropy is needed.

A foreign model computes all logits, and then its loss from them. After `put_off`, its head returns `Deferred` instead
of logits: the features and the output layer. Reshaping rows, casting and adding a bias keep it deferred, and
`torch.nn.functional.cross_entropy` of it runs the chunked form of `penstock.kernels.linear_cross_entropy`, on a CPU for
the rows that count only. Any other operation computes the logits, so that a model's code needs no change.

Shapes: D features, V entries of the vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.kernels.choices import loss_budget
from penstock.kernels.cross_entropy import IGNORED
from penstock.kernels.linear_cross_entropy import linear_cross_entropy


@dataclass(frozen=True, eq=False)
class Deferred:
    """Logits (…, V) of features (…, D)."""

    x: Tensor
    head: nn.Linear
    make: Callable[[Tensor], Tensor]
    """The head's forward pass."""
    dtype: torch.dtype
    product: torch.dtype
    """The dtype of the head's matrix product."""
    added: Tensor | None = None
    """Vector added to each row of logits, (V,)."""

    @cached_property
    def whole(self) -> Tensor:
        """The logits as a tensor."""
        logits = self.make(self.x)
        return (logits if self.added is None else logits + self.added).to(self.dtype)

    @property
    def shape(self) -> torch.Size:
        """The shape of the logits."""
        return torch.Size([*self.x.shape[:-1], self.head.out_features])

    @property
    def device(self) -> torch.device:
        """The device of the logits."""
        return self.x.device

    @property
    def ndim(self) -> int:
        """The number of the logits' dimensions."""
        return self.x.ndim

    def dim(self) -> int:
        """The same as `ndim`."""
        return self.x.ndim

    def size(self, dim: int | None = None) -> Any:
        """The shape of the logits, or the size of one dimension."""
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> Deferred:
        """Itself: the logits are contiguous once they are computed."""
        return self

    def float(self) -> Deferred:
        """The logits in fp32."""
        return replace(self, dtype=torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """The logits in another dtype; for another device they are computed first."""
        moved = self.x.new_empty(0, dtype=self.dtype).to(*args, **kwargs)
        if moved.device != self.device:
            return self.whole.to(*args, **kwargs)
        return replace(self, dtype=moved.dtype)

    def view(self, *shape: Any) -> Any:
        """The logits with other leading dimensions."""
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int | torch.dtype) else shape
        if not sizes or sizes[-1] != self.shape[-1]:
            return self.whole.view(*shape)
        return replace(self, x=self.x.reshape(*sizes[:-1], self.x.shape[-1]))

    reshape = view

    def flatten(self, start: int = 0, end: int = -1) -> Any:
        """The logits with fewer leading dimensions."""
        if end % self.ndim == self.ndim - 1:
            return self.whole.flatten(start, end)
        return replace(self, x=self.x.flatten(start, end))

    def __getitem__(self, index: Any) -> Any:
        """Some of the rows, still deferred; selecting columns computes the logits."""
        parts = index if isinstance(index, tuple) else (index,)
        plain = [part for part in parts if not isinstance(part, Tensor)]
        named = sum(part.ndim if isinstance(part, Tensor) else part is not Ellipsis for part in parts)
        reaches = Ellipsis in plain or named >= self.ndim
        if None in plain or (reaches and not (isinstance(parts[-1], slice) and parts[-1] == slice(None))):
            return self.whole[index]
        return replace(self, x=self.x[index])

    def plus(self, other: Any) -> Any:
        """The logits with a bias for each entry of the vocabulary."""
        if not (
            isinstance(other, Tensor) and other.ndim and other.numel() == other.shape[-1] == self.shape[-1]
        ):
            return self.whole + other
        row = other.flatten()
        return replace(self, added=row if self.added is None else self.added + row)

    __add__ = __radd__ = plus

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.whole, name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is F.cross_entropy:
            loss = _cross_entropy(*args, **options)
            if loss is not None:
                return loss
        if getattr(func, "__name__", "") in _SUMS and len(args) == 2 and not options:  # as compiled code adds
            deferred, other = args if isinstance(args[0], Deferred) else args[::-1]
            return deferred.plus(other.whole if isinstance(other, Deferred) else other)
        return func(*_made(args), **_made(options))


def _made(value: Any) -> Any:
    """Nested arguments, with each `Deferred` replaced by its logits."""
    if isinstance(value, Deferred):
        return value.whole
    if isinstance(value, dict):
        return {name: _made(entry) for name, entry in value.items()}
    return type(value)(map(_made, value)) if type(value) in (list, tuple) else value


_SUMS = ("add", "__add__", "__radd__")


def _operator(name: str) -> Callable[..., Any]:
    def compute(self: Deferred, *args: Any) -> Any:
        return getattr(self.whole, name)(*args)

    return compute


for _name in ("sub", "mul", "truediv", "matmul", "neg", "pow", "rsub", "rmul", "rtruediv", "eq", "ne", "lt",
              "le", "gt", "ge", "len", "iter", "bool"):  # fmt: skip
    setattr(Deferred, f"__{_name}__", _operator(f"__{_name}__"))


def _cross_entropy(
    logits: Any, target: Any, weight: Tensor | None = None, size_average: Any = None, ignore_index: int = IGNORED,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor | None:  # fmt: skip
    """`torch.nn.functional.cross_entropy`, or None if it has to be computed from logits."""
    if not isinstance(logits, Deferred) or logits.ndim != 2 or reduction not in ("mean", "sum"):
        return None
    usual = weight is None and size_average is None and reduce is None
    if not usual or not isinstance(target, Tensor) or target.is_floating_point() or target.ndim != 1:
        return None
    x, head = logits.x, logits.head
    bias: Tensor | None = head.bias
    if logits.added is not None:
        bias = logits.added if bias is None else bias + logits.added
    counted = target != ignore_index
    targets = target.masked_fill(~counted, IGNORED)
    if not (x.is_cuda or torch.compiler.is_compiling()):  # `nonzero` on a GPU would wait for it
        rows = counted.nonzero().squeeze(1)
        x, targets = x.index_select(0, rows), targets.index_select(0, rows)
    budget = loss_budget(x.device.type)
    # A loss may be computed after autocast has ended.
    with torch.autocast(x.device.type, dtype=logits.product) if logits.product != x.dtype else nullcontext():
        loss = linear_cross_entropy(x, head.weight, bias, targets, smoothing=label_smoothing, budget=budget)
    return (loss if reduction == "sum" else loss / counted.sum()).to(logits.dtype)


def put_off(head: nn.Linear) -> None:
    """Let a linear layer return `Deferred` in training; its outputs must be logits over a vocabulary."""
    if not deferring(head):
        object.__setattr__(head, "forward", functools.partial(_deferred, head.forward, head))


def make_at_once(head: nn.Linear) -> None:
    """Undo `put_off`."""
    if deferring(head):
        object.__setattr__(head, "forward", head.forward.args[0])  # type: ignore[attr-defined]


def deferring(head: nn.Linear) -> bool:
    """Whether `put_off` has changed the layer."""
    forward: Any = head.forward
    return isinstance(forward, functools.partial) and forward.func is _deferred


def _deferred(make: Callable[[Tensor], Tensor], head: nn.Linear, x: Tensor) -> Any:
    if not (head.training and torch.is_grad_enabled()):
        return make(x)
    with torch.no_grad():  # an empty product shows the dtype of the layer's outputs here
        dtype = make(x[..., :0, :].flatten(0, -2)).dtype
    return Deferred(x, head, make, dtype, dtype)
