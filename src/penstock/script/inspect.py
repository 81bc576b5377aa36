"""The gradients of a model: how large they are, which of them fp16 would lose layer by layer, and where an overflow
begins."""

from __future__ import annotations

import copy
import functools
import math
import operator
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.config.numerics import Numerics
from penstock.errors import ConfigError
from penstock.precision.copies import is_half
from penstock.precision.forward import apply_precision, precision_on, unwrap_forward, unwrapped
from penstock.precision.histogram import LARGEST, GradientHistogram, Histogram, Meter, power_of_two
from penstock.precision.lists import restore_modules
from penstock.precision.overflow import Overflow, OverflowTrace, tensors_of
from penstock.precision.session import device_of
from penstock.precision.settings import half_type, properties_of
from penstock.precision.stepping import gradients_beside
from penstock.precision.undisturbed import Loss, checked, default_loss, gradients, in_fp32, moved, undisturbed
from penstock.report.precision_figures import percent
from penstock.script.accelerate import accelerate

Kind = Literal["activations", "weights"]
Note = Callable[[str, Kind, Tensor], None]
"""Is called with each gradient and its layer."""
STARTING_SCALE = 2.0**16
"""Scale at which dynamic loss scaling begins."""
_MOST_LAYERS = 16
"""Lines of layers that are printed; `PrecisionReport.gradients` has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGradients:
    """The gradients of one layer's outputs, or of its weights, as fp16 would hold them. Shares are of all values."""

    layer: str
    kind: Kind
    values: int
    zero: float
    """Share that is zero in fp32 already."""
    lost: float
    """Share that is not zero, but would be in fp16 without a loss scale."""
    lost_scaled: float
    """The same at the loss scale that the report compares with."""
    infinite: float
    """Share that would be infinite, or is not a number, in fp16 without a loss scale."""
    infinite_scaled: float
    """The same at the report's loss scale."""
    largest: float
    """Largest finite magnitude, without loss scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionReport:
    """The result of `report`. `str()` is a table for reading, `to_dict()` holds everything."""

    precision: str
    """The level and its properties, in one line."""
    scale: float
    """The loss scale of the pass; 1 where the precision has none."""
    loss: float
    """Loss in the given precision."""
    loss_fp32: float
    """The same loss in fp32: from the same weights, batch and random numbers."""
    compared_scale: float
    """The loss scale that `lost_scaled` and `infinite_scaled` of the gradients speak of, a power of two: `scale`
    rounded down, or, where that is 1, the one that dynamic loss scaling starts at in fp16."""
    gradients: tuple[LayerGradients, ...]
    """Rows from the first layer of the model to the last; values as in fp32."""
    totals: tuple[LayerGradients, ...]
    """All layers as one, for each kind of gradients that there are."""
    overflow: Overflow | None
    """First place where the pass left the finite numbers; None where it did not."""

    @property
    def largest_scale(self) -> float | None:
        """The largest power of two that keeps all these gradients finite in fp16; None where all are zero."""
        most = max((layer.largest for layer in self.gradients), default=0.0)
        return power_of_two(LARGEST / most) if most else None

    def total(self, kind: Any) -> LayerGradients | None:
        """All gradients of a kind, `activations` or `weights`, as one."""
        return next((row for row in self.totals if row.kind == kind), None)

    def __str__(self) -> str:
        return _described(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {**asdict(self), "largest_scale": self.largest_scale}


def gradient_histogram(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    loss: Loss | None = None,
    between: Callable[[Any], None] | None = None,
) -> GradientHistogram:
    """Measure the gradients of a model on batches, in fp32, leaving weights, gradients, buffers and generators alone.

    `loss(model, batch)` returns a scalar; without it the model's own loss is taken, or the cross entropy of an (inputs,
    targets) pair. Accelerated models are measured as if they were not. `between(batch)` is called after each batch: a
    training step there lets the histogram cover training and not the first weights alone, as the paper's does.

    Raises:
        ConfigError: there is no batch, no loss, or nothing to train.
    """
    bare = unwrapped(model)
    meters: dict[Kind, Meter] = {"activations": Meter(), "weights": Meter()}
    count = 0
    for batch in batches:
        given = moved(batch, device_of([bare]))
        pass_in_fp32(bare, given, loss, lambda _, kind, gradient: meters[kind].add(gradient))
        count += 1
        if between is not None:
            between(batch)
    if not count:
        raise ConfigError("There is no batch to measure gradients on; give at least one.")
    return GradientHistogram(
        activations=meters["activations"].read(), weights=meters["weights"].read(), batches=count
    )


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
    """Run forward and backward passes of `model` on `batch`: which gradients fp16 would lose, and where it overflows.

    `loss(model, batch)` returns a scalar; without it the model's own loss is taken, or the cross entropy of an (inputs,
    targets) pair. An accelerated model is looked at as it is; `precision` and `dtype` are for others, by default O1.
    The loss scale is `scale`, or the present one of the accelerated `optimizer`, or the one that training starts with.

    Two passes are made: one in that precision, for the overflow, and one in fp32, whose gradients say what
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
    loss_of = loss or default_loss
    with torch.enable_grad():
        with _in_precision(bare, settled) as subject:
            trace = OverflowTrace([subject])
            with undisturbed(subject), trace:
                value = checked(loss_of(subject, batch))
                weight_gradients = gradients(subject, value.float() * passing if passing != 1.0 else value)
            overflow = trace.first(weight_gradients)
        meters: dict[tuple[str, Kind], Meter] = defaultdict(Meter)
        value_fp32 = pass_in_fp32(
            bare, batch, loss_of, lambda layer, kind, gradient: meters[layer, kind].add(gradient)
        )
    compared = power_of_two(passing) if passing != 1.0 else STARTING_SCALE
    places = {name or type(bare).__name__: place for place, (name, _) in enumerate(bare.named_modules())}
    order = sorted(meters, key=lambda key: (places[key[0]], key[1]))
    histograms = {key: meters[key].read() for key in order}
    rows = [layer_gradients(*key, histogram, compared) for key, histogram in histograms.items()]
    totals = []
    for kind in sorted({kind for _, kind in order}):
        whole = functools.reduce(operator.add, (h for (_, own), h in histograms.items() if own == kind))
        totals.append(layer_gradients("all layers", kind, whole, compared))
    return PrecisionReport(
        precision=settled.describe(), scale=passing, loss=value.item(), loss_fp32=value_fp32.item(),
        compared_scale=compared, gradients=tuple(rows), totals=tuple(totals), overflow=overflow,
    )  # fmt: skip


def _settled(model: nn.Module, precision: str | None, dtype: str | torch.dtype) -> Numerics:
    own = precision_on(model)
    half = _half_of(model)
    if own is None and half is not None:
        if precision not in ("O2", "O3"):
            raise ConfigError(
                f"This model has {str(half).removeprefix('torch.')} weights; say whether it computes as "
                'precision="O2", where the op lists decide, or as "O3", half throughout.'
            )
        dtype = half
    if own is not None and precision is None:
        return own
    level = "O1" if precision is None else precision
    wanted = properties_of(level, dtype=dtype, device=device_of([model]))
    if own is not None and wanted.level != own.level:
        raise ConfigError(
            f"This model is accelerated as {own.level}, but the report was asked for as {precision}; leave precision "
            f"out to see it as it is, or give a fresh model."
        )
    return own or wanted


def _half_of(model: nn.Module) -> torch.dtype | None:
    """The type of the first weight that is half."""
    return next((p.dtype for p in model.parameters() if is_half(p)), None)


def _scale(numerics: Numerics, optimizer: Optimizer | None, scale: float | None) -> float:
    if scale is not None:
        if not 0.0 < scale < float("inf"):
            raise ConfigError(f"scale is {scale}, but must be a finite number above 0.")
        return float(scale)
    if optimizer is not None:
        scalers = gradients_beside(optimizer).session.scalers
        return float(scalers[0].scale.item()) if scalers else 1.0
    return STARTING_SCALE if numerics.loss_scale == "dynamic" else float(numerics.loss_scale)


@contextmanager
def _in_precision(model: nn.Module, numerics: Numerics) -> Iterator[nn.Module]:
    """The model as it trains in a precision: itself, or, where its weights would have to change, a copy."""
    with ExitStack() as stack:
        if precision_on(model) is None and (half := half_type(numerics)) is not None:
            if numerics.weights != "fp32" and _half_of(model) is None:
                model = copy.deepcopy(model)
                accelerate(model, precision=numerics.level, dtype=half)
            else:
                stack.callback(restore_modules, model)
                stack.callback(unwrap_forward, model)
                apply_precision(model, numerics, device_of([model]))
        yield model


def pass_in_fp32(model: nn.Module, batch: Any, loss: Loss | None, note: Note) -> Tensor:
    """A forward and a backward pass without loss scale; returns the loss, and tells `note` of each gradient."""
    model = in_fp32(model)
    device = device_of([model])
    with undisturbed(model), torch.autocast(device.type, enabled=False), torch.enable_grad():
        with _watched(model, note):
            value = checked((loss or default_loss)(model, batch))
            weight_gradients = gradients(model, value)
        for name, gradient in weight_gradients:
            if gradient is not None:
                note(name.rpartition(".")[0] or type(model).__name__, "weights", gradient)
    return value.detach()


@contextmanager
def _watched(model: nn.Module, note: Note) -> Iterator[None]:
    """Inside, `note` is told each gradient of a layer's output that a backward pass computes.

    Layers are modules without children and those with parameters of their own; a tensor that passes through
    several (Identity, a container's result) counts once, for the first.
    """
    seen: dict[int, weakref.ref[Tensor]] = {}

    def hook(name: str) -> Any:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            for tensor in tensors_of(args):
                seen[id(tensor)] = weakref.ref(tensor)
            for tensor in tensors_of(output):
                before = seen.get(id(tensor))
                if tensor.requires_grad and not (before is not None and before() is tensor):
                    seen[id(tensor)] = weakref.ref(tensor)
                    tensor.register_hook(lambda g: note(name, "activations", g))  # type: ignore[no-untyped-call]

        return look

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            leaf = next(module.children(), None) is None
            if leaf or next(module.parameters(recurse=False), None) is not None:
                hooks.enter_context(module.register_forward_hook(hook(name or type(model).__name__)))
        yield


def layer_gradients(layer: str, kind: Kind, histogram: Histogram, scale: float) -> LayerGradients:
    """The row of a layer from its histogram, at a loss scale that is a power of two."""
    return LayerGradients(
        layer=layer, kind=kind, values=histogram.values, zero=histogram.zeros / max(histogram.values, 1),
        lost=histogram.lost(), lost_scaled=histogram.lost(scale),
        infinite=histogram.infinite(), infinite_scaled=histogram.infinite(scale), largest=histogram.largest,
    )  # fmt: skip


# -- as text


def _described(report: PrecisionReport) -> str:
    """Gradients by layer, and the overflow."""
    parts = [
        f"{report.precision}\nloss {report.loss:.6g} at loss scale {_scale_word(report.scale)}, "
        f"{report.loss_fp32:.6g} in fp32",
        _gradients(report),
        f"An overflow begins in {report.overflow}." if report.overflow else "No overflow.",
    ]
    return "\n\n".join(parts)


def _gradients(report: PrecisionReport) -> str:
    at = _scale_word(report.compared_scale)
    rows = [
        ["gradients of", "", "values", "zero", "lost at 1", f"at {at}", "inf at 1", f"at {at}", "largest"]
    ]
    troubled = _troubled(report)
    rows += map(_row, (*report.totals, *troubled[:_MOST_LAYERS]))
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
    worst = sorted(report.gradients, key=lambda row: (-row.infinite_scaled, -row.infinite, -row.lost))
    return [row for row in worst if row.lost or row.infinite or row.infinite_scaled]


def _row(row: LayerGradients) -> list[str]:
    shares = (row.zero, row.lost, row.lost_scaled, row.infinite, row.infinite_scaled)
    return [row.layer, row.kind, f"{row.values:,}", *map(percent, shares), f"{row.largest:.3g}"]


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
