"""Transfers between the ranks that split each layer, as functions that autograd knows.

Without sequence parallelism every rank has all tokens (Shoeybi et al., "Megatron-LM", 2019, section 3, where the first
two are called f and g). With it a rank has some of the tokens between the split layers (Korthikanti et al., MLSys 2023,
section 4.2.2): an all-reduce becomes an all-gather and a reduce-scatter, which send the same bytes together.

| function | forward | backward |
|---|---|---|
| `copy` | nothing | adds up gradients |
| `reduce` | adds up | nothing |
| `gather` | tokens of all ranks | adds up gradients, keeps own tokens' |
| `scatter` | adds up, keeps own tokens | gradients of all ranks' tokens |
| `divide` | keeps own tokens | gradients of all ranks' tokens |
| `unite` | tokens of all ranks | keeps own tokens' |
| `columns` | columns of all ranks | keeps own columns' |

Where ranks cannot have equally many tokens, the last ones have rows of zeros in place of some. They are left out where
tokens come together again, so nothing sees them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed

_collectives: Any = torch.ops._c10d_functional


class Line:
    """The ranks that split each layer, and the sequence that they split."""

    def __init__(
        self, group: distributed.ProcessGroup, index: int, count: int, *, sequence: bool, dim: int
    ) -> None:
        self.group, self.index, self.count = group.group_name, index, count
        self.sequence = sequence
        """Whether tokens are split between split layers."""
        self.dim = dim
        """The dimension of tokens."""
        self.tokens = 0
        """How many there are, as the first block of the stack was given them last."""
        self.again = False
        """Whether the backward pass gathers tokens again instead of keeping those of all ranks."""

    def sibling(self) -> Line:
        """The same ranks, for another stack, whose sequence may be of another length."""
        other: Line = object.__new__(Line)
        other.__dict__.update(self.__dict__)
        return other


def added(x: Tensor, line: Line) -> Tensor:
    """The sum over ranks."""
    summed: Tensor = _collectives.wait_tensor(_collectives.all_reduce(x.contiguous(), "sum", line.group))
    return summed


def together(x: Tensor, line: Line, dim: int) -> Tensor:
    """The tensors of all ranks, one after the other along `dim`."""
    every = x.new_empty((line.count * x.shape[0], *x.shape[1:]))
    # Not `all_gather_into_tensor`: two threads of torch's gloo write the name of each collective to one string,
    # without a lock. That call's, ALLGATHER_COALESCED, is longer than the 15 characters that fit into a string itself,
    # so one thread would write to heap memory that the other has freed. This call's name is _ALLGATHER_BASE.
    found: Tensor = _collectives.wait_tensor(
        _collectives.all_gather_into_tensor_out(x.contiguous(), line.count, line.group, out=every)
    )
    # They come one after the other along the first dimension: a single copy puts them beside each other.
    return found.view(line.count, *x.shape).movedim(0, dim).flatten(dim, dim + 1)


def apart(x: Tensor, line: Line, dim: int) -> Tensor:
    """This rank's part of the sum over ranks along `dim`, which they split evenly."""
    parts = x.reshape(*x.shape[:dim], line.count, -1, *x.shape[dim + 1 :]).movedim(dim, 0).flatten(0, 1)
    found: Tensor = _collectives.wait_tensor(
        _collectives.reduce_scatter_tensor(parts.contiguous(), "sum", line.count, line.group)
    )
    return found


def _padded(x: Tensor, line: Line) -> Tensor:
    """`x` with rows of zeros, so that all ranks have as many tokens."""
    missing = -x.shape[line.dim] % line.count
    if not missing:
        return x
    shape = list(x.shape)
    shape[line.dim] = missing
    return torch.cat([x, x.new_zeros(shape)], line.dim)


def own(x: Tensor, line: Line) -> Tensor:
    """A rank's own tokens, of which autograd is to know nothing; see `divide`."""
    x = _padded(x, line)
    size = x.shape[line.dim] // line.count
    # A copy: what shares memory with all tokens keeps all of them.
    return x.narrow(line.dim, line.index * size, size).clone(memory_format=torch.contiguous_format)


def _all(x: Tensor, line: Line, tokens: int) -> Tensor:
    found = together(x, line, line.dim)
    return found if found.shape[line.dim] == tokens else found.narrow(line.dim, 0, tokens).contiguous()


class _Again:
    """This rank's own tokens, which autograd keeps of tokens that were gathered (Korthikanti et al., section 4.2.2).
    They are gathered once more for all that asks for them in the backward pass.
    """

    def __init__(self, own: Tensor, whole: Tensor, line: Line) -> None:
        self.own, self.line, self.tokens = own.detach(), line, line.tokens
        self.storage = whole.untyped_storage()._cdata
        self.asked = 0
        self.whole: Tensor | None = None

    def pack(self, kept: Tensor) -> Any:
        if kept.untyped_storage()._cdata != self.storage:
            return kept
        self.asked += 1
        return kept.shape, kept.stride(), kept.storage_offset()

    def unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if self.whole is None:
            self.whole = _all(self.own, self.line, self.tokens)
        found = self.whole.as_strided(*kept)
        self.asked -= 1
        if not self.asked:
            self.whole = None
        return found


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line) -> Tensor:
        ctx.line = line
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return added(grad, ctx.line), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line) -> Tensor:
        return added(x, line)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line) -> Tensor:
        ctx.line = line
        return _all(x, line, line.tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return apart(_padded(grad, ctx.line), ctx.line, ctx.line.dim), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line) -> Tensor:
        ctx.line, ctx.tokens = line, x.shape[line.dim]
        return apart(_padded(x, line), line, line.dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _all(grad, ctx.line, ctx.tokens), None


class _Divide(_Scatter):
    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line) -> Tensor:
        ctx.line, ctx.tokens = line, x.shape[line.dim]
        return own(x, line)


class _Unite(_Gather):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return own(grad, ctx.line), None


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line, columns: int) -> Tensor:
        ctx.line, ctx.here = line, x.shape[-1]
        ctx.most = most = -(-columns // line.count)
        wide = x if x.shape[-1] == most else torch.nn.functional.pad(x, (0, most - x.shape[-1]))
        return together(wide, line, x.dim() - 1)[..., :columns].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.narrow(-1, ctx.line.index * ctx.most, ctx.here).contiguous(), None, None


class _OncePerRank(torch.autograd.Function):
    """A value that is added on every rank before a sum over ranks. All ranks get the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> Tensor:
        return x / count

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def largest(x: Tensor, line: Line) -> Tensor:
    """The largest of all ranks, element by element; no gradient."""
    found: Tensor = _collectives.wait_tensor(_collectives.all_reduce(x.contiguous(), "max", line.group))
    return found


def copy(x: Tensor, line: Line) -> Tensor:
    """See the table above, as for the others."""
    return _Copy.apply(x, line)  # type: ignore[no-any-return, no-untyped-call]


def reduce(x: Tensor, line: Line) -> Tensor:
    """See the table above."""
    return _Reduce.apply(x, line)  # type: ignore[no-any-return, no-untyped-call]


def gather(x: Tensor, line: Line) -> Tensor:
    """See the table above."""
    return _Gather.apply(x, line)  # type: ignore[no-any-return, no-untyped-call]


def gathered(x: Tensor, line: Line, call: Callable[[Tensor], Any]) -> Any:
    """`call` on the tokens of all ranks, of which its backward pass keeps as `line.again` says."""
    whole = gather(x, line)
    if not (line.again and torch.is_grad_enabled()):
        return call(whole)
    again = _Again(x, whole, line)
    with torch.autograd.graph.saved_tensors_hooks(again.pack, again.unpack):
        return call(whole)


def scatter(x: Tensor, line: Line) -> Tensor:
    """See the table above."""
    return _Scatter.apply(x, line)  # type: ignore[no-any-return, no-untyped-call]


def divide(x: Tensor, line: Line) -> Tensor:
    """See the table above. Notes how many tokens there are."""
    line.tokens = x.shape[line.dim]
    return _Divide.apply(x, line)  # type: ignore[no-any-return, no-untyped-call]


def unite(x: Tensor, line: Line) -> Tensor:
    """See the table above."""
    return _Unite.apply(x, line)  # type: ignore[no-any-return, no-untyped-call]


def columns(x: Tensor, line: Line, whole: int) -> Tensor:
    """See the table above; x: (…, c) of `whole` columns in all."""
    return _Columns.apply(x, line, whole)  # type: ignore[no-any-return, no-untyped-call]


def once_per_rank(x: Tensor, line: Line) -> Tensor:
    """A share of what all ranks add to their parts of a sum; gradients are those of the whole."""
    return _OncePerRank.apply(x, line.count)  # type: ignore[no-any-return, no-untyped-call]
