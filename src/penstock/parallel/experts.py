"""Expert parallelism: each rank holds some of the experts, and tokens are sent to the ranks of the experts they visit
(Lepikhin et al., "GShard", ICLR 2021, section 3; experts folded over all ranks of a stage: Liu et al., "MoE Parallel
Folding", 2025).

Neighbours form a group of `ep` ranks that together hold every expert once. Each rank has its own tokens; of ranks with
the same samples (`tp`), each routes a part of them. Without `ep`, tensor-parallel ranks split every expert as they
split a perceptron.

The forward pass of a mixture makes three exchanges in its group: the numbers of visits, the visiting tokens, and the
results. On a GPU the host waits for the first. The backward pass repeats the other two in reverse. While tokens (and in
the backward pass their gradients) are in transfer, the shared experts compute.

An expert's gradients come from all tokens of its group. They are summed over the ranks that hold the same experts, and
divided by the number of ranks whose losses are averaged, like the gradients of all other weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from penstock.kernels.padding import put_rows
from penstock.models.expert_linear import ExpertLinear
from penstock.models.experts import Compute, Facts, mixtures_of
from penstock.models.router import repeated
from penstock.models.visits import spread
from penstock.models.wrap import swap
from penstock.parallel.dims import ParallelDims
from penstock.parallel.parts import SplitModule, as_dtensor, cut_to_fit
from penstock.parallel.sequence import (
    Line,
    all_gather,
    copy,
    divide,
    gather,
    own_tokens,
    reduce,
    scatter,
    unite,
)
from penstock.shards import EXPERT


class Visits:
    """Sends tokens to the ranks that hold the experts they visit; experts are whole. See `Exchange`."""

    line: Line | None = None
    """The ranks with the same samples, and whether these ranks already split the tokens."""
    splits_tokens = False
    _flat: Line | None = None

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self.group = group
        """The ranks that together hold all experts."""

    def split_over(self, line: Line) -> None:
        """Make each rank of `line` route a part of the tokens that they all have."""
        self.line, self.splits_tokens, self._flat = line, True, line.sibling()
        self._flat.dim = 0

    def __deepcopy__(self, memo: Any) -> Visits:
        return self  # a copy of a model belongs to the same group

    def enter(self, x: Tensor, shares: Tensor | None, *facts: Tensor | None) -> tuple[Tensor, Facts]:
        line, flat = self.line, self._flat
        if line is None or flat is None:
            return x.flatten(0, 1), [_flat(shares), *map(_flat, facts)]
        shape = list(x.shape[:2])
        if line.sequence:
            shape[line.dim] = line.tokens
        if shares is None:
            # Rows of zeros that pad parts to equal lengths must not count.
            shares = _even(x, shape)
        if line.sequence:
            parts = [
                None if each is None else own_tokens(each.reshape(shape), line) for each in (shares, *facts)
            ]
            return x.flatten(0, 1), list(map(_flat, parts))
        parts = [None if each is None else own_tokens(each.flatten(), flat) for each in (shares, *facts)]
        return divide(x.flatten(0, 1), flat), parts

    def leave(self, out: Tensor) -> Tensor:
        return out if self._flat is None or self._flat.sequence else unite(out, self._flat)

    def visit(
        self, rows: Tensor, experts: Tensor, loads: Tensor, compute: Compute, meanwhile: Callable[[], None]
    ) -> Tensor:
        counts = repeated(lambda: self._counts(loads))
        sent = loads.view(len(counts), -1).sum(1).tolist()
        came = counts.sum(1).tolist()
        way = _Way(came, sent, self.group)
        rows = _Departed.apply(rows, way)  # type: ignore[no-untyped-call]
        meanwhile()
        rows = _Arrived.apply(rows, way)  # type: ignore[no-untyped-call]
        # They arrive sorted by rank and expert; products need them sorted by expert.
        kinds = torch.arange(counts.shape[1], device=counts.device).repeat(len(counts))
        here, order = kinds.repeat_interleave(counts.flatten(), output_size=sum(came)).sort(stable=True)
        made = compute(spread(rows, order, 1), here, counts.sum(0))
        back = _Way(sent, came, self.group)
        return _Arrived.apply(_Departed.apply(put_rows(made, order, len(order)), back), back)  # type: ignore[no-any-return, no-untyped-call]

    def _counts(self, loads: Tensor) -> Tensor:
        """Number of visits from each rank to each expert held here, (ranks, E / ranks)."""
        counts = torch.empty_like(loads)
        distributed.all_to_all_single(counts, loads, group=self.group)
        return counts.view(distributed.get_world_size(self.group), -1)


class Slices:
    """Splits the hidden features of every expert over ranks that all have all tokens. See `Exchange`."""

    splits_tokens = False

    def __init__(self, line: Line) -> None:
        self.line = line

    def __deepcopy__(self, memo: Any) -> Slices:
        return self

    def enter(self, x: Tensor, shares: Tensor | None, *facts: Tensor | None) -> tuple[Tensor, Facts]:
        x = gather(x, self.line) if self.line.sequence else copy(x, self.line)
        self._shape = x.shape
        # All ranks compute the whole gradient of the balance losses, and their results are summed.
        shares = (_even(x, x.shape[:2]) if shares is None else shares) / self.line.count
        return x.flatten(0, 1), [_flat(shares), *map(_flat, facts)]

    def visit(
        self, rows: Tensor, experts: Tensor, loads: Tensor, compute: Compute, meanwhile: Callable[[], None]
    ) -> Tensor:
        return compute(rows, experts, loads)

    def leave(self, out: Tensor) -> Tensor:
        out = out.view(self._shape)
        return scatter(out, self.line) if self.line.sequence else reduce(out, self.line)


class Neighbours:
    """Ranks with other tokens of the same samples, which share the experts' capacity. See
    `MixtureOfExperts.neighbours`."""

    def __init__(self, line: Line | None = None, group: distributed.ProcessGroup | None = None) -> None:
        self.line, self.group = line, group
        """The ranks that split one rank's tokens evenly, and the ranks that split samples."""

    def __deepcopy__(self, memo: Any) -> Neighbours:
        return self

    def __call__(self, numbers: Tensor) -> Tensor:
        if self.line is not None:
            numbers = all_gather(numbers, self.line, 0)
        if self.group is None:
            return numbers
        # Without padding, these ranks may have different numbers of tokens.
        own_count = torch.tensor([len(numbers)], device=numbers.device)
        counts = [torch.empty_like(own_count) for _ in range(distributed.get_world_size(self.group))]
        distributed.all_gather(counts, own_count, group=self.group)
        sizes = torch.cat(counts).tolist()
        wide = torch.nn.functional.pad(numbers, (0, max(sizes) - len(numbers)))
        parts = [torch.empty_like(wide) for _ in sizes]
        distributed.all_gather(parts, wide, group=self.group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes)])


def _flat(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.flatten()


def _even(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Equal weights for the tokens of `shape`."""
    return x.new_full(shape, 1.0 / max(1, math.prod(shape)), dtype=torch.float64)


class _Way:
    """An exchange of rows between the ranks of a group: the numbers of rows that come from and go to each rank."""

    def __init__(self, came: list[int], sent: list[int], group: distributed.ProcessGroup) -> None:
        self.came, self.sent, self.group = came, sent, group
        self._arriving: Any = None

    def depart(self, rows: Tensor, *, back: bool = False) -> Tensor:
        """Begin to send rows, with `back` in the reverse direction; returns the tensor that `arrive` completes."""
        came, sent = (self.sent, self.came) if back else (self.came, self.sent)
        rows, arrived = rows.contiguous(), rows.new_empty(sum(came), rows.shape[1])
        work = distributed.all_to_all_single(arrived, rows, came, sent, group=self.group, async_op=True)
        self._arriving = work, arrived, rows
        return arrived

    def arrive(self) -> Tensor:
        """Wait for the rows of other ranks; on a GPU only the stream waits, not the host."""
        work, arrived, _ = self._arriving
        work.wait()
        self._arriving = None
        return arrived  # type: ignore[no-any-return]


class _Departed(torch.autograd.Function):
    """Begins to send rows; the backward pass waits for their gradients. Work between this and `_Arrived` overlaps with
    the exchange in both passes, because autograd runs it in reverse order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        return way.depart(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.way.arrive(), None


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        way.arrive()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.way.depart(grad, back=True)
        return grad, None  # for its shape; its values are not read


def split_experts(model: nn.Module, dims: ParallelDims) -> None:
    """Split the experts of every mixture of `model` over the ranks of `dims`, in place: same object, same names.

    All ranks must have the same weights before. They become DTensors on the mesh dimension `ep`.
    """
    assert dims.expert_mesh is not None
    mesh = dims.expert_mesh[EXPERT]
    for mixture in mixtures_of(model):
        mixture.exchange = Visits(mesh.get_group())
        for linear in mixture.linears:
            for name, parameter in list(linear.named_parameters(recurse=False)):
                part = as_dtensor(parameter.detach(), 0, 1, mesh)
                setattr(linear, name, nn.Parameter(part, requires_grad=parameter.requires_grad))
            swap(linear, SplitModule)
            linear.register_load_state_dict_pre_hook(cut_to_fit)  # type: ignore[no-untyped-call]


def split_linears(model: nn.Module) -> Iterator[ExpertLinear]:
    """The linears of experts that are split over ranks as whole experts."""
    for mixture in mixtures_of(model):
        if isinstance(mixture.exchange, Visits):
            yield from mixture.linears
