"""Calibration: records the inputs of a model's linears on real data, and finds the limits of their rounding scales.

Shapes: T tokens without padding, K features, B samples, N tokens of a sample with padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.config.quantise import Limit
from penstock.errors import ConfigError, NumericError
from penstock.kernels.padding import is_real
from penstock.models.anatomy import anatomy_of, evaluating
from penstock.models.expert_linear import ExpertLinear
from penstock.models.experts import MixtureOfExperts
from penstock.models.inputs import Inputs, counts_of
from penstock.models.model import Model
from penstock.models.roles import Attention
from penstock.models.rounded import MOST

Batches = Iterable[tuple[Any, ...]]
"""Arguments of a model's forward pass, batch by batch."""
See = Callable[[str, Tensor], None]
"""A function that receives the name of a linear and its inputs (T, K)."""
BINS = 2048
PERCENTILE = 0.9999
"""Share of magnitudes that are below the limit `percentile`."""
_LEVELS = MOST + 1
_LEAST = 1e-12


class InputRecord:
    """Statistics of the inputs of one linear: a histogram of their magnitudes, and the largest one of each feature."""

    def __init__(self, features: int) -> None:
        self.largest = torch.zeros(features)
        """The largest magnitude of each feature, (K,)."""
        self.counts = torch.zeros(BINS, dtype=torch.float64)
        """Number of magnitudes in each of `BINS` equal bins from zero to `end`."""
        self.end = 0.0
        self.rows = 0

    def add(self, x: Tensor) -> None:
        """Count inputs (T, K). Raises NumericError if one is not finite."""
        if not len(x):
            return
        sizes = x.detach().abs().float()
        most = sizes.amax(0)
        top = float(most.max())
        if not math.isfinite(top):
            raise NumericError(
                "Inputs of a linear layer are not finite in calibration; check the weights and the data."
            )
        torch.maximum(self.largest, most.cpu(), out=self.largest)
        self._widen(top)
        self.counts += torch.histc(sizes.flatten(), BINS, 0.0, self.end).double().cpu()
        self.rows += len(x)

    def _widen(self, top: float) -> None:
        """Double the range of the bins until it includes a magnitude; pairs of bins are merged."""
        self.end = self.end or max(top, _LEAST)
        while top > self.end:
            pairs = self.counts.view(-1, 2).sum(1)
            self.counts = torch.cat([pairs, torch.zeros_like(pairs)])
            self.end *= 2

    def limit(self, how: Limit) -> float:
        """The magnitude that 127 represents; larger inputs are clipped to it."""
        top = float(self.largest.max())
        if how == "absmax" or top <= _LEAST:
            return max(top, _LEAST)
        if how == "percentile":
            shares = self.counts.cumsum(0) / self.counts.sum()
            return min(top, (int((shares < PERCENTILE).sum()) + 1) * self.end / BINS)
        ends = torch.linspace(0.1, 1.0, 91, dtype=torch.float64) * top
        losses = [(self._error if how == "mse" else self._divergence)(float(end)) for end in ends]
        return float(ends[min(range(len(losses)), key=losses.__getitem__)])

    def _error(self, end: float) -> float:
        """Sum of squared rounding errors with this end, with each magnitude approximated by the middle of its bin."""
        middles = (torch.arange(BINS, dtype=torch.float64) + 0.5) * self.end / BINS
        rounded = (middles * (MOST / end)).round().clamp(max=MOST) * (end / MOST)
        return float((self.counts * (middles - rounded).square()).sum())

    def _divergence(self, end: float) -> float:
        """Relative entropy between the magnitudes and their rounding to 128 levels up to this end (Migacz, "8-bit
        Inference with TensorRT", GTC 2017). The first bin, with the zeros, is left out."""
        used = max(_LEVELS, min(BINS, math.ceil(end / self.end * BINS)))
        counts = self.counts[1:used].clone()
        levels = torch.arange(1, used) * _LEVELS // used
        present = (counts > 0).double()
        sums = torch.zeros(_LEVELS, dtype=torch.float64).index_add_(0, levels, counts)
        many = torch.zeros(_LEVELS, dtype=torch.float64).index_add_(0, levels, present)
        spread = (sums / many.clamp(min=1))[levels] * present
        counts[-1] += self.counts[used:].sum()
        counts, spread = counts / counts.sum().clamp(min=1), spread / spread.sum().clamp(min=1)
        here = counts > 0
        return float((counts[here] * (counts[here] / spread[here].clamp(min=1e-9)).log()).sum())


def real_tokens(model: nn.Module, arguments: tuple[Any, ...]) -> dict[str, Tensor | None]:
    """Masks (B, N) of the tokens that are not padding in a batch, by run; None for a run without padding. In a run that
    generates, a sample ends with its last target, if the arguments have targets."""
    if not isinstance(model, Model):
        return {}
    given, masks = Inputs.of(model.graph, arguments), dict[str, Tensor | None]()
    for run in model.graph.runs:
        values = given.tensors[model.graph.input_of(run).name]
        counts = counts_of(model.graph, run, given, values.shape[1])
        masks[run.name] = None if counts is None else is_real(counts, values.shape[1])
    return masks


def _runs_of(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """The run whose tokens each linear reads, by name: its own, or for keys of cross attention the memory's."""
    if not isinstance(model, Model):
        return {}
    reads = {name: name.partition(".")[0] for name in names}
    for part in anatomy_of(model).parts(Attention):
        memories = model.graph.run(part.name.partition(".")[0]).memories
        if part.cross and len(memories) == 1:
            reads |= {linear.name: memories[0] for linear in part.projections[1:]}
    return reads


class Enough(Exception):
    """Ends a forward pass whose remaining part is not needed."""


class _InputRows:
    """Passes the inputs of linears, without padding, to `see`.

    An expert's inputs do not show which tokens they belong to. So the inputs of a mixture are set to zero at padding,
    which no other token depends on, and rows of zeros are left out.
    """

    def __init__(self, model: nn.Module, names: Iterable[str], see: See) -> None:
        self.see = see
        self.modules = {name: model.get_submodule(name) for name in names}
        self.mixtures = {
            name: module for name, module in model.named_modules() if isinstance(module, MixtureOfExperts)
        }
        self.reads = _runs_of(model, [*self.modules, *self.mixtures])
        self.masks: Mapping[str, Tensor | None] = {}
        self.visits: dict[str, Tensor] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record passes of the model inside the context."""
        visited = {f"{name}.up": module.up for name, module in self.mixtures.items()}
        hooks = [
            *((module, self._blank, name) for name, module in self.mixtures.items()),
            *((module, self._keep_visits, name) for name, module in visited.items()),
            *((module, self._rows, name) for name, module in self.modules.items()),
        ]
        with ExitStack() as stack:
            for module, hook, name in hooks:
                stack.enter_context(module.register_forward_pre_hook(partial(hook, name)))
            yield

    def _mask(self, name: str, x: Tensor) -> Tensor | None:
        mask = self.masks.get(self.reads.get(name, ""))
        return mask if mask is not None and x.shape[:2] == mask.shape else None

    def _blank(self, name: str, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        mask = self._mask(name, inputs[0])
        return inputs if mask is None else (inputs[0].masked_fill(~mask[..., None], 0.0), *inputs[1:])

    def _keep_visits(self, name: str, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.visits[name.removesuffix(".up")] = (inputs[0] != 0).any(1)

    def _rows(self, name: str, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        x, mask = inputs[0], self._mask(name, inputs[0])
        if isinstance(self.modules[name], ExpertLinear):
            mask = self.visits[name.rpartition(".")[0]]
        self.see(name, x.flatten(0, -2) if mask is None else x[mask])


@torch.no_grad()
def watch(
    model: nn.Module, batches: Batches, names: Iterable[str], see: See, *, last: nn.Module | None = None
) -> None:
    """Run a model in evaluation mode on batches, and pass the inputs of the named linears, without padding, to `see`.
    Each pass ends after the module `last`, if that is set.

    Raises ConfigError if there is no batch.
    """
    rows = _InputRows(model, names, see)

    def stop(*_: Any) -> None:
        raise Enough

    empty = True
    end: Any = nullcontext() if last is None else last.register_forward_hook(stop)
    with end, evaluating(model), rows.watched():
        for arguments in batches:
            empty = False
            rows.masks = real_tokens(model, arguments)
            with suppress(Enough):
                model(*arguments)
    if empty:
        raise ConfigError("There is no data to calibrate with; give at least one batch.")


def record(model: nn.Module, batches: Batches, names: Iterable[str]) -> dict[str, InputRecord]:
    """Statistics of the named linears' inputs, by name. Raises as `watch`, and NumericError for NaN and infinity."""
    records: dict[str, InputRecord] = {}
    for name in names:
        module = model.get_submodule(name)
        assert isinstance(module, nn.Linear | ExpertLinear)
        records[name] = InputRecord(module.in_features)
    watch(model, batches, records, lambda name, x: records[name].add(x))
    return records
