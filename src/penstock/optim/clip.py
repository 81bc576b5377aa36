"""Clipping by the global norm, folded into the optimizer's own pass over the gradients if possible.

An optimizer's kernel divides gradients and skips a step through the interface of torch's GradScaler, with workarounds
for bugs in torch's kernels. Bugs are detected by trying, not by version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from penstock.dtypes import widened
from penstock.errors import ConfigError
from penstock.optim.tensors import local, parameters_of, sharing, whole_norm

Refuse = Callable[[Tensor | None], Tensor]
"""A function of the gradients' norm (None if a loss scaler judges it); returns 0-d fp32, 1 to skip the step."""


class Scaler(Protocol):
    """The interface of a loss scaler that a step needs; `penstock.precision.LossScaler` has it."""

    scale: Tensor

    def judge(self, norm: Tensor) -> Tensor:
        """1 if the norm of scaled gradients is not finite, the same on all ranks."""

    def update(self, found_inf: Tensor) -> None:
        """Adjust the scale by the overflow flag that `judge` returned."""


vector_norm: Callable[..., Tensor] = torch.linalg.vector_norm
_TINY = 1e-6  # as in torch.nn.utils.clip_grad_norm_
_ROW = 1024
_LARGE = 64 * _ROW


def grad_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all gradients taken as one vector: 0-d, fp32 (fp64 if they are), on their device, without waiting.
    For sharded gradients it is the norm of the whole gradients, on every rank; all ranks must call this."""
    if not gradients:
        return torch.zeros(())
    if any(sharing(gradient) is not None for gradient in gradients):
        return whole_norm(gradients, grad_norm)
    # A complex gradient has the norm of its real and imaginary parts.
    gradients = [torch.view_as_real(g.resolve_conj()) if g.is_complex() else g for g in gradients]
    if len(gradients) == 1:
        return _norm(gradients[0])
    first = gradients[0].device
    half = gradients[0].dtype in (torch.bfloat16, torch.float16)
    if (half and first.type == "cpu") or all(gradient.numel() >= _LARGE for gradient in gradients):
        norms = [_norm(gradient) for gradient in gradients]
    else:
        wide = any(gradient.dtype == torch.float64 for gradient in gradients)
        dtype = torch.float64 if wide else torch.float32
        norms = list(torch._foreach_norm(list(gradients), 2, dtype=dtype))
    return vector_norm(torch.stack([norm.to(first, non_blocking=True) for norm in norms]))


def _norm(gradient: Tensor) -> Tensor:
    """The 2-norm of one tensor, in fp32 (fp64 for fp64).

    On a CPU a single fp32 sum over 22 million elements is off by 1e-3, and asking for fp32 from bf16 first copies the
    whole tensor (35 ms against 1.5). Norms of rows, which accumulate in fp32 even for bf16, and then the norm of these
    are faster and accurate to 1e-5; half types round each row's norm to within 2^-9, which mostly averages out.
    """
    if gradient.device.type != "cpu" or gradient.numel() < _LARGE or not gradient.is_contiguous():
        return vector_norm(gradient, dtype=None if gradient.dtype == torch.float64 else torch.float32)
    flat = gradient.view(-1)
    whole = flat.numel() // _ROW * _ROW
    rows = widened(vector_norm(flat[:whole].view(-1, _ROW), dim=1))
    if whole == flat.numel():
        return vector_norm(rows)
    rest = vector_norm(flat[whole:], dtype=rows.dtype)
    return vector_norm(torch.cat([rows, rest.view(1)]))


def gradients_of(target: Optimizer | Iterable[Tensor]) -> list[Tensor]:
    """The gradients that a step would use; for a contiguous optimizer, its flat buffers."""
    if (flat := getattr(target, "flat_gradients", None)) is not None:
        return flat()  # type: ignore[no-any-return]
    if isinstance(target, Optimizer):
        target = parameters_of(target)
    elif isinstance(target, Tensor):
        target = [target]
    return [parameter.grad for parameter in target if parameter.grad is not None]


@torch.no_grad()
def clip_grad_norm_(target: Optimizer | Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale gradients in place so that their global 2-norm is at most `max_norm`; returns the norm before.

    With a contiguous optimizer it makes a single fused pass over each flat buffer; with parameters it works tensor by
    tensor. The result equals `torch.nn.utils.clip_grad_norm_` up to rounding. It stays on the device, and reading it
    waits. `clipped_step` saves the separate pass that divides.
    """
    return clip_gradients(gradients_of(target), max_norm)


def clip_gradients(gradients: Sequence[Tensor], max_norm: float, scale: Tensor | None = None) -> Tensor:
    """`clip_grad_norm_` for gradients, which the same pass also divides by a loss scale; returns the unscaled norm."""
    norm = grad_norm(gradients)
    norm = norm if scale is None else norm / scale.to(norm.device)
    divide_(gradients, clipping_divisor(norm, max_norm, scale))
    return norm


def clipping_divisor(norm: Tensor, max_norm: float, scale: Tensor | None = None) -> Tensor:
    """The divisor of gradients, 0-d: scale · max(1, (norm + 1e-6) / max_norm); `norm` is unscaled."""
    # The gaps of a flat buffer are never written again, so a norm that is not finite must not reach them.
    divisor = ((norm + _TINY) / max_norm).clamp(min=1.0).nan_to_num(nan=1.0, posinf=1.0)
    return divisor if scale is None else divisor * scale.to(norm.device, non_blocking=True)


def divide_(gradients: Sequence[Tensor], divisor: Tensor) -> None:
    """Divide gradients in place, as fused kernels do: for fp32 the results are bitwise the same."""
    if gradients:
        torch._foreach_div_([local(gradient) for gradient in gradients], divisor)


def can_refuse(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether `clipped_step` can skip a step without waiting for the device."""
    return folds(optimizer) or device.type == "cpu"


@torch.no_grad()
def clipped_step(
    optimizer: Optimizer, *, max_norm: float | None = None, scaler: Scaler | None = None,
    refuse: Refuse | None = None, whole: Callable[[Tensor], Tensor] | None = None,
    divisor: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """One optimizer step on clipped and unscaled gradients; returns their norm before clipping, or None if unused.

    Fused kernels divide each gradient by a tensor as part of the update: loss scale and clipping become that one
    divisor (see `clipping_divisor`), and cost no extra pass. Other forms divide first. With a scaler, an infinite or
    NaN gradient makes the norm infinite or NaN, the kernel skips the step, and the scale is lowered, all on the device.
    `refuse` may skip a step for other reasons; see `can_refuse`. `whole` computes the whole model's norm from the norm
    of this optimizer's gradients, if other ranks hold other parts. Gradients are also divided by `divisor`, 0-d, before
    their norm is used. Raises ConfigError for a scaler with an optimizer that cannot skip a step itself.
    """
    if scaler is not None and not folds(optimizer):
        raise ConfigError(
            "Loss scaling needs an optimizer that skips an overflowed step on the device, and "
            f"{type(optimizer).__name__} in this form cannot; use plan.optimizer=fused or contiguous, or dtype=bf16."
        )
    if max_norm is None and scaler is None and refuse is None and divisor is None:
        optimizer.step()
        return None
    gradients = gradients_of(optimizer)
    norm = grad_norm(gradients)
    norm = norm if whole is None else whole(norm)
    overflow = stops = None if scaler is None else scaler.judge(norm)
    if divisor is not None:
        divisor = divisor.to(norm.device, norm.dtype, non_blocking=True)
    if scaler is not None:
        norm = norm.float()
        scale = scaler.scale.to(norm.device, non_blocking=True)
        divisor = scale if divisor is None else scale * divisor.float()
    if divisor is not None:
        norm = norm / divisor
    if refuse is not None:
        refused = refuse(norm if overflow is None else None)
        stops = refused if overflow is None else torch.maximum(overflow, refused.to(overflow.device))
    if max_norm is not None:
        divisor = clipping_divisor(norm, max_norm, divisor)
        # In a kernel half gradients would be rounded once less, so that steps would differ between optimizers.
        if folds(optimizer) and any(gradient.dtype != torch.float32 for gradient in gradients):
            divide_(gradients, divisor)
            divisor = None
    guarded_update(optimizer, optimizer.step, divisor=divisor, stops=stops)
    if scaler is not None and overflow is not None:
        scaler.update(overflow)
    return norm


def guarded_update(
    optimizer: Optimizer, update: Callable[[], Any], *, divisor: Tensor | None = None,
    stops: Tensor | None = None,
) -> Any:  # fmt: skip
    """Run `update()`, the optimizer's step, with gradients divided by `divisor`, unless `stops` is 1; both are 0-d. A
    kernel that supports this does both on the device; for others the host reads `stops`, and divides first."""
    if folds(optimizer):
        with folded(optimizer, grad_scale=divisor, found_inf=stops):
            return update()
    if stops is not None and stops.item():
        return None
    if divisor is not None:
        divide_(gradients_of(optimizer), divisor)
    return update()


def overflow_of(norm: Tensor) -> Tensor:
    """1 if the norm of gradients is not finite, else 0: 0-d fp32."""
    return (~norm.isfinite()).float()


def unscale_(gradients: list[Tensor], scale: Tensor) -> Tensor | None:
    """Divide gradients in place; return whether any is not finite, on the first gradient's device."""
    if not gradients:
        return None
    overflows: dict[torch.device, Tensor] = {}
    kinds: dict[tuple[torch.device, torch.dtype, bool], list[Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault((gradient.device, gradient.dtype, gradient.is_sparse), []).append(gradient)
    for (device, _, sparse), alike in kinds.items():
        overflow = overflows.setdefault(device, torch.zeros((), dtype=torch.float32, device=device))
        inverse = scale.to(device, non_blocking=True).double().reciprocal().float()
        if not sparse:
            torch._amp_foreach_non_finite_check_and_unscale_(alike, overflow, inverse)
            continue
        for gradient in alike:
            overflow.add_(~gradient.coalesce().values().isfinite().all()).clamp_(max=1.0)
            gradient.mul_(inverse)
    merged = overflows.pop(first := gradients[0].device)
    for overflow in overflows.values():
        merged = torch.maximum(merged, overflow.to(first, non_blocking=True))
    return merged


def folds(optimizer: Optimizer) -> bool:
    """Whether the optimizer's kernel itself divides gradients by `grad_scale` and skips the step on `found_inf`."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and not spoils_momentum(optimizer)


@contextmanager
def folded(
    optimizer: Optimizer, *, grad_scale: Tensor | None = None, found_inf: Tensor | None = None
) -> Iterator[None]:
    """Within this context, a step divides gradients by `grad_scale`, and is skipped if `found_inf` is 1; both 0-d fp32.

    Both are set for one step as the attributes that torch's GradScaler sets on fused optimizers.
    """
    if found_inf is not None:
        begin_momentum(optimizer)
    attributes = {"grad_scale": grad_scale, "found_inf": found_inf}
    given = {name: value for name, value in attributes.items() if value is not None}
    for name, value in given.items():
        setattr(optimizer, name, value)
    try:
        yield
    finally:
        for name in given:
            delattr(optimizer, name)


def steps_by_sgd(optimizer: Optimizer) -> bool:
    """Whether the update is torch's SGD, in flat buffers or not."""
    return issubclass(getattr(optimizer, "_class", type(optimizer)), SGD)


def spoils_momentum(optimizer: Optimizer) -> bool:
    """Whether a skipped fused step would still change the momentum.

    On CUDA torch's fused SGD applies `found_inf` to the weights but not to the momentum buffer, which an overflow then
    fills with infinities (reported for torch 2.11; the CPU kernel is correct). With dampening the first step differs
    from all later ones, so that `begin_momentum` cannot prepare it.
    """
    return steps_by_sgd(optimizer) and any(
        parameter.is_cuda or (group.get("dampening") and not optimizer.state.get(parameter))
        for group in optimizer.param_groups
        if group.get("momentum")
        for parameter in group["params"]
    )


def begin_momentum(optimizer: Optimizer) -> None:
    """Create the momentum buffers that the next fused step would create, filled with zeros.

    torch's fused SGD creates a buffer with `empty_like` and lets its kernel fill it, which the kernel does not do in a
    skipped step: an overflow in the first step leaves uninitialised memory. Starting from zeros, the first step has the
    same result, except with dampening; see `spoils_momentum`.
    """
    for group in optimizer.param_groups if isinstance(optimizer, SGD) else ():
        if group["momentum"] and group["fused"] and not group["dampening"]:
            for parameter in group["params"]:
                if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.grad)


@cache
def fused_sgd_works(dtype: torch.dtype) -> bool:
    """Whether fused SGD on a CPU updates weights of this dtype.

    Up to torch 2.13 it leaves all but the last few elements of a half-precision tensor unchanged (pytorch issue
    191763).
    """
    weight = Parameter(torch.ones(256, dtype=dtype))
    weight.grad = torch.ones_like(weight)
    SGD([weight], lr=0.5, fused=True).step()
    return bool((weight == 0.5).all())


def loses_updates(optimizer: Optimizer) -> bool:
    """Whether a step of this optimizer would silently not update weights."""
    groups = (
        [group for group in optimizer.param_groups if group.get("fused")] if steps_by_sgd(optimizer) else []
    )
    types = {p.dtype for group in groups for p in group["params"] if p.device.type == "cpu"}
    return not all(map(fused_sgd_works, types & {torch.float16, torch.bfloat16}))
