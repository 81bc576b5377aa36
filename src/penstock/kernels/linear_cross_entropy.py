"""The loss over a large vocabulary: a linear layer and cross entropy, without holding all logits.

Shapes: R rows of features, D features, V entries of the vocabulary. For logits z = x Wᵀ + b, p = softmax(z), a target t
and smoothing ε (Szegedy et al., CVPR 2016, section 7), a row's loss and its gradient are

    −(1 − ε) log p_t − (ε / V) Σ_v log p_v          p − (1 − ε) onehot(t) − ε / V

The plain form holds R·V logits, in the dtype of the layer's matrix product (see `penstock.kernels.cross_entropy`). If
ranks split the vocabulary, it copies its part of the logits to fp32. The chunked form handles some rows at a time. It
computes each chunk's gradient at once, multiplies it into the gradients of x, W and b, and discards the logits. So no
matrix product is repeated, and the backward pass only multiplies by the gradient of the sum. The tensors saved for it
are as large as x, W and b.

A z-loss ζ (Chowdhery et al., "PaLM", 2022, section 5) adds ζ L² to a row's loss, with L = log Σ_v exp z_v. One kernel
computes the loss of a chunk and overwrites its logits with the gradient: see `penstock.kernels.logit_rows`.

With a teacher (see `penstock.kernels.distil`) a row's loss is 1 − w times the above plus w times the student's
divergence from the teacher, whose logits are computed and discarded with the student's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.dtypes import sums_type, widened
from penstock.kernels import choices
from penstock.kernels.choices import rows_in_chunk
from penstock.kernels.cross_entropy import IGNORED, capped, cross_entropy
from penstock.kernels.distil import Taught, divergences
from penstock.kernels.logit_rows import fuses_rows, logit_rows_
from penstock.kernels.vocabulary import (
    Share,
    divergence_and_gradient,
    normalised_,
    to_gradient_,
    vocabulary_cross_entropy,
)

_SUMMED_ROWS = 8
"""Rows whose gradients are summed at a time on a CPU, because torch first casts everything that it sums."""
_ADDED_ENTRIES = 512
"""Entries of the vocabulary whose half-precision gradients are added to fp32 sums at a time on a CPU."""
_TAUGHT_ROWS = 4
"""Memory of a row with a teacher, as a multiple, at most: both logits, at a temperature, and as probabilities."""
CAPPED_ROWS = 2
"""Factor by which a row of capped logits takes more memory: the slopes of the cap are stored too."""
FP16_SCALE = 256.0
"""Scale of fp16 gradients of logits: over a large vocabulary they are 1e-5 and less, where fp16 has few bits left."""


def linear_cross_entropy(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *, smoothing: float = 0.0,
    budget: int | None = None, share: Share | None = None,
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear, taught: Taught | None = None,
    z_loss: float = 0.0, cap: float = 0.0,
) -> Tensor:  # fmt: skip
    """The sum over all rows of the cross entropy of x Wᵀ + b against the targets, 0-d, in fp32 (fp64 for fp64 inputs).

    x: (…, D), weight: (V, D), bias: (V), targets: (…) int64, where −100 is ignored. `budget` is the number of bytes for
    logits and the tensors computed from them at one time, at least for one row; None holds all logits, in the plain
    form. Both forms multiply in the dtype that torch.autocast and the op lists set for a linear layer. The chunked form
    can be differentiated once. With a `share`, weight and bias hold this rank's entries of the vocabulary, targets
    index the whole vocabulary, and the gradient of x covers this rank's entries only. `linear` computes the logits of
    the plain form. With `taught`, which has the same numbers of rows and entries, the loss is a student's; together
    with a share, it holds this rank's entries and needs a budget. `z_loss` is the factor ζ of the z-loss. With a `cap`
    c, logits z become c·tanh(z / c).
    """
    x, targets = x.flatten(0, -2), targets.flatten()
    if budget is None:
        if taught is not None:
            return plain_student_loss(x, weight, bias, targets, smoothing, taught, z_loss, cap)
        return plain_linear_cross_entropy(x, weight, bias, targets, smoothing, share, linear, z_loss, cap)
    # An empty product shows the dtype of a linear layer's outputs here.
    with torch.no_grad():
        dtype = F.linear(x[:0], weight[:1]).dtype
    enabled = torch.is_grad_enabled()
    wanted = [enabled and t is not None and t.requires_grad for t in (x, weight, bias)]
    split = share or Share("", 0, len(weight))
    *beside, taught_cap = (None, None, None, 0.0, 1.0, 0.0) if taught is None else tuple(taught)
    inputs = x, weight, bias, targets, smoothing, budget, dtype, *wanted, *split, *beside
    loss: Tensor = _chunked(*inputs, z_loss=z_loss, cap=cap, taught_cap=taught_cap)[0]
    return loss


def plain_linear_cross_entropy(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, smoothing: float = 0.0,
    share: Share | None = None, linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear,
    z_loss: float = 0.0, cap: float = 0.0,
) -> Tensor:  # fmt: skip
    """All logits at once: the reference that the chunked form is tested against. x: (R, D), targets: (R)."""
    if share is None:
        columns = len(weight)
        if not torch.compiler.is_compiling():
            weight, bias = padded_layer(weight, bias, weight.dtype)
        logits = capped(linear(x, weight, bias), cap)
        if not z_loss:
            return cross_entropy(logits, targets, smoothing, columns)
        logits = widened(logits[:, :columns])
        loss = F.cross_entropy(
            logits, targets, reduction="sum", ignore_index=IGNORED, label_smoothing=smoothing
        )
        return loss + z_loss * _squared_sums(logits, targets)
    logits = capped(widened(linear(x, weight, bias)), cap)
    return vocabulary_cross_entropy(
        logits, targets, share, smoothing=smoothing, ignored=IGNORED, z_loss=z_loss
    )


def _squared_sums(logits: Tensor, targets: Tensor) -> Tensor:
    """Σ (log Σ exp z)² of the rows that count."""
    return torch.logsumexp(logits, 1).square().where(targets != IGNORED, 0.0).sum()


def plain_student_loss(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, smoothing: float, taught: Taught,
    z_loss: float = 0.0, cap: float = 0.0,
) -> Tensor:  # fmt: skip
    """All logits of a student and its teacher at once: the reference of the chunked form."""
    logits = widened(capped(F.linear(x, weight, bias), cap))
    meant = widened(capped(F.linear(*taught[:3]), taught.cap))
    loss = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED, label_smoothing=smoothing)
    loss = loss + z_loss * _squared_sums(logits, targets) if z_loss else loss
    divergence = divergences(logits, meant, taught.temperature).where(targets != IGNORED, 0.0).sum()
    return (1.0 - taught.share) * loss + taught.share * divergence


def padded_entries(entries: Tensor) -> Tensor:
    """Weights (V, D) or biases (V,), padded with zeros; the logits of the padding are 0, and so are their gradients."""
    missing = choices.padded_entries(entries.device.type, len(entries)) - len(entries)
    return F.pad(entries, (0, 0) * (entries.ndim - 1) + (0, missing)) if missing else entries


def padded_layer(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """`padded_entries` of an output layer's weight and bias, in `dtype`."""
    return padded_entries(weight.to(dtype)), None if bias is None else padded_entries(bias.to(dtype))


def rows_at_once(budget: int, rows: int, columns: int, dtype: torch.dtype, *, fused: bool = False) -> int:
    """Rows per chunk: chunks are nearly equal, and none exceeds the budget. A `fused` kernel needs no memory besides
    the logits, which it overwrites with their gradient."""
    most = rows_in_chunk(budget, columns, dtype.itemsize, fused=fused)
    return -(-rows // -(-rows // most)) if rows else 1


def in_chunks(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, smoothing: float, budget: int,
    dtype: torch.dtype, to_x: bool, to_weight: bool, to_bias: bool, group: str, start: int, whole: int,
    taught_x: Tensor | None = None, taught_weight: Tensor | None = None, taught_bias: Tensor | None = None,
    taught_share: float = 0.0, temperature: float = 1.0, row_weights: Tensor | None = None, z_loss: float = 0.0,
    cap: float = 0.0, taught_cap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The loss, and the gradients of x, weight and bias; a gradient that is not requested is empty. With `row_weights`,
    (R,), the gradients are of the weighted sum of the rows' losses."""
    with torch.autocast(x.device.type, enabled=False):
        cast, offset = padded_layer(weight, bias, dtype)
        share = Share(group, start, whole) if group else None
        taught: Taught | None = None
        if taught_x is not None and taught_weight is not None:
            layer = padded_layer(taught_weight, taught_bias, taught_weight.dtype)
            budget //= _TAUGHT_ROWS
            taught = Taught(taught_x, *layer, taught_share, temperature, taught_cap)
        fused = share is None and fuses_rows(x.device, dtype, taught=taught is not None)
        budget = budget // CAPPED_ROWS if cap else budget
        step = rows_at_once(budget, len(x), len(weight), dtype, fused=fused)
        # One chunk needs no sum in fp32; but a sum over rows can leave fp16's range.
        sum_type = dtype if step >= len(x) and dtype != torch.float16 else sums_type(dtype)
        sums = _Sums(
            loss=x.new_zeros((), dtype=sums_type(dtype)),
            x=torch.empty_like(x) if to_x else x.new_empty(0),
            weight=cast.new_zeros(cast.shape if to_weight else (0,), dtype=sum_type),
            bias=cast.new_zeros(cast.shape[:1] if to_bias else (0,), dtype=sums_type(dtype)),
            scale=FP16_SCALE if dtype == torch.float16 else 1.0, columns=len(weight), smoothing=smoothing, share=share,
            taught=taught, row_weights=row_weights, z_loss=z_loss, cap=cap,
        )  # fmt: skip
        for first in range(0, len(x), step):
            here = slice(first, first + step)
            sums.add(here, x[here].to(dtype), cast, offset, targets[here])
        of_weight, of_bias = sums.weight[: len(weight)], sums.bias[: len(weight)]
        if weight.dtype != torch.float16:
            of_weight, of_bias = of_weight.to(weight.dtype), of_bias.to(weight.dtype)
        return sums.loss, sums.x, of_weight, of_bias


# One opaque operator, so that compiled code also computes gradients chunk by chunk: a compiler that saw inside could
# defer that, and keep the logits until then.
_chunked = torch.library.custom_op("penstock::linear_cross_entropy", mutates_args=())(in_chunks)


@_chunked.register_fake
def _shapes(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, smoothing: float, budget: int,
    dtype: torch.dtype, to_x: bool, to_weight: bool, to_bias: bool, *_: Any, **__: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    kept = sums_type(weight.dtype) if weight.dtype == torch.float16 else weight.dtype
    return (
        x.new_empty((), dtype=sums_type(dtype)),
        torch.empty_like(x) if to_x else x.new_empty(0),
        weight.new_empty(weight.shape if to_weight else (0,), dtype=kept),
        weight.new_empty(weight.shape[:1] if to_bias else (0,), dtype=kept),
    )


class _Sums(NamedTuple):
    """Sums over chunks: the loss and the gradients; a gradient that is not requested is empty."""

    loss: Tensor
    x: Tensor
    weight: Tensor
    bias: Tensor
    smoothing: float
    scale: float
    share: Share | None
    columns: int
    """V, without padding."""
    taught: Taught | None
    row_weights: Tensor | None
    z_loss: float
    cap: float

    def add(self, here: slice, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> None:
        """Add the loss and gradients of some rows: x (r, D), and weight (V, D), in one dtype; weight may be padded."""
        rows = capped(F.linear(x, weight, bias), self.cap)
        logits, dtype = rows[:, : self.columns], rows.dtype  # (r, V)
        counted = targets != IGNORED
        wanted = self.x.numel() or self.weight.numel() or self.bias.numel()
        slopes = 1.0 - (logits / self.cap).square() if self.cap and wanted else None
        if self.share is None:
            p = self._whole(here, logits, targets, bool(wanted))
        else:
            p = self._split(here, logits, targets.where(counted, 0), counted, bool(wanted))
        if not wanted:
            return
        if slopes is not None:
            p.mul_(slopes)
        # Ignored rows are zeroed in each gradient, where a row has D elements instead of V.
        counts = counted[:, None].to(dtype)
        if self.bias.numel() and p is logits:
            for piece in torch.split(p, len(p) if p.is_cuda else _SUMMED_ROWS):
                self.bias[: self.columns].add_(piece.sum(0, dtype=self.bias.dtype))
        elif self.bias.numel():
            self.bias[: self.columns].add_(counts.to(p.dtype).T.mm(p)[0])
        # The gradient overwrites the logits, unless that would only be a copy.
        gradient = p if p.shape == rows.shape and p.dtype == dtype else rows
        if gradient is rows and p is not logits:
            logits.copy_(p)
        del p, rows, logits
        if self.x.numel():
            torch.mul(gradient.mm(weight), counts, out=self.x[here])
        if self.weight.numel():
            self._learn(gradient, x * counts)

    def _whole(self, here: slice, logits: Tensor, targets: Tensor, wanted: bool) -> Tensor:
        """The logits (r, V), overwritten by the gradient if it is wanted."""
        taught, w, temperature = None, 0.0, 1.0
        if self.taught is not None:
            taught, (w, temperature) = self._taught_logits(here), self.taught[3:5]
        losses, _ = logit_rows_(
            logits, targets, taught=taught,
            row_weights=None if self.row_weights is None else self.row_weights[here], smoothing=self.smoothing,
            z_loss=self.z_loss, share=w, temperature=temperature, scale=self.scale, gradient=wanted,
        )  # fmt: skip
        self.loss.add_(losses.sum())
        return logits

    def _taught_logits(self, here: slice) -> Tensor:
        assert self.taught is not None
        rows = F.linear(self.taught.x[here], *self.taught[1:3])[:, : self.columns]
        return capped(rows, self.taught.cap)

    def _split(self, here: slice, logits: Tensor, targets: Tensor, counted: Tensor, wanted: bool) -> Tensor:
        """The gradient (r, V) of this rank's entries if it is wanted, ignored rows included."""
        assert self.share is not None
        p = logits.to(self.loss.dtype, copy=True)
        to_teacher: Tensor | None = None
        w = 0.0
        if self.taught is not None:
            w, temperature = self.taught[3:5]
            meant = self._taught_logits(here).to(p.dtype, copy=True)
            divergence, to_teacher = divergence_and_gradient(p.clone(), meant, temperature, self.share)
        row = normalised_(p, targets, self.smoothing, self.share, self.z_loss)
        losses = row.losses if to_teacher is None else row.losses * (1.0 - w) + divergence * w
        self.loss.add_(losses.where(counted, 0).sum())
        if wanted:
            to_gradient_(p, row, self.smoothing, self.share, self.z_loss)
            p = p if to_teacher is None else p.mul_(1.0 - w).add_(to_teacher, alpha=w)
        if self.row_weights is not None:
            p.mul_(self.row_weights[here, None])
        return p.mul_(self.scale) if self.scale != 1.0 else p

    def _learn(self, gradient: Tensor, x: Tensor) -> None:
        """Add the rows' gradient of the weight: (V, r) @ (r, D)."""
        if x.dtype == self.weight.dtype:
            self.weight.addmm_(gradient.T, x)
        elif x.is_cuda:
            self.weight.add_(torch.mm(gradient.T, x, out_dtype=self.weight.dtype))
        elif x.dtype == torch.float16:
            # A sum over rows can leave fp16's range.
            self.weight.addmm_(gradient.T.float(), x.float())
        else:
            # torch first casts everything that it adds in another dtype.
            made, size = gradient.T.mm(x), _ADDED_ENTRIES
            for total, more in zip(torch.split(self.weight, size), torch.split(made, size), strict=True):
                total.add_(more)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])
    ctx.scale = FP16_SCALE if inputs[6] == torch.float16 else 1.0
    ctx.wanted, ctx.types = inputs[7:10], [None if t is None else t.dtype for t in inputs[:3]]


def _scaled(ctx: Any, loss: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    """The saved gradients times the loss's gradient. They change in place, so torch refuses a second backward pass."""
    gradients: list[Tensor | None] = [None, None, None]
    if loss is not None:
        factor = loss / ctx.scale
        for i, (grad, wanted, dtype) in enumerate(zip(ctx.saved_tensors, ctx.wanted, ctx.types, strict=True)):
            if wanted:
                gradients[i] = grad.mul_(factor).to(dtype)
    return (*gradients, *[None] * 19)


_chunked.register_autograd(_scaled, setup_context=_remember)
