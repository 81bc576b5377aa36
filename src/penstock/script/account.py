"""Reports the changes that were made to a script, each in a line that is printed once."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.config.numerics import Numerics
from penstock.dtypes import HALVES
from penstock.optim.tensors import parameters_of
from penstock.precision.settings import auto_dtype
from penstock.script.backward import nodes_behind

_PRODUCTS = re.compile(
    r"(Mm|Addmm|Bmm|Baddbmm|Addbmm|Mv|Addmv|Dot|GroupedMm|\w*Linear|Convolution\w*|ScaledDotProduct\w*|MkldnnRnn\w*"
    r"|CudnnRnn\w*|ThnnFused\w*)Backward\d*"
)
_COMPILED = "CompiledFunctionBackward"


@dataclass(slots=True)
class Seen:
    """Counts matrix products and compiled graphs in the graphs of backward passes, by their narrowest type."""

    products: Counter[torch.dtype] = field(default_factory=Counter)
    compiled: Counter[torch.dtype] = field(default_factory=Counter)

    def add(self, root: Any) -> set[int]:
        """Count the graph of a backward pass from its root; returns the ids of the tensors that get a gradient."""
        leaves = set()
        for node in nodes_behind([root.grad_fn if isinstance(root, Tensor) else root.node]):
            name = node.name()
            dtypes = [output.dtype for output in node._input_metadata]
            if (leaf := getattr(node, "variable", None)) is not None:
                leaves.add(id(leaf))
            elif name == _COMPILED:
                with contextlib.suppress(RuntimeError):  # they are freed, and torch will report that
                    dtypes += [tensor.dtype for tensor in node.saved_tensors if tensor is not None]
                self.compiled[_narrowest(dtypes)] += 1
            elif _PRODUCTS.fullmatch(name):
                self.products[_narrowest(dtypes)] += 1
        return leaves

    @property
    def all_wide(self) -> bool:
        """Whether everything counted was in fp32 or wider."""
        everything = {*self.products, *self.compiled}
        return bool(everything) and everything.isdisjoint(HALVES)

    def words(self) -> str:
        """Counts in words, such as "12 of 13 matrix products in bf16"; empty without counts."""
        parts = []
        for counts, noun in ((self.products, "matrix product"), (self.compiled, "compiled graph")):
            total = counts.total()
            nouns = f"{total:,} {noun}{'s' * (total > 1)}"
            half = [
                f"{counts[dtype]:,} of {nouns} in {name}" for dtype, name in HALVES.items() if counts[dtype]
            ]
            parts += half or [f"{nouns} in fp32"] * bool(total)
        return " and ".join(parts)


def _narrowest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    floats = [dtype for dtype in dtypes if dtype.is_floating_point]
    return min(floats, key=lambda dtype: dtype.itemsize, default=torch.float32)


Say = Callable[[str], None]


@dataclass(slots=True, eq=False)
class _Claim:
    """Models that were accelerated, until a backward pass has shown in which types they compute."""

    words: str
    models: Sequence[nn.Module]
    optimizers: Sequence[Optimizer]
    level: str
    plain_products: bool
    reaching: Seen = field(default_factory=Seen)
    """Counts of the backward passes that give weights of the models a gradient."""
    all_passes: Seen = field(default_factory=Seen)


class Account:
    """Collects changes and reports them with `say`, on the first rank, after the next optimizer step. `applied` is
    called when something was applied.
    """

    def __init__(self, dtype: str, say: Say, applied: Callable[[], None] = lambda: None) -> None:
        self._dtype = dtype
        self._say = say
        self._note_applied = applied
        self._header: str | None = None
        self._lines: list[str] = []
        self._reported: dict[str, None] = {}
        self._claims: list[_Claim] = []
        self._applied = False

    def accelerated(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], numerics: Numerics
    ) -> None:
        """Record that models and the optimizers that train them now run in mixed precision."""
        if self._header is None and not self._claims:
            self._header = numerics.describe()
            device = next((p.device for model in models for p in model.parameters()), None)
            if self._dtype == "auto" and device is not None and numerics.half:
                self._header += f"; {numerics.compute} because {auto_dtype(device)[1]}"
        names = ", ".join(f"{type(model).__name__} ({_weights([model])} weights)" for model in models)
        words, plain = f"{names}, trained by {_names(optimizers)}", numerics.products == "plain"
        self._claims.append(_Claim(words, models, optimizers, numerics.level, plain))

    def backward(self, roots: Iterable[Any]) -> None:
        """Count the types in the graph of a backward pass that begins, nested passes included."""
        if not self._claims:
            return
        seen = Seen()
        leaves = set().union(*(seen.add(root) for root in roots))
        for claim in self._claims:
            owned = {id(p) for model in claim.models for p in model.parameters()}
            for record in (claim.all_passes, *([] if owned.isdisjoint(leaves) else [claim.reaching])):
                record.products += seen.products
                record.compiled += seen.compiled

    def stepped(self, optimizer: Optimizer | None = None) -> None:
        """After a step of an optimizer, or at the end of all, report the types counted for their models."""
        for claim in [c for c in self._claims if optimizer is None or optimizer in c.optimizers]:
            self._claims.remove(claim)
            seen = claim.reaching if claim.reaching.words() else claim.all_passes
            words = seen.words()
            if seen.all_wide and claim.plain_products:
                self.left(claim.words, f"{claim.level} was applied, but all that was seen of it are {words}")
                continue
            self._line(f"accelerated {claim.words}: {words or 'in which type it computes could not be seen'}")
            self._apply()

    def _apply(self) -> None:
        self._applied = True
        self._note_applied()

    def switched(self, model: nn.Module, optimizers: Sequence[Optimizer], settings: Sequence[str]) -> None:
        """Record settings of a Plan, besides its precision, that now hold for a model and its optimizers."""
        if settings:
            self._apply()
            self._line(
                f"applied {' '.join(settings)} to {type(model).__name__} ({_weights([model])} weights), trained by "
                f"{_names(optimizers)}"
            )

    def left(self, words: str, why: str) -> None:
        """Record something that is left unchanged, and why."""
        self._line(f"left alone {words}: {why}")

    def _line(self, line: str) -> None:
        if line not in self._reported:
            self._reported[line] = None
            self._lines.append(line)

    @property
    def unreported(self) -> bool:
        """Whether `tell` has something to report, now or after a step."""
        return bool(self._lines or self._claims)

    def tell(self) -> None:
        """Report everything that has not been reported yet."""
        lines, self._lines = self._lines, []
        grouped = dist.is_available() and dist.is_initialized()
        if not lines or (dist.get_rank() if grouped else int(os.environ.get("RANK", "0"))) != 0:
            return
        if self._header is not None:
            lines, self._header = [self._header, *(f"  {line}" for line in lines)], None
        self._say("\n".join(f"penstock: {line}" for line in lines))

    def conclude(self, trained: int) -> None:
        """Report at the end of the script; it made `trained` optimizers."""
        self.stepped()
        if self._applied:
            return
        if not trained:
            why = (
                "the script made no optimizer of torch.optim; whether it updates weights by hand, or trains in "
                "processes that it starts, cannot be seen from outside: start ranks with torchrun"
            )
        elif not self._reported:
            why = "no model that an optimizer trains was called with gradients"
        else:
            why = "; ".join(self._reported)
        self._header, self._lines = None, []
        self._line(f"nothing was accelerated: {why}")


def _weights(models: Iterable[nn.Module]) -> str:
    return f"{sum(p.numel() for model in models for p in model.parameters()):,}"


def _names(optimizers: Sequence[Optimizer]) -> str:
    counted = [f"{type(o).__name__} ({len(parameters_of(o))} tensors)" for o in optimizers]
    return " and ".join(counted)
