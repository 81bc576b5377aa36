"""Modules that the ranks of a tensor parallel group compute together, made by `penstock.parallel.tensor`.

The class of a module is swapped for a subclass. Its parameters stay DTensors under the same names, and read as this
rank's parts inside the module's computation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from penstock.config.formats import StoredFormat
from penstock.dtypes import widened
from penstock.errors import ConfigError
from penstock.kernels.vocabulary import Share
from penstock.models.rounded import RoundedWeight
from penstock.models.wrap import swap
from penstock.optim.tensors import local, whole
from penstock.parallel import sequence
from penstock.parallel.dims import ParallelDims
from penstock.parallel.sequence import Line
from penstock.shards import FIRST, Cut, cut_like, cuts

M = TypeVar("M", bound=nn.Module)


def as_dtensor(tensor: Tensor, dim: int, pieces: int, mesh: Any) -> Tensor:
    """This rank's part of a tensor that every rank has whole, as a DTensor over `mesh`."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    placement: Any = Shard(dim) if pieces == 1 else _StridedShard(dim, split_factor=pieces)
    cut = Cut(0, dim, mesh.size(), mesh.get_local_rank(), pieces)
    part = cut.of(tensor).clone(memory_format=torch.contiguous_format)
    part = part if part.is_meta else part.to(mesh.device_type)
    return DTensor.from_local(
        part, mesh, [placement], run_check=False, shape=tensor.shape, stride=tensor.contiguous().stride()
    )


def cut_to_fit(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before loading, reduce whole tensors, which are the same on all ranks, to this rank's part."""
    for key, parameter in module._parameters.items():
        value: Any = state.get(prefix + key)
        sharded: Any = parameter
        if (
            not hasattr(sharded, "placements")
            or not isinstance(value, Tensor)
            or hasattr(value, "placements")
        ):
            continue
        if value.shape == sharded.shape:  # else torch reports the mismatch
            part = cut_like(sharded, value.to(local(sharded.detach()).device))
            state[prefix + key] = whole(sharded, part)


class OfRanks:
    """Base of all classes for modules that ranks compute together, each a part."""

    _parameters: dict[str, Any]
    penstock_line: Line
    forward: Callable[..., Any]

    def replaced_by(self, new: M) -> M:
        """Make `new`, which holds this rank's part of a split linear's weights in another form, sum or gather its
        outputs over ranks as this module does. If this module does neither, `new` is unchanged.
        """
        kinds: tuple[Any, ...] = (AddedUp, Gathered)
        for kind in kinds:
            if isinstance(self, kind):
                kept = ("penstock_line", "penstock_words")
                new.__dict__.update({name: self.__dict__[name] for name in kept if name in self.__dict__})
                swap(new, kind)
        if isinstance(self, AddedUp):
            new.__dict__["whole_rows"] = functools.partial(sequence.largest, line=self.penstock_line)
        return new


def rounded_parts(
    model: nn.Module, rounded: Mapping[str, tuple[StoredFormat, RoundedWeight]], dims: ParallelDims
) -> dict[str, tuple[StoredFormat, RoundedWeight]]:
    """This rank's parts of a model's weights in few bits, by linears' names. Raises ConfigError for any that cannot be
    split."""
    if dims.ep > 1 or (dims.tp > 1 and any(weight.numbers.ndim > 2 for _, weight in rounded.values())):
        raise ConfigError(
            "The folder has experts in few bits, which ranks cannot split; give weights=plain to compute with "
            "their values, or leave tp and ep out."
        )
    here, parts = dict(model.named_modules()), dict(rounded)
    if dims.pp > 1:  # this rank has no blocks of other stages
        parts = {name: weight for name, weight in parts.items() if name in here}
    if dims.tp > 1:
        for name in parts.keys() & here.keys():
            form, weight = parts[name]
            parts[name] = form, _rounded_part(here[name], weight, name)
    return parts


def _rounded_part(linear: nn.Module, weight: RoundedWeight, name: str) -> RoundedWeight:
    """This rank's part of the weight in few bits of the linear `name`; the whole weight if it is not split.

    Raises ConfigError if ranks would split inputs that share a scale.
    """
    held: Any = linear._parameters["weight"]
    if not hasattr(held, "placements"):
        return weight
    cut, groups = cuts(held)[0], weight.scales.shape[-1]
    by_inputs = cut.dim == weight.numbers.ndim - 1
    if by_inputs and groups > 1 and groups % cut.count:
        raise ConfigError(
            f"plan.tp={cut.count} would split inputs of {name} that share a scale; use a tp that divides its {groups} "
            "groups of inputs, or weights=plain."
        )

    def part(scales: Tensor | None) -> Tensor | None:
        return scales if scales is None or (by_inputs and groups == 1) else cut_like(held, scales)

    scales = part(weight.scales)
    assert scales is not None
    return RoundedWeight(cut_like(held, weight.numbers), scales, part(weight.offsets), weight.input_scale)


def _reader(name: str) -> Any:
    def read(self: Any) -> Any:
        parameter = self._parameters[name]
        if not hasattr(parameter, "placements"):
            spread = parameter is not None and name in self.penstock_spread
            return sequence.once_per_rank(parameter, self.penstock_line) if spread else parameter
        # While `fully_shard` shards it further, it is not used in computations.
        return parameter.to_local() if parameter.device_mesh.ndim == 1 and _split(parameter) else parameter

    return property(read)


def _split(parameter: Any) -> bool:
    """Whether a DTensor of one mesh dimension is sharded over tensor-parallel or expert-parallel ranks."""
    return parameter.device_mesh.mesh_dim_names in ((name,) for name in FIRST)


class SplitModule(OfRanks):
    """A module whose parameters read as this rank's parts."""

    penstock_spread: tuple[str, ...] = ()
    weight, bias = _reader("weight"), _reader("bias")


class AddedUp(OfRanks):
    """A linear whose outputs must be summed over ranks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        line = self.penstock_line
        out = super().forward(*args, **kwargs)
        return sequence.scatter(out, line) if line.sequence else sequence.reduce(out, line)


class SplitInputs(AddedUp, SplitModule):
    """A linear with some of the inputs on each rank."""


class SplitTable(SplitModule):
    """A table with some of the rows on each rank."""

    penstock_words: Share

    def forward(self, ids: Tensor) -> Tensor:
        here = ids - self.penstock_words.start
        elsewhere = (here < 0) | (here >= self._parameters["weight"].to_local().shape[0])
        vectors: Tensor = super().forward(here.masked_fill(elsewhere, 0))
        return sequence.reduce(vectors.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.penstock_line)


class Gathered(OfRanks):
    """An output over the vocabulary with some entries on each rank; it returns all logits, or the loss of targets."""

    penstock_words: Share

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(x, *args, **kwargs)
        made = out.dim() == x.dim()
        return sequence.columns(out, self.penstock_line, self.penstock_words.whole) if made else out


class SplitWords(Gathered, SplitModule):
    """An output over the vocabulary with some rows of its weight on each rank."""


class SplitNorm(OfRanks):
    """An RMS norm over the features of all heads, which ranks split. Each rank has the whole weight."""

    weight: nn.Parameter
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        line, own = self.penstock_line, x.shape[-1]
        wide = widened(x)
        squares = wide.square().sum(-1, keepdim=True)
        # Every rank's result depends on every rank's sum.
        squares = sequence.reduce(sequence.copy(squares, line), line)
        normed = wide * torch.rsqrt(squares / (own * line.count) + self.eps)
        return (normed * self.weight[line.index * own :][:own]).to(x.dtype)


class SumGradient(OfRanks):
    """A module with a first argument that all ranks need: the ranks' gradients of it are summed."""

    penstock_enters: Line

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        line, name = self.penstock_enters, "" if args else next(iter(kwargs))
        forward = super().forward

        def call(x: Tensor) -> Any:
            return forward(x, *args[1:], **kwargs) if args else forward(**{**kwargs, name: x})

        x = _in_product_type(args[0] if args else kwargs[name])
        return sequence.call_on_all(x, line, call) if line.sequence else call(sequence.copy(x, line))


def _in_product_type(x: Tensor) -> Tensor:
    """`x` in the type in which a linear will use it, so that ranks send no wider type."""
    if not torch.is_autocast_enabled(x.device.type):
        return x
    with torch.no_grad():
        dtype = nn.functional.linear(x.new_empty(0, 1), x.new_empty(1, 1)).dtype
    return x.to(dtype)
