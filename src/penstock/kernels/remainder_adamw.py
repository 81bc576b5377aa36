"""AdamW on bf16 weights whose sixteen missing bits are kept beside them: exact fp32 weights without an fp32 copy.

The bits of an fp32 number x, read as an integer, are 65536 · weight + remainder:

    weight    = (bits + 0x8000) >> 16      x rounded to the nearest bf16, ties away from zero
    remainder = bits − (weight << 16)      from −32768 to 32767, which is exactly an int16

The weight is what the forward pass wants: the *rounded* value, half as far off on average as a truncated one and
without its pull towards zero. Ties go away from zero because then, and only then, the remainder fits sixteen signed
bits: a tie that went down would leave +32768.

- Every finite x, zeros and subnormals of either sign among them, and both infinities come back bit by bit.
- From 3.3961775e38 (half-way from bf16's greatest number to 2^128) the weight is infinite, as it is in any rounding to
  nearest; the pair still joins to the finite x.
- A NaN becomes the one NaN 0x7FC00000, since the payload of others would round to infinity or to zero.

Forms of the update, over the same state:

    fused    torch's fused AdamW, over pieces that are joined before it and split after it while they are in cache.
    triton   one pass of one kernel over all tensors (CUDA); see kernels/triton/remainder_adamw.py.
    native   the same on CPUs, in C++; see kernels/native/adamw.cpp.

The reference is torch's fused AdamW over fp32 weights: `fused` gives the same bits. `triton` and `native` round after
every single operation, on every machine alike; torch contracts some products and sums, so that the last places differ.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Iterator
from ctypes import c_double, c_int, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.profiler import record_function

from penstock.errors import ConfigError
from penstock.kernels.native import TYPES, address, library, threads_for

_log = logging.getLogger(__name__)

Form = Literal["auto", "fused", "triton", "native"]
FORMS: tuple[Form, ...] = get_args(Form)
_HAVE_FUSED = frozenset({"cpu", "cuda", "xpu", "mps"})
# On a CPU two fp32 pieces should stay in the last cache; on a GPU a launch should be worth its while.
_PIECE = {"cpu": 1 << 18}
_PIECE_ELSEWHERE = 1 << 22
_HALF = 1 << 15  # half of bf16's last place, in the bits of an fp32


class Hyper(NamedTuple):
    """The hyperparameters of one group's update, as numbers on the host."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool = False


@dataclass
class Batch:
    """Tensors of one group on one device, all dense, flat (N_i) and of the same order, updated together.

    `remainders` is None where the weights are fp32 themselves. `exp_avgs` and `exp_avg_sqs` are fp32, `gradients` of
    any floating type, `steps` 0-d fp32. `copies`, all bf16 or all fp16, are fp32 weights rounded to nearest even, and
    `averages` fp32 averages of the exact weights; None: there are none.
    """

    weights: list[Tensor]
    remainders: list[Tensor] | None
    gradients: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    steps: list[Tensor]
    copies: list[Tensor] | None = None
    averages: list[Tensor] | None = None


def split(value: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 (...) → the nearest bf16 (...), ties away from zero, and the int16 (...) that is missing.

    Exact for all finite numbers and infinities; raises ConfigError for other types.
    """
    if value.dtype != torch.float32:
        raise ConfigError(f"split takes fp32 numbers apart, but was given {value.dtype}; convert it first.")
    bits = _one_nan(value).view(torch.int32)
    remainder = bits.to(torch.int16)
    return ((bits + _HALF) >> 16).to(torch.int16).view(torch.bfloat16), remainder


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 (...) that `split` took apart. Raises ConfigError unless given bf16 and int16 of one shape."""
    if weight.dtype != torch.bfloat16 or remainder.dtype != torch.int16 or weight.shape != remainder.shape:
        raise ConfigError(
            f"join needs bf16 weights and int16 remainders of one shape, but was given {weight.dtype} "
            f"{tuple(weight.shape)} and {remainder.dtype} {tuple(remainder.shape)}; pass what split returned."
        )
    value = weight.to(torch.float32, copy=True)
    value.view(torch.int32).add_(remainder)
    return value


def _one_nan(value: Tensor, out: Tensor | None = None) -> Tensor:
    inf = float("inf")
    return torch.nan_to_num(value, nan=float("nan"), posinf=inf, neginf=-inf, out=out)


@functools.cache
def have_triton() -> bool:
    """Whether Triton is installed. It is imported only where a kernel is launched."""
    return importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """Whether Triton's interpreter runs kernels in place of a GPU; Triton reads the same variable."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def runs_triton(device: torch.device) -> bool:
    """Whether Triton's kernels run on a device; a GPU without Triton is reported once."""
    if device.type == "cuda" and not have_triton():
        _say_once(
            "Triton is not installed, so plain operations take the place of fused kernels, which are slower."
        )
    return have_triton() and (device.type == "cuda" or interpreting())


@functools.cache
def _say_once(message: str) -> None:
    _log.warning(message)


def has_adamw() -> bool:
    """Whether the kernel in C++ is there. Compiles it where nobody has."""
    return library("adamw") is not None


def form_on(form: Form, device: torch.device) -> Form:
    """The form that `auto` means on `device`: triton on CUDA where it is installed, native on CPUs where there is a
    compiler, else torch's fused kernel.

    Any other form is returned as it is, and raises ConfigError where it cannot run.
    """
    if form not in FORMS:
        raise ConfigError(f"There is no form {form!r} of RemainderAdamW; choose one of {', '.join(FORMS)}.")
    can_triton = have_triton() and (device.type == "cuda" or interpreting())
    if form == "triton" and not can_triton:
        why = "Triton is not installed" if not have_triton() else f"the weights are on {device.type}"
        raise ConfigError(
            f"RemainderAdamW's form 'triton' needs Triton and a CUDA device, and {why}; use 'auto'."
        )
    if form == "native" and not (device.type == "cpu" and has_adamw()):
        why = "it could not be compiled" if device.type == "cpu" else f"the weights are on {device.type}"
        raise ConfigError(
            f"RemainderAdamW's form 'native' needs a CPU and a C++ compiler, and {why}; use 'auto'."
        )
    if form == "auto" and device.type == "cpu" and has_adamw():
        return "native"
    if form == "auto" and device.type == "cuda":
        if can_triton:
            return "triton"
        _say_once(
            "Triton is not installed, so RemainderAdamW takes torch's fused kernel, which reads more memory."
        )
    if form in ("auto", "fused") and device.type not in _HAVE_FUSED:
        raise ConfigError(
            f"torch has no fused AdamW on {device.type}, which RemainderAdamW needs; use an fp32 copy as master "
            "weights."
        )
    return "fused" if form == "auto" else form


@torch.no_grad()
def adamw_(
    batch: Batch,
    hyper: Hyper,
    *,
    form: Form,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    average_part: float = 0.0,
) -> None:
    """One AdamW step (Loshchilov and Hutter, ICLR 2019, algorithm 2) on a batch, in place.

    Gradients are divided by `grad_scale`, and where `found_inf` is 1 nothing changes, counters included; both are 0-d
    fp32 tensors that the kernels read on the device. Then copies take the new weights, and averages become
    a + `average_part` · (w − a). Raises ConfigError for copies of weights that have remainders.
    """
    if batch.copies is not None and batch.remainders is not None:
        raise ConfigError("A bf16 weight with a remainder is its own half copy; leave copies out.")
    form = form_on(form, batch.weights[0].device)
    torch._foreach_add_(batch.steps, 1)
    if form == "triton":
        from penstock.kernels.triton.remainder_adamw import launch

        nothing = [None] * len(batch.steps)
        arrays = zip(
            batch.weights, batch.remainders or nothing, batch.exp_avgs, batch.exp_avg_sqs, batch.steps,
            batch.copies or nothing, batch.averages or nothing,
        )  # fmt: skip
        launch(
            list(arrays), batch.gradients, grad_scale, found_inf, average_part=average_part, **hyper._asdict()
        )
    elif form == "native":
        _native(batch, hyper, grad_scale, found_inf, average_part)
    else:
        _fused(batch, hyper, grad_scale, found_inf)
        _follow(batch, found_inf, average_part)
    if form != "fused":  # autograd must see that these were written, as it sees it of torch's operators
        written = (*batch.weights, *(batch.copies or ()), *(batch.averages or ()))
        torch.autograd.graph.increment_version(written)
    if found_inf is not None:
        torch._foreach_sub_(batch.steps, [found_inf] * len(batch.steps))


def _follow(batch: Batch, found_inf: Tensor | None, average_part: float) -> None:
    """Copies and averages after a step that torch's kernel made."""
    if batch.copies is not None:
        torch._foreach_copy_(batch.copies, batch.weights)
    part = average_part if found_inf is None else average_part * (1.0 - found_inf)
    for index, average in enumerate(batch.averages or ()):
        weight = batch.weights[index]
        value = weight if batch.remainders is None else join(weight, batch.remainders[index])
        average.add_((value - average) * part)


def _native(
    batch: Batch, hyper: Hyper, grad_scale: Tensor | None, found_inf: Tensor | None, average_part: float
) -> None:
    """The kernel in C++, all tensors in one pass over memory. It writes copies in bf16; those in fp16 are rounded after
    it."""
    kernels, count, nothing = library("adamw"), len(batch.weights), [None] * len(batch.weights)
    assert kernels is not None
    copies = batch.copies if batch.copies and batch.copies[0].dtype == torch.bfloat16 else None
    # The kernel reads fp32 and bf16. The list keeps what is made here alive until it returns.
    gradients = [each if each.dtype in TYPES else each.float() for each in batch.gradients]
    arrays = zip(
        batch.weights, batch.remainders or nothing, gradients, batch.exp_avgs, batch.exp_avg_sqs, copies or nothing,
        batch.averages or nothing, batch.steps,
    )  # fmt: skip
    addresses = [None if tensor is None else tensor.data_ptr() for one in arrays for tensor in one]
    sizes = [weight.numel() for weight in batch.weights]
    numbers = (*hyper[:5], -1.0 if hyper.maximize else 1.0, average_part)
    with record_function("penstock::adamw"):
        kernels.penstock_adamw(
            c_int64(count), (c_int64 * count)(*sizes), (c_void_p * (8 * count))(*addresses),
            (c_int * count)(*(TYPES[gradient.dtype] for gradient in gradients)), address(grad_scale),
            address(found_inf), (c_double * len(numbers))(*numbers), threads_for(sum(sizes)),
        )  # fmt: skip
    if batch.copies and not copies:
        torch._foreach_copy_(batch.copies, batch.weights)


# -- torch's fused kernel between a join and a split


def _fused(batch: Batch, hyper: Hyper, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    options = {**hyper._asdict(), "amsgrad": False, "grad_scale": grad_scale, "found_inf": found_inf}
    if batch.remainders is None:
        gradients = [gradient.float() for gradient in batch.gradients]
        torch._fused_adamw_(
            batch.weights, gradients, batch.exp_avgs, batch.exp_avg_sqs, [], batch.steps, **options
        )
        return
    device = batch.weights[0].device
    sizes = [weight.numel() for weight in batch.weights]
    piece = min(_PIECE.get(device.type, _PIECE_ELSEWHERE), sum(sizes))
    scratch = [torch.empty(piece, dtype=torch.float32, device=device) for _ in range(2)]
    for members in _packs(sizes, piece):
        _fused_pack(batch, batch.remainders, members, scratch, options)


def _fused_pack(
    batch: Batch,
    remainders: list[Tensor],
    members: list[tuple[int, slice]],
    scratch: list[Tensor],
    options: dict[str, Any],
) -> None:
    """Join the pieces of a pack end to end, update them, and split them again."""

    def parts(tensors: list[Tensor]) -> list[Tensor]:
        # A view costs as much as an operation on a thousand elements: none where it would be of all.
        whole = [(tensors[i], span) for i, span in members]
        return [t if span.stop - span.start == t.numel() else t[span] for t, span in whole]

    sizes = [span.stop - span.start for _, span in members]
    values, second = (each[: sum(sizes)] for each in scratch)
    bits, missing = values.view(torch.int32), second.view(torch.int32)
    weights, lower = parts(batch.weights), parts(remainders)
    torch._foreach_copy_(list(torch.split(values, sizes)), weights)
    torch._foreach_copy_(list(torch.split(missing, sizes)), lower)
    bits.add_(missing)
    gradients = list(torch.split(second, sizes))  # the remainders are done with, so their place is free
    torch._foreach_copy_(gradients, parts(batch.gradients))
    steps = [batch.steps[i] for i, _ in members]
    torch._fused_adamw_(
        list(torch.split(values, sizes)), gradients, parts(batch.exp_avgs), parts(batch.exp_avg_sqs), [], steps,
        **options,
    )  # fmt: skip
    _one_nan(values, out=values)
    pieces = list(torch.split(bits, sizes))
    torch._foreach_copy_(lower, pieces)
    bits.add_(_HALF).bitwise_right_shift_(16)
    torch._foreach_copy_([weight.view(torch.int16) for weight in weights], pieces)


def _packs(sizes: list[int], piece: int) -> Iterator[list[tuple[int, slice]]]:
    """Runs of tensors, or of parts of large ones, with at most `piece` elements in all.

    Pieces are multiples of every vector width, so that an element is a tail here only if it is one in the whole tensor,
    and gets the same instructions.
    """
    members: list[tuple[int, slice]] = []
    room = piece
    for index, size in enumerate(sizes):
        for start in range(0, size, piece):
            span = slice(start, min(start + piece, size))
            if span.stop - span.start > room:
                yield members
                members, room = [], piece
            members.append((index, span))
            room -= span.stop - span.start
    if members:
        yield members
