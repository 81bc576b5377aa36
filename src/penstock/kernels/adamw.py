"""AdamW over many tensors in one pass over memory, with half copies and averages of the weights written on the way.

Forms of the update, over the same state:

    fused torch's fused AdamW, and separate operations for copies and averages.
    triton   one pass of one kernel over all tensors (CUDA); see kernels/triton/adamw.py.
    native   the same on CPUs, in C++; see kernels/native/adamw.cpp.

`triton` and `native` round after every single operation, the same on every machine; torch fuses some multiplications
and additions, so that its results differ in the last digits.
"""

from __future__ import annotations

from ctypes import c_double, c_int, c_int64, c_void_p
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.profiler import record_function

from penstock.errors import ConfigError
from penstock.kernels.has_triton import have_triton, interpreting
from penstock.kernels.native import TYPES, address, library, threads_for

Form = Literal["auto", "fused", "triton", "native"]
FORMS: tuple[Form, ...] = get_args(Form)


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

    `weights`, `exp_avgs` and `exp_avg_sqs` are fp32, `gradients` of any floating type, `steps` 0-d fp32. `copies`, all
    bf16 or all fp16, are the weights rounded to nearest even, and `averages` their fp32 averages; None: there are none.
    """

    weights: list[Tensor]
    gradients: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    steps: list[Tensor]
    copies: list[Tensor] | None = None
    averages: list[Tensor] | None = None


def has_adamw() -> bool:
    """Whether the C++ kernel is available; it is compiled at first use."""
    return library("adamw") is not None


def form_on(form: Form, device: torch.device) -> Form:
    """The form that `auto` means on `device`: triton on CUDA if Triton is installed, native on a CPU if a C++ compiler
    is, else torch's fused kernel.

    Any other form is returned unchanged. Raises ConfigError if that form cannot run on `device`.
    """
    if form not in FORMS:
        raise ConfigError(f"There is no form {form!r} of AdamW's update; choose one of {', '.join(FORMS)}.")
    can_triton = have_triton() and (device.type == "cuda" or interpreting())
    if form == "triton" and not can_triton:
        why = "Triton is not installed" if not have_triton() else f"the weights are on {device.type}"
        raise ConfigError(f"AdamW's form 'triton' needs Triton and a CUDA device, and {why}; use 'auto'.")
    if form == "native" and not (device.type == "cpu" and has_adamw()):
        why = "it could not be compiled" if device.type == "cpu" else f"the weights are on {device.type}"
        raise ConfigError(f"AdamW's form 'native' needs a CPU and a C++ compiler, and {why}; use 'auto'.")
    if form != "auto":
        return form
    if device.type == "cpu" and has_adamw():
        return "native"
    return "triton" if device.type == "cuda" and can_triton else "fused"


@torch.no_grad()
def adamw_(
    batch: Batch, hyper: Hyper, *, form: Form, grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None, average_part: float = 0.0,
) -> None:  # fmt: skip
    """One AdamW step (Loshchilov and Hutter, ICLR 2019, algorithm 2) on a batch, in place.

    Gradients are divided by `grad_scale`. If `found_inf` is 1, nothing changes, not even the step counters. Both are
    0-d fp32 tensors that the kernels read on the device. Then the new weights are written to the copies, and averages
    become a + `average_part` · (w − a).
    """
    form = form_on(form, batch.weights[0].device)
    torch._foreach_add_(batch.steps, 1)
    if form == "triton":
        from penstock.kernels.triton.adamw import launch

        nothing = [None] * len(batch.steps)
        arrays = zip(
            batch.weights, batch.exp_avgs, batch.exp_avg_sqs, batch.steps, batch.copies or nothing,
            batch.averages or nothing,
        )  # fmt: skip
        launch(
            list(arrays), batch.gradients, grad_scale, found_inf, average_part=average_part, **hyper._asdict()
        )
    elif form == "native":
        _native(batch, hyper, grad_scale, found_inf, average_part)
    else:
        _fused(batch, hyper, grad_scale, found_inf)
        _follow(batch, found_inf, average_part)
    if form != "fused":  # tell autograd that these were written; torch's operators do so themselves
        written = (*batch.weights, *(batch.copies or ()), *(batch.averages or ()))
        torch.autograd.graph.increment_version(written)
    if found_inf is not None:
        torch._foreach_sub_(batch.steps, [found_inf] * len(batch.steps))


def _follow(batch: Batch, found_inf: Tensor | None, average_part: float) -> None:
    """Update copies and averages after a step of torch's kernel."""
    if batch.copies is not None:
        torch._foreach_copy_(batch.copies, batch.weights)
    part = average_part if found_inf is None else average_part * (1.0 - found_inf)
    for average, weight in zip(batch.averages or (), batch.weights):
        average.add_((weight - average) * part)


def _native(
    batch: Batch, hyper: Hyper, grad_scale: Tensor | None, found_inf: Tensor | None, average_part: float
) -> None:
    """Run the C++ kernel: all tensors in one pass over memory. It writes bf16 copies; fp16 copies are made
    afterwards."""
    kernels, count, nothing = library("adamw"), len(batch.weights), [None] * len(batch.weights)
    assert kernels is not None
    copies = batch.copies if batch.copies and batch.copies[0].dtype == torch.bfloat16 else None
    # The kernel reads fp32 and bf16. The list keeps fp32 casts alive until it returns.
    gradients = [each if each.dtype in TYPES else each.float() for each in batch.gradients]
    arrays = zip(
        batch.weights, gradients, batch.exp_avgs, batch.exp_avg_sqs, copies or nothing, batch.averages or nothing,
        batch.steps,
    )  # fmt: skip
    addresses = [None if tensor is None else tensor.data_ptr() for row in arrays for tensor in row]
    sizes = [weight.numel() for weight in batch.weights]
    numbers = (*hyper[:5], -1.0 if hyper.maximize else 1.0, average_part)
    with record_function("penstock::adamw"):
        kernels.penstock_adamw(
            c_int64(count), (c_int64 * count)(*sizes), (c_void_p * (7 * count))(*addresses),
            (c_int * count)(*(TYPES[gradient.dtype] for gradient in gradients)), address(grad_scale),
            address(found_inf), (c_double * len(numbers))(*numbers), threads_for(sum(sizes)),
        )  # fmt: skip
    if batch.copies and not copies:
        torch._foreach_copy_(batch.copies, batch.weights)


def _fused(batch: Batch, hyper: Hyper, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    torch._fused_adamw_(
        batch.weights, [gradient.float() for gradient in batch.gradients], batch.exp_avgs, batch.exp_avg_sqs, [],
        batch.steps, **hyper._asdict(), amsgrad=False, grad_scale=grad_scale, found_inf=found_inf,
    )  # fmt: skip
