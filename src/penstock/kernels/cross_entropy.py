"""Cross entropy in place: the gradient overwrites the logits, which nothing else may need.

For logits z of a row, p = softmax(z), a target t, V entries of the vocabulary and smoothing ε (Szegedy et al., CVPR
2016, section 7) the loss and its gradient are

    −(1 − ε) log p_t − (ε / V) Σ_v log p_v          p − (1 − ε) onehot(t) − ε / V

torch keeps the log-probabilities in fp32, makes a tensor of zeros for the gradient at the targets, with smoothing one
more, and casts back: on a CPU up to six tensors as large as the logits, on a GPU three. Here a few rows are handled at
a time, so that little more than the logits is held, and a CPU's intermediate results stay in its caches. For 512 rows
of 58,101 logits in bf16, smoothed, on two cores of an AMD EPYC, forward and backward take 40 ms instead of 213; the C++
kernel for CPUs (`penstock.kernels.native_losses`) takes 3.7 times less again. On a GPU with Triton one kernel reads the
logits for the loss and one for the gradient (`penstock.kernels.logit_rows`). The reference is
`torch.nn.functional.cross_entropy`.

Shapes: R rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.dtypes import sums_type, widened
from penstock.kernels.choices import loss_piece
from penstock.kernels.has_triton import runs_triton
from penstock.kernels.logit_rows import fuses_rows, logit_rows_, row_losses, take_target_
from penstock.kernels.native_losses import IGNORED as IGNORED
from penstock.kernels.native_losses import native_gradients_, native_losses, takes_rows


def capped(logits: Tensor, cap: float) -> Tensor:
    """c·tanh(z / c) of logits z, in their type; with a cap of 0 the logits themselves."""
    return torch.tanh(logits / cap) * cap if cap else logits


def cross_entropy(
    logits: Tensor, targets: Tensor, smoothing: float = 0.0, columns: int | None = None
) -> Tensor:
    """The sum of the cross entropy of logits (R, V) and targets (R,) int64, where −100 is ignored: 0-d, in fp32 (fp64
    for fp64 logits). If `columns` is less than V, the remaining columns are padding with logits of 0, and are ignored.

    The backward pass overwrites the logits, and can run only once. Compiled code on a GPU uses torch's own loss, which
    the compiler fuses; on a CPU it calls the same kernel, with a new tensor for the gradient.
    """
    if not torch.compiler.is_compiling():
        return _CrossEntropyInPlace.apply(logits, targets, smoothing, columns)  # type: ignore[no-any-return, no-untyped-call]
    logits = logits[:, :columns]
    if logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.bfloat16):
        return _cross_entropy_rows(logits, targets, smoothing)[0].sum()  # type: ignore[no-any-return]
    logits = widened(logits)
    return F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED, label_smoothing=smoothing)


class _CrossEntropyInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, smoothing: float, columns: int | None) -> Tensor:
        losses, sums = _losses(logits[:, :columns], targets, smoothing)
        ctx.save_for_backward(logits, targets, sums)
        ctx.smoothing, ctx.columns, ctx.spent = smoothing, columns, False
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.spent:
            raise RuntimeError(
                "This loss was differentiated before, and its logits were overwritten: compute it again."
            )
        ctx.spent = True
        logits, targets, sums = ctx.saved_tensors
        rows = logits[:, : ctx.columns]
        _gradients_(rows, rows, targets, sums, grad.expand(len(rows)), ctx.smoothing)
        return logits, None, None, None


def _in_triton(logits: Tensor) -> bool:
    return logits.stride(1) == 1 and runs_triton(logits.device) and fuses_rows(logits.device, logits.dtype)


def _losses(logits: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """The loss of each row, and its log Σ exp for the C++ kernel, (R,); the second is empty in other forms."""
    if _in_triton(logits):
        losses, _ = logit_rows_(logits, targets, smoothing=smoothing, gradient=False)
        return losses, losses.new_empty(0)
    if takes_rows(logits):
        return native_losses(logits, targets, smoothing, 0.0)
    counted, index = _counted(targets)
    wide = sums_type(logits.dtype)
    losses = logits.new_empty(len(logits), dtype=wide)
    for here in _pieces(logits):
        logs = torch.log_softmax(logits[here], dim=-1, dtype=wide)
        losses[here] = row_losses(logs, index[here], smoothing)
        del logs  # before the next piece is made
    return losses.where(counted, 0.0), losses.new_empty(0)


def _gradients_(
    out: Tensor, logits: Tensor, targets: Tensor, sums: Tensor, factors: Tensor, smoothing: float
) -> None:
    """Write the gradient of Σ_rows factor · loss to `out`, which may be the logits."""
    if _in_triton(logits):
        rows = out if out is logits else out.copy_(logits)
        logit_rows_(rows, targets, row_weights=factors, smoothing=smoothing)
        return
    if sums.numel():
        native_gradients_(out, logits, targets, sums, factors, smoothing)
        return
    counted, index = _counted(targets)
    wide = sums_type(logits.dtype)
    factors = (factors.to(wide) * counted)[:, None]
    for here in _pieces(logits):
        p = torch.softmax(logits[here], dim=-1, dtype=wide)
        take_target_(p, index[here], smoothing)
        if out.is_cuda or out.dtype == wide:
            torch.mul(p, factors[here], out=out[here])  # a GPU's kernel casts as it writes
        else:
            out[here].copy_(p.mul_(factors[here]))
        del p


@torch.library.custom_op("penstock::cross_entropy_rows", mutates_args=())
def _cross_entropy_rows(logits: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """The loss of each row and its log Σ exp, for compiled code on a CPU."""
    losses, sums = _losses(logits, targets, smoothing)
    return losses, sums if sums.numel() else torch.logsumexp(logits.double(), 1)


@_cross_entropy_rows.register_fake
def _loss_shapes(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    losses = logits.new_empty(len(logits), dtype=torch.float32)
    return losses, torch.empty_like(losses, dtype=torch.float64)


@torch.library.custom_op("penstock::cross_entropy_gradient", mutates_args=())
def _cross_entropy_gradient(
    logits: Tensor, targets: Tensor, sums: Tensor, factors: Tensor, smoothing: float
) -> Tensor:
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _gradients_(out, logits, targets, sums if takes_rows(logits) else sums[:0], factors, smoothing)
    return out


@_cross_entropy_gradient.register_fake
def _gradient_shape(logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, targets, ctx.smoothing = inputs
    ctx.save_for_backward(logits, targets, output[1])


def _backward(ctx: Any, factors: Tensor, _: Any) -> tuple[Any, ...]:
    return torch.ops.penstock.cross_entropy_gradient(*ctx.saved_tensors, factors, ctx.smoothing), None, None


_cross_entropy_rows.register_autograd(_backward, setup_context=_save)


def _counted(targets: Tensor) -> tuple[Tensor, Tensor]:
    """Which rows count (R,), and the index of each row's target (R, 1)."""
    counted = targets != IGNORED
    return counted, targets.where(counted, 0)[:, None]


def _pieces(logits: Tensor) -> Iterator[slice]:
    step = max(1, loss_piece(logits.device.type) // max(1, logits.shape[1]))
    for first in range(0, len(logits), step):
        yield slice(first, first + step)
