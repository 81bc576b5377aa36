"""Rounds weights with less harm: GPTQ, and SmoothQuant below.

GPTQ rounds weights column by column, and changes the columns that are not yet rounded to compensate for each error
(Frantar et al., "GPTQ", ICLR 2023, Algorithm 1).

For a linear with weight W (N, K) and inputs X (T, K), the change of the outputs, ‖X Wᵀ − X Qᵀ‖², has the Hessian H = 2
Xᵀ X for each row. With U the upper Cholesky factor of H⁻¹, rounding column k leaves the error e = (w_k − q_k) / U_kk,
and columns j > k lose e · U_kj.

A model is rounded block by block: a block's Hessians use the outputs of the blocks before it, which are already
rounded. Each block takes one pass over the data that ends after it, so only one block's Hessians are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from penstock.compress.calibrate import Batches, InputRecord, watch
from penstock.config.formats import PRODUCTS, StoredFormat
from penstock.errors import ConfigError
from penstock.models.anatomy import anatomy_of
from penstock.models.model import Model
from penstock.models.roles import Attention, Experts, Norm, Perceptron
from penstock.models.rounded import RoundedWeight, nearest, round_groups, round_rows
from penstock.models.sublayers import ZeroCentredNorm

_COLUMNS = 128
"""Columns whose errors are applied together (B in the paper)."""
DAMPING = 0.01
"""Damping: this share of the mean of H's diagonal is added to the diagonal."""


@torch.no_grad()
def round_by_blocks(
    model: nn.Module, batches: Callable[[], Batches], formats: Mapping[str, StoredFormat]
) -> dict[str, RoundedWeight]:
    """Round the weights of the named linears, each in its format, except those that no sample reaches. The model then
    has the rounded values.

    Raises as `watch`.
    """
    rounded: dict[str, RoundedWeight] = {}
    for block in anatomy_of(model).blocks:
        names = [name for name in formats if name.startswith(f"{block}.")]
        hessians: dict[str, Tensor] = {}

        def add(name: str, x: Tensor, sums: dict[str, Tensor] = hessians) -> None:
            x = x.float()
            if name in sums:
                sums[name].addmm_(x.t(), x)
            else:
                sums[name] = x.t() @ x

        if names:
            watch(model, batches(), names, add, last=model.get_submodule(block))
        for name in filter(hessians.__contains__, names):
            linear = model.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            rounded[name] = gptq(linear.weight, hessians.pop(name), formats[name])
            linear.weight.copy_(rounded[name].values())
    return rounded


@torch.no_grad()
def gptq(weight: Tensor, hessian: Tensor, form: StoredFormat) -> RoundedWeight:
    """Round a weight (N, K) for inputs with the given Xᵀ X (K, K), which is overwritten."""
    weight = weight.detach().float().clone()
    upper = _inverse_factor(weight, hessian)
    group = PRODUCTS[form].group
    grids = [] if group else [round_rows(weight)]
    numbers = torch.empty_like(weight, dtype=torch.int8)
    for begin in range(0, weight.shape[1], _COLUMNS):
        end = min(begin + _COLUMNS, weight.shape[1])
        errors = torch.zeros(len(weight), end - begin)
        for column in range(begin, end):
            if group and column % group == 0:
                # A group's scale is computed from its weights as changed so far.
                grids.append(round_groups(weight[:, column : column + group]))
            values = weight[:, column : column + 1]
            rounded = nearest(values, grids[-1].scales, grids[-1].offsets)
            numbers[:, column] = rounded.numbers[:, 0]
            error = (values - rounded.values()) / upper[column, column]
            weight[:, column:end] -= error * upper[column, column:end]
            errors[:, column - begin] = error[:, 0]
        weight[:, end:] -= errors @ upper[begin:end, end:]
    scales = torch.cat([grid.scales for grid in grids], dim=1)
    offsets = [grid.offsets for grid in grids if grid.offsets is not None]
    return RoundedWeight(numbers, scales, torch.cat(offsets, dim=1) if offsets else None)


def _inverse_factor(weight: Tensor, hessian: Tensor) -> Tensor:
    """The upper Cholesky factor of the damped Hessian's inverse, in place. The weight's columns for inputs that were
    always zero become zero."""
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    diagonal[dead] = 1.0
    weight[:, dead] = 0.0
    diagonal += DAMPING * diagonal.mean()
    torch.linalg.cholesky(hessian, out=hessian)
    torch.cholesky_inverse(hessian, out=hessian)
    return torch.linalg.cholesky(hessian, upper=True, out=hessian)  # type: ignore[no-any-return]


# -- smoothing


_LEAST = 1e-5


def norm_readers(model: nn.Module) -> dict[str, list[str]]:
    """The norms of a model's blocks that can be smoothed, by name: norms with weights. For each, the names of all
    linears that read its output, including a router and experts: the next part's, in a parallel block all parts'.
    Raises ConfigError for a model that is not Penstock's: roles alone do not show whether norms come first."""
    if not isinstance(model, Model):
        raise ConfigError(
            f"Only Penstock's own models are smoothed, because a {type(model).__name__} does not say whether its norms "
            "come first; open its folder with penstock.from_pretrained, or set smooth to 0."
        )
    readers: dict[str, list[str]] = {}
    for block in (block for stack in anatomy_of(model).stacks for block in stack.blocks):
        if model.graph.run(block.name.partition(".")[0]).stack.placement not in ("before", "both"):
            continue
        names = list[str]()
        for part in block.parts:
            if isinstance(part, Norm):
                names = readers[part.name] = []
            elif isinstance(part, Attention):
                names += [linear.name for linear in part.readers]
            elif isinstance(part, Perceptron | Experts):
                names += _read_by(part)
    weighted = {norm for norm in readers if next(model.get_submodule(norm).parameters(), None) is not None}
    return {norm: names for norm, names in readers.items() if names and norm in weighted}


def _read_by(part: Perceptron | Experts) -> list[str]:
    """Names of the linears that read the part's input."""
    linears, shared = [part.up, part.gate], None
    if isinstance(part, Experts):
        linears, shared = [*linears, part.router], part.shared
    names = [linear.name for linear in linears if linear is not None]
    return names + (_read_by(shared) if shared else [])


@torch.no_grad()
def smooth(model: nn.Module, records: Mapping[str, InputRecord], strength: float) -> dict[str, float]:
    """Smooth every norm of a model, in place, using `records` of the inputs of the linears that read them; `strength`
    is α. Returns, by the norm's name, the factor by which the ratio of its largest to its median feature became
    smaller.

    Raises ConfigError as `norm_readers`.
    """
    gains = {}
    for norm, names in norm_readers(model).items():
        maxima = [records[name].largest for name in names if name in records]
        if not maxima:
            continue
        inputs = torch.stack(maxima).amax(0)
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
