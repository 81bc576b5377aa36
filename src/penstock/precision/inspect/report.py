"""One training pass of a model, looked at: types, gradients that fp16 loses, and where an overflow begins."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
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
from penstock.report.figures import Stack, stacked_bars
from penstock.report.page import Cell, Section, Tile, page
from penstock.report.precision_figures import percent

STARTING_SCALE = 2.0**16
"""Where dynamic loss scaling begins."""
_MOST_LAYERS = 16
"""Lines of layers that are printed; `PrecisionReport.gradients` has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionReport:
    """What `report` found. `str()` is a table for reading, `to_dict()` holds everything."""

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
        return _described(self)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return _cell(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {**asdict(self), "largest_scale": self.largest_scale}


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


# -- as text


def _described(report: PrecisionReport) -> str:
    """Operators by type, gradients by layer, and the overflow."""
    parts = [
        f"{report.precision}\nloss {report.loss:.6g} at loss scale {_scale_word(report.scale)}, "
        f"{report.loss_fp32:.6g} in fp32",
        _aligned(_operations(report), left=(0, 1, 4)),
        _gradients(report),
        f"An overflow begins in {report.overflow}." if report.overflow else "No overflow.",
    ]
    return "\n\n".join(parts)


def _operations(report: PrecisionReport) -> list[list[str]]:
    """A row for each operator and type, below the heads of their columns."""
    merged: dict[tuple[str, str], tuple[int, int, set[str]]] = {}
    for one in report.operations:
        forward, backward, layers = merged.get((one.name, one.dtype), (0, 0, set()))
        layers.add(one.layer)
        merged[(one.name, one.dtype)] = forward + one.forward, backward + one.backward, layers
    rows = [["operator", "type", "forward", "backward", "layers"]]
    for (name, dtype), (forward, backward, layers) in sorted(merged.items()):
        names = sorted(layer or "the loss" for layer in layers)
        where = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        rows.append([name, dtype, str(forward or ""), str(backward or ""), where])
    return rows


def _gradients(report: PrecisionReport) -> str:
    at = _scale_word(report.compared_scale)
    rows = [
        ["gradients of", "", "values", "zero", "lost at 1", f"at {at}", "inf at 1", f"at {at}", "largest"]
    ]
    totals = [report.total(kind) for kind in ("activations", "weights")]
    rows += [_row(total) for total in totals if total]
    troubled = _troubled(report)
    rows += [_row(one) for one in troubled[:_MOST_LAYERS]]
    text = (
        "What fp16 would make of the gradients of the pass in fp32: lost is what becomes zero, inf what becomes "
        "infinite, at loss scale 1 and another.\n\n" + _aligned(rows, left=(0, 1))
    )
    hidden = len(troubled) - _MOST_LAYERS
    if hidden > 0:
        text += f"\n… and {hidden} more layers that lose some"
    if report.largest_scale is not None:
        text += f"\nAll stay finite up to a loss scale of {_scale_word(report.largest_scale)}."
    return text


def _troubled(report: PrecisionReport) -> list[LayerGradients]:
    """Layers of which fp16 would lose some gradients, the worst first."""
    worst = sorted(report.gradients, key=lambda one: (-one.infinite_scaled, -one.infinite, -one.lost))
    return [one for one in worst if one.lost or one.infinite or one.infinite_scaled]


def _cell(report: PrecisionReport) -> str:
    """For a cell of a notebook: losses, what fp16 makes of the gradients, and the operators."""
    at = _scale_word(report.compared_scale)
    tiles = [
        Tile(value=f"{report.loss:.6g}", words=f"loss, {report.loss_fp32:.6g} in fp32", lead=True),
        Tile(value=str(report.overflow or "none"), words="where an overflow begins"),
    ]
    if report.largest_scale is not None:
        tiles.append(
            Tile(value=_scale_word(report.largest_scale), words="largest loss scale without an overflow")
        )
    totals = [total for kind in ("activations", "weights") if (total := report.total(kind))]
    stacks = [
        Stack(label=f"{one.layer} {one.kind}", parts=_fate(one))
        for one in (*totals, *_troubled(report)[:_MOST_LAYERS])
    ]
    sections = []
    if stacks:
        title = f"Gradients in fp16 at loss scale {at}"
        drawn = partial(stacked_bars, stacks, title=title, unit="% of all values")
        sections.append(
            Section(title=title, text="All together, then layers that lose some.", figures=[drawn])
        )
    heads, *rows = _operations(report)
    columns = [Cell(head, words=head not in ("forward", "backward")) for head in heads]
    cells = [
        ("", [Cell(v, words=column.words) for v, column in zip(row, columns, strict=True)]) for row in rows
    ]
    sections.append(Section(title="Operators", columns=columns, rows=cells))
    return page("Precision", report.precision, tiles, sections, whole=False)


def _fate(one: LayerGradients) -> dict[str, float]:
    """What fp16 makes of a layer's gradients under the report's loss scale, in per cent."""
    bad = {"lost": one.lost_scaled, "zero in fp32 too": one.zero, "infinite": one.infinite_scaled}
    return {name: 100 * share for name, share in ({"held": 1 - sum(bad.values())} | bad).items()}


def _row(one: LayerGradients) -> list[str]:
    shares = (one.zero, one.lost, one.lost_scaled, one.infinite, one.infinite_scaled)
    return [one.layer, one.kind, f"{one.values:,}", *map(percent, shares), f"{one.largest:.3g}"]


def _scale_word(scale: float) -> str:
    """`2^16`, or the plain number where it is no power of two, or a small one."""
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 and not 0 <= exponent - 1 < 4 else f"{scale:g}"


def _aligned(rows: Sequence[Sequence[str]], *, left: Sequence[int]) -> str:
    """Columns two blanks apart, numbers flush right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    )
