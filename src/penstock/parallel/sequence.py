"""Transfers between the ranks that split each layer, as differentiable functions.

Without sequence parallelism every rank has all tokens (Shoeybi et al., "Megatron-LM", 2019, section 3, where the first
two are called f and g). With it a rank has some of the tokens between the split layers (Korthikanti et al., MLSys 2023,
section 4.2.2): an all-reduce becomes an all-gather and a reduce-scatter, which send the same bytes together.

| function | forward | backward |
|---|---|---|
| `copy` | nothing | sums gradients |
| `reduce` | sums | nothing |
| `gather` | tokens of all ranks | sums gradients, keeps own tokens' |
| `scatter` | sums, keeps own tokens | gradients of all ranks' tokens |
| `divide` | keeps own tokens | gradients of all ranks' tokens |
| `unite` | tokens of all ranks | keeps own tokens' |
| `columns` | columns of all ranks | keeps own columns' |

If ranks cannot have equal numbers of tokens, the last ones are padded with rows of zeros. These are removed when tokens
come together again, so they have no effect.
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
        """Number of tokens in the latest input of the stack's first block."""
        self.again = False
        """Whether the backward pass gathers tokens again instead of keeping those of all ranks."""

    def sibling(self) -> Line:
        """A line of the same ranks for another stack, whose sequence may have another length."""
        line: Line = object.__new__(Line)
        line.__dict__.update(self.__dict__)
        return line


Transfer = Callable[[Tensor, Line], Tensor]
"""See the table above."""


def all_reduce(x: Tensor, line: Line) -> Tensor:
    """The sum over ranks."""
    summed: Tensor = _collectives.wait_tensor(_collectives.all_reduce(x.contiguous(), "sum", line.group))
    return summed


def all_gather(x: Tensor, line: Line, dim: int) -> Tensor:
    """The tensors of all ranks, concatenated along `dim`."""
    buffer = x.new_empty((line.count * x.shape[0], *x.shape[1:]))
    # Not `all_gather_into_tensor`: two threads of torch's gloo write the name of each collective to one string,
    # without a lock. That call's, ALLGATHER_COALESCED, is longer than the 15 characters that fit into a string itself,
    # so one thread would write to heap memory that the other has freed. This call's name is _ALLGATHER_BASE.
    gathered: Tensor = _collectives.wait_tensor(
        _collectives.all_gather_into_tensor_out(x.contiguous(), line.count, line.group, out=buffer)
    )
    # They are concatenated along the first dimension: a single copy moves them to `dim`.
    return gathered.view(line.count, *x.shape).movedim(0, dim).flatten(dim, dim + 1)


def reduce_scatter(x: Tensor, line: Line, dim: int) -> Tensor:
    """This rank's part of the sum over ranks along `dim`, which they split evenly."""
    parts = x.reshape(*x.shape[:dim], line.count, -1, *x.shape[dim + 1 :]).movedim(dim, 0).flatten(0, 1)
    part: Tensor = _collectives.wait_tensor(
        _collectives.reduce_scatter_tensor(parts.contiguous(), "sum", line.count, line.group)
    )
    return part


def _pad_tokens(x: Tensor, line: Line) -> Tensor:
    """`x` padded with rows of zeros, so that all ranks have equally many tokens."""
    missing = -x.shape[line.dim] % line.count
    if not missing:
        return x
    shape = list(x.shape)
    shape[line.dim] = missing
    return torch.cat([x, x.new_zeros(shape)], line.dim)


def own_tokens(x: Tensor, line: Line) -> Tensor:
    """A rank's own tokens, without a gradient; see `divide`."""
    x = _pad_tokens(x, line)
    size = x.shape[line.dim] // line.count
    # A copy, because a view would keep all tokens in memory.
    return x.narrow(line.dim, line.index * size, size).clone(memory_format=torch.contiguous_format)


def _all_tokens(x: Tensor, line: Line, tokens: int) -> Tensor:
    every = all_gather(x, line, line.dim)
    return every if every.shape[line.dim] == tokens else every.narrow(line.dim, 0, tokens).contiguous()


class _GatheredAgain:
    """This rank's own tokens, saved by autograd instead of the gathered ones (Korthikanti et al., section 4.2.2). They
    are gathered once more for all their uses in the backward pass.
    """

    def __init__(self, own_tokens: Tensor, whole: Tensor, line: Line) -> None:
        self.own_tokens, self.line, self.tokens = own_tokens.detach(), line, line.tokens
        self.storage = whole.untyped_storage()._cdata
        self.uses = 0
        self.gathered: Tensor | None = None

    def pack(self, saved: Tensor) -> Any:
        if saved.untyped_storage()._cdata != self.storage:
            return saved
        self.uses += 1
        return saved.shape, saved.stride(), saved.storage_offset()

    def unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if self.gathered is None:
            self.gathered = _all_tokens(self.own_tokens, self.line, self.tokens)
        view = self.gathered.as_strided(*saved)
        self.uses -= 1
        if not self.uses:
            self.gathered = None
        return view


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line) -> Tensor:
        ctx.line = line
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return all_reduce(grad, ctx.line), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line) -> Tensor:
        return all_reduce(x, line)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line) -> Tensor:
        ctx.line = line
        return _all_tokens(x, line, line.tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return reduce_scatter(_pad_tokens(grad, ctx.line), ctx.line, ctx.line.dim), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line) -> Tensor:
        ctx.line, ctx.tokens = line, x.shape[line.dim]
        return reduce_scatter(_pad_tokens(x, line), line, line.dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _all_tokens(grad, ctx.line, ctx.tokens), None


class _Divide(_Scatter):
    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line) -> Tensor:
        ctx.line, ctx.tokens = line, x.shape[line.dim]
        return own_tokens(x, line)


class _Unite(_Gather):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return own_tokens(grad, ctx.line), None


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line, columns: int) -> Tensor:
        ctx.line, ctx.own_columns = line, x.shape[-1]
        ctx.most = most = -(-columns // line.count)
        wide = x if x.shape[-1] == most else torch.nn.functional.pad(x, (0, most - x.shape[-1]))
        return all_gather(wide, line, x.dim() - 1)[..., :columns].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.narrow(-1, ctx.line.index * ctx.most, ctx.own_columns).contiguous(), None, None


class _OncePerRank(torch.autograd.Function):
    """A value that every rank adds before a sum over ranks. All ranks get the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> Tensor:
        return x / count

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


copy: Transfer = _Copy.apply
reduce: Transfer = _Reduce.apply
gather: Transfer = _Gather.apply
scatter: Transfer = _Scatter.apply
unite: Transfer = _Unite.apply


def largest(x: Tensor, line: Line) -> Tensor:
    """The largest value of all ranks, element by element; no gradient."""
    maximum: Tensor = _collectives.wait_tensor(_collectives.all_reduce(x.contiguous(), "max", line.group))
    return maximum


def call_on_all(x: Tensor, line: Line, call: Callable[[Tensor], Any]) -> Any:
    """The result of `call` on the tokens of all ranks; with `line.again` its backward pass gathers them again."""
    whole = gather(x, line)
    if not (line.again and torch.is_grad_enabled()):
        return call(whole)
    again = _GatheredAgain(x, whole, line)
    with torch.autograd.graph.saved_tensors_hooks(again.pack, again.unpack):
        return call(whole)


def divide(x: Tensor, line: Line) -> Tensor:
    """See the table above. Also stores the number of tokens."""
    line.tokens = x.shape[line.dim]
    return _Divide.apply(x, line)  # type: ignore[no-any-return, no-untyped-call]


def columns(x: Tensor, line: Line, whole: int) -> Tensor:
    """See the table above; x: (…, c) of `whole` columns in total."""
    return _Columns.apply(x, line, whole)  # type: ignore[no-any-return, no-untyped-call]


def once_per_rank(x: Tensor, line: Line) -> Tensor:
    """x divided by the number of ranks, for a sum to which all ranks add it. Its gradient is the sum's, not divided."""
    return _OncePerRank.apply(x, line.count)  # type: ignore[no-any-return, no-untyped-call]
