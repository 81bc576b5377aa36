"""Operators of a head for words and of the loss of its logits."""

from __future__ import annotations

import math

from penstock.config.graph import Run, WordHead
from penstock.kernels.choices import fuses_rows, logit_bytes, loss_budget, loss_piece, rows_in_chunk
from penstock.planner.blocks import before_split
from penstock.planner.listing import Lister
from penstock.planner.operators import Op
from penstock.planner.terms import OpTerms


def list_words(to: Lister, head: WordHead, run: Run, rows: float, *, again: bool = False) -> None:
    """The logits of `rows` tokens over the vocabulary, and their loss; with `again`, an earlier head has read the same
    table."""
    t, c, last, d = to.terms, to.terms.product, run.stack, run.stack.width
    if head.transform:
        # The head of masked language models: a dense layer, its activation and a norm.
        size = rows * d
        with to.inside("head"):
            to.gemm("head.dense", rows, d, d, bias=last.bias, narrow=False, group="output")
            to.activate("head.activation", size, last.mlp, (c, c), (2 * c, c), kept=size * c, group="output")
        to.norm("head.norm", rows, last.width, last.norm_kind)
    if head.scaled:
        to.move("head.scale", rows * d, (c, c))
    before_split(to, rows, d, hides=False)
    columns = -(-head.vocabulary // t.tp)
    if t.chunked:
        with to.inside("loss"), to.words(columns):
            _chunked_loss(to, head, rows, columns, d)
        return
    # The gradient takes the place of the logits, which stay until the products of the output have read it.
    in_place = t.tp == 1 and not t.whole and t.software.loss == "penstock"
    padded = columns if t.tp == 1 else 0  # a vocabulary that ranks split is not padded outside chunks
    with to.inside("head"), to.words(padded):
        to.gemm(
            "head", rows, columns, d, bias=head.bias, narrow=False, group="output",
            kept=rows * (d + columns * in_place) * c, tied=bool(head.tied), was_cast=again,
        )  # fmt: skip
        if head.cap:
            size = rows * columns
            to.move(
                "head.cap", size, (3 * c, 3 * c), (4 * c, 3 * c), kept=size * c, group="output", launches=3
            )
    with to.inside("loss"):
        _loss_in_place(to, rows, columns) if in_place else _loss(to, rows, columns)


def _chunked_loss(to: Lister, head: WordHead, rows: float, columns: int, d: int) -> None:
    """The logits and their loss, for some rows at a time, as `penstock.kernels.linear_cross_entropy` makes them.
    Gradients are computed with the loss, when all activations are in memory. They are listed first in the backward
    pass: the logits of one chunk and the sum of the weights' gradients are then alive in addition to everything kept.
    """
    t, c = to.terms, to.terms.product
    # One kernel reads the logits of a chunk twice and writes their gradient over them.
    fused = _fuses_rows(t)
    copies = 2 if head.cap else 1  # slopes of the cap are held together with capped logits
    most = rows_in_chunk(loss_budget(t.device) // copies, columns, int(c), fused=fused)
    alive = logit_bytes(int(c), fused=fused) * columns * copies
    chunks = math.ceil(rows / most)
    some, size, weights = rows / chunks, rows * columns, columns * d
    biases, learns = columns if head.bias else 0, not head.tied
    learned = weights * learns + biases
    cast = 2.0 * weights if t.casts else 0.0
    # Products of several chunks are added up in fp32; a half product is made first.
    summed = c < 4 and chunks > 1
    added = (8.0 if chunks > 1 else 2 * c) * weights * chunks + (4.0 * weights * chunks if summed else 0.0)
    held = some * alive + (4.0 if chunks > 1 else c) * weights + (2.0 * weights if summed else 0.0) + cast

    # Log-probabilities, their exponentials, and for half logits the cast of their gradients.
    moved = size * 13.0 * c * bool(head.cap)  # to cap, for the slopes and to multiply by them
    moved += size * (
        2.0 * c if fused else 12.0 + (6.0 if c < 4 else 0.0) + (8.0 if c < 4 and t.host else 0.0)
    )
    if cast:
        to.add(Op("cast.weights", "copy", read=4.0 * weights, written=cast))
    to.add(
        Op("loss.softmax", "softmax", read=size * c, written=0.0 if fused else size * 4.0, elements=size,
           launches=chunks if fused else 2 * chunks)
    )  # fmt: skip
    to.add(
        Op("head", "gemm", True, chunks, some, columns, d, (rows * d + chunks * weights) * c, size * c, weights=learned,
           tensors=learns + (biases > 0), launches=chunks, module="head", linear="head"),
        Op("loss.gradient", "pointwise", False, read=max(0.0, moved - held), written=held,
           launches=(1 if fused else 6) * chunks),
        Op("head.input", "gemm", False, chunks, some, d, columns, (size + chunks * weights) * c, rows * d * c,
           launches=chunks, linear="head"),
        Op("head.weight", "gemm", False, chunks, columns, d, some, (size + rows * d) * c + added, weights=weights,
           launches=chunks, linear="head"),
        *[Op("head.bias", "reduce", False, read=size * 4.0, weights=biases, launches=chunks)] * bool(biases),
        Op("loss.scale", "pointwise", False, read=rows * d * c + 8.0 * weights, written=rows * d * c, in_place=True),
    )  # fmt: skip
    _of_all_words(to, rows)


def _fuses_rows(terms: OpTerms) -> bool:
    """Whether the loss overwrites logits with their gradient: see `penstock.kernels.logit_rows`."""
    return terms.tp == 1 and terms.software.loss == "penstock" and fuses_rows(terms.device, terms.compute)


def _of_all_words(to: Lister, rows: float) -> None:
    """Communication for the loss where devices split the vocabulary: each row's greatest logit, then its sum of
    exponentials and the logit of its target."""
    if to.terms.tp > 1:
        to.add(Op("loss.greatest", "allreduce", read=rows * 4.0, axis="tensor"))
        to.add(Op("loss.sums", "allreduce", read=rows * 8.0, axis="tensor"))


def _loss_in_place(to: Lister, rows: float, columns: int) -> None:
    """Cross-entropy as `penstock.kernels.cross_entropy` makes it: by one kernel for each pass, or, for half logits on a
    CPU that no kernel accepts, with casts of some rows at a time that stay in its caches."""
    size, c = rows * columns, to.terms.product
    piece = max(columns, min(loss_piece(to.terms.device), size))
    alive = 0.0 if _fuses_rows(to.terms) else piece * (8.0 if c < 4 else 4.0)
    logs = Op("loss.softmax", "softmax", read=size * c, elements=size, row=columns, launches=2)
    to.add(
        logs,
        logs._replace(
            name="loss.gradient", forward=False, read=max(0.0, 2 * size * c - alive), written=alive, launches=3,
            in_place=True,
        ),
    )  # fmt: skip


def _loss(to: Lister, rows: float, columns: int) -> None:
    """Cross-entropy: a cast to fp32, log-softmax, its gradient and the cast back, each an operator of its own unless
    the whole model is compiled."""
    t, size, c = to.terms, rows * columns, to.terms.product
    if t.whole:
        in_rows = t.host and _fuses_rows(t)
        back = c, c + (2 if c == 2 and not in_rows else 0)
        to.move(
            "loss", size, (c if in_rows else 2 * c, 0), back, kind="softmax", kept=size * c, group="output",
            row=columns,
        )  # fmt: skip
    else:
        megatron = t.software.loss == "megatron"
        if c < 4:
            # Except in Megatron, the training loop still holds the half-precision output when its gradient is made.
            kept = 0 if megatron else size * c
            to.move("loss.cast", size, (c, 4), (4, c), kind="copy", kept=kept, group="output")
        if megatron:
            # Maximum, subtraction, exponentials, their sum, division: each reads all logits, and three write them.
            # Backward scales the quotients.
            to.move(
                "loss.softmax", size, (20, 12), (4, 4), kind="softmax", kept=4 * size, group="output", row=columns,
                launches=5,
            )  # fmt: skip
        else:
            # Over tensor parallel devices the exponentials are kept as well as the logarithms.
            kept = size * (8 if t.tp > 1 else 4)
            to.move(
                "loss.softmax", size, (4, 4), (8, 4), kind="softmax", kept=kept, group="output", row=columns
            )
            to.move("loss.pick", rows, (4, 4), (4, 4 * columns), kind="copy")
    _of_all_words(to, rows)
