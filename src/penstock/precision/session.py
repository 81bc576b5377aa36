"""The state that the models, optimizers and losses of one `accelerate` call share."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.config.numerics import Numerics
from penstock.errors import NumericError
from penstock.precision.master import MasterWeights
from penstock.precision.overflow import OverflowTrace
from penstock.precision.scaler import PATIENCE, Agree, LossScaler
from penstock.precision.settings import half_type

_LATE = 4
"""Steps."""


class Own(Protocol):
    """The gradients of one optimizer: see `penstock.precision.scaling`."""

    prepared: bool
    """Whether a loss was scaled since the last step."""

    def forget(self) -> None:
        """Forget gradients from before a state was loaded."""
        ...


class Session:
    """The state that the models, optimizers and losses of one `accelerate` call share."""

    def __init__(
        self, numerics: Numerics, models: list[nn.Module], optimizers: list[Optimizer], *, losses: int,
        scaler: Mapping[str, Any], agree: Agree | None,
    ) -> None:  # fmt: skip
        self.numerics = numerics
        self.models = models
        self.agree = agree
        self.masters: MasterWeights | None = None
        if numerics.masters == "copy":
            half = half_type(numerics)
            assert half is not None
            self.masters = MasterWeights(
                models,
                optimizers,
                half,
                norms=numerics.norms,
                lists=numerics.lists,
                autocast=numerics.by_lists,
            )
        device = device_of(models)
        self.scalers = [_scaler(numerics, device, scaler) for _ in range(losses)] if numerics.scales else []
        self._noted: dict[int, tuple[Tensor, bool]] = {}
        self._polls = [_Poll() for _ in self.scalers]
        self._search: _LayerSearch | None = None
        self.gradients: list[Own] = []
        """Gradients of each optimizer."""

    def note(self, scaler: LossScaler, found_inf: Tensor, *, stepped: bool = True) -> None:
        """Note that an optimizer has used gradients under this scaler, or discarded them (without `stepped`); the scale
        moves before the next backward pass.
        """
        before, earlier = self._noted.get(id(scaler), (None, False))
        found_inf = found_inf if before is None else torch.maximum(before, found_inf)
        self._noted[id(scaler)] = (found_inf, stepped or earlier)

    def start_again(self) -> None:
        """Forget noted overflows and gradients from before a state was loaded."""
        self._noted.clear()
        self._polls = [_Poll() for _ in self.scalers]
        if self._search is not None:
            self._search.trace.detach()
            self._search = None
        for own in self.gradients:
            own.forget()

    def move_scale(self, scaler: LossScaler) -> None:
        """Adapt the scale to the overflows noted since it last moved.

        Raises:
            NumericError: gradients have overflowed at the lowest scale for some steps.
        """
        noted = self._noted.pop(id(scaler), None)
        if noted is None:
            return
        found_inf, stepped = noted
        scaler.update(found_inf.to(scaler.scale.device, non_blocking=True), stepped=stepped)
        if self._search is None:
            lost = self._polls[self.scalers.index(scaler)].look(scaler.stuck)
            if lost is not None and lost >= PATIENCE:
                # The run is lost. The next whole step shows where; the current step's forward pass is already over.
                self._search = _LayerSearch(scaler, OverflowTrace(self.models).attach())
        elif self._search.scaler is scaler:
            self._search.turns += 1
            if self._search.turns == 2:
                self._end(self._search)

    def _end(self, search: _LayerSearch) -> None:
        self._search = None
        search.trace.detach()
        scaler = search.scaler
        if scaler.stuck.item() < PATIENCE:
            return
        first = search.trace.first(self._named_gradients())
        where = f"it begins in {first}" if first else "it begins on another rank"
        raise NumericError(
            f"The loss scale has fallen to {scaler.scale.item():g} and gradients still overflow in "
            f"{self.numerics.compute}; {where}. Use dtype='bf16', which has the range of fp32, keep that layer in "
            "fp32 (fp32_modules of the op lists), or lower the learning rate."
        )

    def _named_gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        for model in self.models:
            for name, parameter in model.named_parameters():
                weight = parameter if self.masters is None else self.masters.master_of(parameter)
                yield name, weight.grad

    def move_scales(self) -> None:
        """Adapt every scale; no scaled gradients may be in use."""
        for scaler in self.scalers:
            self.move_scale(scaler)


@dataclass(slots=True)
class _LayerSearch:
    """The search for the layer in which gradients overflow, in a lost run."""

    scaler: LossScaler
    trace: OverflowTrace
    turns: int = 0
    """Number of times that the scale has moved since the search began."""


class _Poll:
    """Reads a number from the device `_LATE` steps later, when it has arrived: the host does not wait. All ranks read
    the number of the same step, because they must act in the same step too.
    """

    def __init__(self) -> None:
        self._under_way: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def look(self, value: Tensor) -> float | None:
        if value.device.type != "cuda":
            return float(value)
        late = None
        if len(self._under_way) == _LATE:
            host, event = self._under_way.popleft()
            event.synchronize()
            late = float(host)
        else:
            host = torch.empty((), dtype=value.dtype, pin_memory=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        host.copy_(value, non_blocking=True)
        event.record()
        self._under_way.append((host, event))
        return late


def device_of(models: Sequence[nn.Module]) -> torch.device:
    """The device of the first parameter; the CPU without any."""
    for model in models:
        for parameter in model.parameters():
            return parameter.device
    return torch.device("cpu")


def _scaler(numerics: Numerics, device: torch.device, options: Mapping[str, Any]) -> LossScaler:
    if numerics.loss_scale == "dynamic":
        return LossScaler(device, **options)
    constant = float(numerics.loss_scale)
    return LossScaler(device, initial=constant, floor=constant, ceiling=constant, dynamic=False)
