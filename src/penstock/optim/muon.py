"""Muon: momentum with orthogonalised matrices (Jordan et al., 2024), scaled so that learning rates and weight decay of
AdamW carry over (Liu et al., "Muon is Scalable for LLM Training", 2025, equation 4); AdamW for all other parameters.

Its steps equal `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`, which supports neither stacked matrices of experts,
nor shards, nor skipping a step on the device, and is slow on a CPU without bf16 units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.cpu import this_cpu
from penstock.optim.tensors import adamw_step, local, loss_of, step_scalar
from penstock.shards import cuts, gather_to, scatter_from

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration: as steep at 0 as possible, so that five steps bring singular values to 0.7 to
1.2, roughly."""
ITERATIONS = 5
RMS = 0.2
"""Root mean square of AdamW's updates, to which updates of matrices are scaled."""
_TINY = 1e-7


def iterated_in(device: torch.device) -> torch.dtype:
    """The dtype of the iterations: bf16, as in torch's Muon, but fp32 on a CPU without bf16 units, where it is up to 16
    times as fast."""
    return torch.float32 if device.type == "cpu" and this_cpu().bf16 is False else torch.bfloat16


def orthogonalised(update: Tensor) -> Tensor:
    """Roughly the nearest orthogonal matrix to each matrix of (…, out, in), by Newton–Schulz iterations; the update is
    first rounded to bf16, and so is the result."""
    a, b, c = COEFFICIENTS
    x = update.bfloat16().to(iterated_in(update.device))
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    added = torch.addmm if x.ndim == 2 else torch.baddbmm
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=_TINY)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = added(x, added(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).bfloat16()


class Muon(torch.optim.AdamW):
    """Muon for groups whose `orthogonal` is true, with matrices (out, in) or stacks of matrices (E, out, in); AdamW,
    with `options`, for the other groups.

    If a matrix is sharded over ranks as a DTensor, each rank stores its part of the momentum. The ranks take turns in
    owning matrices: the owner gathers the update in bf16, orthogonalises it, and scatters it. All ranks must step
    together, with gradients for the same parameters.
    """

    def __init__(self, params: Iterable[Any], *, momentum: float = 0.95, **options: Any) -> None:
        super().__init__(params, **options)
        for group in self.param_groups:
            group.setdefault("orthogonal", False)
            group.setdefault("algorithm", "muon")
            if group["orthogonal"]:
                group.setdefault("momentum", momentum)

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # AdamW's expects a step counter in each state

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; returns the closure's loss."""
        loss = loss_of(closure)
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["orthogonal"]]
        try:
            adamw_step(self)
        finally:
            self.param_groups = groups
        with torch.no_grad():
            for group in groups:
                if group["orthogonal"]:
                    self._step_matrices(group)
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        for turn in _turns([p for p in group["params"] if p.grad is not None]):
            updates = [self._momentum(parameter, group["momentum"]) for parameter in turn]
            for parameter, direction in zip(turn, _orthogonalised(turn, updates)):
                rate = group["lr"] * RMS * math.sqrt(max(parameter.shape[-2:]))
                decay: float | Tensor = 1 - group["lr"] * group["weight_decay"]
                weight = local(parameter)
                stops = step_scalar(self, "found_inf", weight.device)
                if stops is not None:
                    decay = torch.where(stops > 0, 1.0, decay)
                    direction = direction * (stops == 0)
                weight.mul_(decay).add_(direction, alpha=-rate)

    def _momentum(self, parameter: Tensor, momentum: float) -> Tensor:
        """This rank's rows of the update to orthogonalise: the gradient moved towards its running mean, which is
        updated too unless the step is skipped."""
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)  # type: ignore[arg-type]
        gradient, mean = local(parameter.grad), local(state["momentum_buffer"])  # type: ignore[arg-type]
        scale, stops = (step_scalar(self, name, mean.device) for name in ("grad_scale", "found_inf"))
        gradient = gradient if scale is None else gradient / scale
        if stops is None:
            mean.lerp_(gradient, 1 - momentum)
        else:
            gradient = torch.where(stops > 0, 0.0, gradient)
            mean.lerp_(gradient, (1 - momentum) * (stops == 0).to(mean.dtype))
        return gradient.lerp(mean, momentum).bfloat16()


def _owners(parameter: Any) -> int:
    """Number of ranks that matrices of a parameter are sharded over; 0 if each rank has whole matrices."""
    if not hasattr(parameter, "placements"):
        return 0
    every = cuts(parameter)
    return math.prod(cut.count for cut in every) if any(cut.dim >= parameter.ndim - 2 for cut in every) else 0


def _turns(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield parameters one by one; those with sharded matrices in batches in which each rank owns one."""
    turn: list[Tensor] = []
    for parameter in parameters:
        if not (owners := _owners(parameter)):
            yield [parameter]
            continue
        turn.append(parameter)
        if len(turn) == owners:
            yield turn
            turn = []
    if turn:
        yield turn


def _orthogonalised(turn: Sequence[Tensor], updates: Sequence[Tensor]) -> list[Tensor]:
    """This rank's part of each orthogonalised update."""
    if not _owners(turn[0]):
        return [orthogonalised(update) if update.numel() else update for update in updates]
    wholes = [gather_to(*each, owner=owner) for owner, each in enumerate(zip(turn, updates))]
    results = [None if whole is None else orthogonalised(whole) for whole in wholes]
    return [scatter_from(*each, owner=owner) for owner, each in enumerate(zip(turn, results, updates))]
