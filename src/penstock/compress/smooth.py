"""Smoothing: outliers of activations are moved into weights, which bear them better (Xiao et al., "SmoothQuant", ICML
2023).

    s_j = max|X_j|^α / max|W_j|^(1 − α)                                             (equation 4)

Feature j of a norm's gain and shift is divided by s_j, and column j of every linear that reads the norm is multiplied
by it: outputs stay what they are, but for rounding. A norm whose output the residual stream takes too, as where norms
come last, is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from penstock.compress.calibrate import InputRecord
from penstock.config.graph import Run
from penstock.errors import ConfigError
from penstock.models.anatomy import Block, anatomy_of
from penstock.models.block import ZeroCentredNorm
from penstock.models.model import Model
from penstock.models.roles import Attention, Experts, Norm, Perceptron

_LEAST = 1e-5


class NormReaders(NamedTuple):
    """A norm whose output linears alone read."""

    norm: str
    linears: tuple[str, ...]
    """Their names, a router and experts among them."""


def norm_readers(model: nn.Module) -> tuple[NormReaders, ...]:
    """The norms of a model's blocks that can be smoothed, by role: those with weights. Raises ConfigError for a model
    that is not ours: roles alone do not say whether norms come first."""
    if not isinstance(model, Model):
        raise ConfigError(
            f"Only Penstock's own models are smoothed, because a {type(model).__name__} does not say whether its norms "
            "come first; open its folder with penstock.from_pretrained, or set smooth to 0."
        )
    runs = {run.name: run for run in model.graph.runs}
    readers: list[NormReaders] = []
    for block in (block for stack in anatomy_of(model).stacks for block in stack.blocks):
        readers += _of_block(block, runs[block.name.partition(".")[0]])
    return tuple(r for r in readers if next(model.get_submodule(r.norm).parameters(), None) is not None)


def _of_block(block: Block, run: Run) -> Iterator[NormReaders]:
    """The norms of a block: each feeds the part behind it, or of a parallel block every part."""
    if not run.stack.norm_first:
        return
    norm, names = "", list[str]()
    for part in block.parts:
        if isinstance(part, Norm):
            if norm and names:
                yield NormReaders(norm, tuple(names))
            norm, names = part.name, []
        elif isinstance(part, Attention):
            names += [linear.name for linear in part.projections[: 1 if part.cross else None]]
        elif isinstance(part, Perceptron):
            names += _read_by(part)
        elif isinstance(part, Experts):
            shared = _read_by(part.shared) if part.shared else []
            names += [*_read_by(part), *([part.router.name] if part.router else []), *shared]
    if norm and names:
        yield NormReaders(norm, tuple(names))


def _read_by(part: Perceptron | Experts) -> list[str]:
    """Names of the linears that read the same input as the part."""
    return [linear.name for linear in (part.up, part.gate) if linear is not None]


@torch.no_grad()
def smooth(model: nn.Module, records: Mapping[str, InputRecord], strength: float) -> dict[str, float]:
    """Smooth every norm of a model, in place, by `records` of the inputs of the linears that read them; `strength` is
    α. Returns by the norm's name how much smaller the ratio of its largest feature to its median one became.

    Raises ConfigError as `norm_readers`.
    """
    gains = {}
    for norm, names in norm_readers(model):
        known = [records[name].largest for name in names if name in records]
        if not known:
            continue
        inputs = torch.stack(known).amax(0)
        weights: list[Tensor] = [cast(Any, model.get_submodule(name)).weight for name in names]
        columns = torch.stack([weight.abs().flatten(0, -2).amax(0) for weight in weights]).amax(0)
        scale = inputs.to(columns).clamp(min=_LEAST) ** strength / columns.clamp(min=_LEAST) ** (1 - strength)
        scale = torch.where(inputs.to(columns) > 0, scale, torch.ones_like(scale)).clamp(min=_LEAST)
        module = model.get_submodule(norm)
        offset = 1.0 if isinstance(module, ZeroCentredNorm) else 0.0
        for parameter in module.parameters(recurse=False):
            parameter.add_(offset).div_(scale).sub_(offset)
        for weight in weights:
            weight *= scale
        for name in names:
            if name in records:
                records[name].largest /= scale.cpu()
        gains[norm] = _spread(inputs) / _spread(inputs / scale.cpu())
    return gains


def _spread(largest: Tensor) -> float:
    return float(largest.max() / largest.median().clamp(min=_LEAST))
