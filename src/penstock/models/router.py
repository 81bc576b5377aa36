"""A router's logits, and the record of chosen experts that a recomputation repeats."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.config.layer import ExpertMixture
from penstock.dtypes import widened


class Router(nn.Linear):
    """The logits of tokens over experts, in fp32 under every precision (fp64 stays)."""

    def __init__(self, width: int, mixture: ExpertMixture, **where: Any) -> None:
        super().__init__(width, mixture.experts, bias=mixture.router_bias, **where)
        self.jitter = mixture.router_jitter

    def forward(self, x: Tensor) -> Tensor:
        """x (T, D) to logits (T, E)."""
        x = widened(x)
        if self.training and self.jitter:
            x = x * torch.empty_like(x).uniform_(1.0 - self.jitter, 1.0 + self.jitter)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, widened(self.weight), None if self.bias is None else widened(self.bias))


class _Choices(threading.local):
    """Choices of experts, and values derived from them, that a recomputation repeats."""

    def __init__(self) -> None:
        self.recorded: list[Tensor] | None = None
        self.replayed: Iterator[Tensor] | None = None


_choices = _Choices()


def same_choices() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a forward pass and of its recomputation, for torch's checkpoint function: tokens visit the same
    experts again, even if sums round differently, and are not counted twice."""
    kept: list[Tensor] = []

    @contextmanager
    def recording() -> Iterator[None]:
        before, _choices.recorded = _choices.recorded, kept
        try:
            yield
        finally:
            _choices.recorded = before

    @contextmanager
    def replaying() -> Iterator[None]:
        before, _choices.replayed = _choices.replayed, iter(kept)
        try:
            yield
        finally:
            _choices.replayed = before

    return recording(), replaying()


def recomputing() -> bool:
    """Whether a recomputation is running, which repeats choices."""
    return _choices.replayed is not None


def repeated(choose: Callable[[], Tensor]) -> Tensor:
    """The result of `choose`; in a recomputation, the recorded result."""
    if _choices.replayed is not None:
        return next(_choices.replayed)
    chosen = choose()
    if _choices.recorded is not None:
        _choices.recorded.append(chosen)
    return chosen
