"""Lion: updates by the sign of a mean of gradients (Chen et al., "Symbolic Discovery of Optimization Algorithms",
NeurIPS 2023, algorithm 2). Its rate is three to ten times lower than AdamW's, its weight decay higher by the same
factor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from penstock.optim.tensors import local, loss_of


class Lion(Optimizer):
    """Lion with decoupled weight decay, tensor by tensor, or in chunks of tensors with `foreach`."""

    def __init__(
        self, params: Iterable[Any], *, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0, foreach: bool = False,
    ) -> None:  # fmt: skip
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "foreach": foreach}
        super().__init__(params, defaults | {"algorithm": "lion"})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; returns the closure's loss."""
        loss = loss_of(closure)
        for group in self.param_groups:
            every = [p for p in group["params"] if p.grad is not None]
            for p in every:
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
            chunks = [every] if group["foreach"] else [[p] for p in every]
            (beta1, beta2), rate = group["betas"], group["lr"]
            for chunk in filter(None, chunks):
                weights = [local(p) for p in chunk]
                gradients = [local(p.grad) for p in chunk]
                means = [local(self.state[p]["exp_avg"]) for p in chunk]
                signs = torch._foreach_lerp(means, gradients, 1 - beta1)
                torch._foreach_sign_(signs)
                torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])
                torch._foreach_add_(weights, signs, alpha=-rate)
                torch._foreach_lerp_(means, gradients, 1 - beta2)
        return loss
