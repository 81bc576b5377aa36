"""One training pass of a model, looked at: types, gradients that fp16 loses, and where an overflow begins."""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.errors import ConfigError
from penstock.precision.accelerate import accelerate
from penstock.precision.forward import apply_precision, precision_on, unwrap_forward, unwrapped
from penstock.precision.histogram import LARGEST, Meter, power_of_two
from penstock.precision.inspect.gradients import Kind, LayerGradients, layer_gradients, pass_in_fp32, together
from penstock.precision.inspect.operations import Operation, Recorder
from penstock.precision.inspect.table import describe
from penstock.precision.inspect.undisturbed import (
    Loss,
    checked,
    default_loss,
    gradients,
    moved,
    undisturbed,
)
from penstock.precision.lists import restore_modules
from penstock.precision.overflow import Overflow, OverflowTrace
from penstock.precision.session import device_of
from penstock.precision.settings import Precision, properties_of
from penstock.precision.state_hooks import is_half
from penstock.precision.stepping import gradients_beside

STARTING_SCALE = 2.0**16
"""Where dynamic loss scaling begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionReport:
    """What `report` found. `str()` is a table for reading, `to_dict()` and `to_json()` hold everything."""

    precision: str
    """The level and its properties, in one line."""
    scale: float
    """The loss scale of the pass; 1 where the precision has none."""
    loss: float
    """In the given precision."""
    loss_fp32: float
    """The same loss in fp32: from the same weights, batch and random numbers."""
    operations: tuple[Operation, ...]
    """In the order in which they first ran."""
    compared_scale: float
    """The loss scale that `lost_scaled` and `infinite_scaled` of the gradients speak of, a power of two: `scale`
    rounded down, or, where that is 1, the one that dynamic loss scaling starts at in fp16."""
    gradients: tuple[LayerGradients, ...]
    """From the first layer of the model to the last; values as in fp32."""
    overflow: Overflow | None
    """Where the pass first left the finite numbers; None where it did not."""

    @property
    def largest_scale(self) -> float | None:
        """The largest power of two that keeps all these gradients finite in fp16; None where all are zero."""
        most = max((layer.largest for layer in self.gradients), default=0.0)
        return power_of_two(LARGEST / most) if most else None

    def total(self, kind: Any) -> LayerGradients | None:
        """All gradients of a kind, `activations` or `weights`, as one."""
        return together(self.gradients, kind)

    def __str__(self) -> str:
        return describe(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {**asdict(self), "largest_scale": self.largest_scale}

    def to_json(self) -> str:
        """Everything, as text."""
        return json.dumps(self.to_dict(), indent=1)


def report(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    precision: str | None = None,
    dtype: str | torch.dtype = "auto",
    optimizer: Optimizer | None = None,
    scale: float | None = None,
) -> PrecisionReport:
    """Run forward and backward passes of `model` on `batch` and say what happened in which precision.

    `loss(model, batch)` returns a scalar; without it the model's own loss is taken, or the cross entropy of an (inputs,
    targets) pair. An accelerated model is looked at as it is; `precision` and `dtype` are for others, by default O1.
    The loss scale is `scale`, or the present one of the accelerated `optimizer`, or the one that training starts with.

    Two passes are made: one in that precision, for operators and overflow, and one in fp32, whose gradients say what
    fp16 loses. The model's mode is left as it is; weights, gradients, buffers and random generators are the same
    afterwards, compiled parts run eagerly, and nothing is sent to other ranks. Sharded models are not supported.

    Raises:
        ConfigError: there is no loss, nothing to train, or a precision that contradicts the model's own.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"report was given a {type(model).__name__} as model; give it one torch.nn.Module, and report on several "
            "models one by one."
        )
    bare = unwrapped(model)
    settled = _settled(bare, precision, dtype)
    passing = _scale(settled, optimizer, scale)
    batch = moved(batch, device_of([bare]))
    wanted = loss or default_loss
    with torch.enable_grad():
        with _in_precision(bare, settled) as subject:
            recorder, value, overflow = _recorded(subject, batch, wanted, passing)
        meters: dict[tuple[str, Kind], Meter] = defaultdict(Meter)
        value_fp32 = pass_in_fp32(
            bare, batch, wanted, lambda layer, kind, gradient: meters[layer, kind].add(gradient)
        )
    compared = power_of_two(passing) if passing != 1.0 else STARTING_SCALE
    places = {name or type(bare).__name__: place for place, (name, _) in enumerate(bare.named_modules())}
    found = [
        layer_gradients(layer, kind, meters[layer, kind].read(), compared)
        for layer, kind in sorted(meters, key=lambda key: (places[key[0]], key[1]))
    ]
    return PrecisionReport(
        precision=settled.describe(), scale=passing, loss=value.item(), loss_fp32=value_fp32.item(),
        operations=recorder.operations(), compared_scale=compared, gradients=tuple(found), overflow=overflow,
    )  # fmt: skip


def _settled(model: nn.Module, precision: str | None, dtype: str | torch.dtype) -> Precision:
    own: Precision | None = precision_on(model)
    half = _half_of(model)
    if own is None and half is not None:
        if precision not in ("O2", "O3"):
            raise ConfigError(
                f"This model has {str(half).removeprefix('torch.')} weights; say whether it computes as "
                'precision="O2", where the op lists decide, or as "O3", half throughout.'
            )
        dtype = half
    if own is None:
        return properties_of("O1" if precision is None else precision, dtype=dtype, device=device_of([model]))
    if (
        precision is not None
        and properties_of(precision, dtype=dtype, device=device_of([model])).level != own.level
    ):
        raise ConfigError(
            f"This model is accelerated as {own.level}, but the report was asked for as {precision}; leave precision "
            f"out to see it as it is, or give a fresh model."
        )
    return own


def _half_of(model: nn.Module) -> torch.dtype | None:
    """The type of the first weight that is half."""
    return next((p.dtype for p in model.parameters() if is_half(p)), None)


def _scale(precision: Precision, optimizer: Optimizer | None, scale: float | None) -> float:
    if scale is not None:
        if not 0.0 < scale < float("inf"):
            raise ConfigError(f"scale is {scale}, but must be a finite number above 0.")
        return float(scale)
    if optimizer is not None:
        scalers = gradients_beside(optimizer).session.scalers
        return float(scalers[0].scale.item()) if scalers else 1.0
    return STARTING_SCALE if precision.loss_scale == "dynamic" else float(precision.loss_scale)


@contextmanager
def _in_precision(model: nn.Module, precision: Precision) -> Iterator[nn.Module]:
    """The model as it trains in a precision: itself, or, where its weights would have to change, a copy."""
    with ExitStack() as stack:
        if precision_on(model) is None and precision.dtype is not None:
            if precision.weights == "half" and _half_of(model) is None:
                model = copy.deepcopy(model)
                accelerate(model, precision=precision.level, dtype=precision.dtype)
            else:
                stack.callback(restore_modules, model)
                stack.callback(unwrap_forward, model)
                apply_precision(model, precision, device_of([model]))
        yield model


def _recorded(
    model: nn.Module, batch: Any, loss: Loss, scale: float
) -> tuple[Recorder, Tensor, Overflow | None]:
    """A pass in the model's own precision, under a loss scale."""
    recorder = Recorder()
    trace = OverflowTrace([model])
    with undisturbed(model), trace, recorder.attributing(model), recorder:
        value = checked(loss(model, batch))
        scaled = value.float() * scale if scale != 1.0 else value
        recorder.turn_back(scaled)
        found = gradients(model, scaled)
    return recorder, value.detach(), trace.first(found)
