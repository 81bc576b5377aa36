"""The changes that were made to a script, in lines that are printed once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from penstock.optim.groups import parameters_of
from penstock.precision.settings import Precision, auto_dtype

Say = Callable[[str], None]


class Account:
    """Gathers what happened and reports it with `say`, on the first rank, when the next optimizer step is over."""

    def __init__(self, dtype: str, say: Say) -> None:
        self._dtype = dtype
        self._say = say
        self._header: str | None = None
        self._lines: list[str] = []
        self._reported: set[str] = set()
        self._accelerated = 0

    def accelerated(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], precision: Precision
    ) -> None:
        """Some models and the optimizers that train them run in mixed precision now."""
        self._accelerated += len(models)
        if self._header is None:
            self._header = precision.describe()
            device = next((p.device for model in models for p in model.parameters()), None)
            if self._dtype == "auto" and device is not None and precision.dtype is not None:
                self._header += f"; {precision.dtype_name} because {auto_dtype(device)[1]}"
        names = ", ".join(f"{type(model).__name__} ({_weights([model])} weights)" for model in models)
        self._line(f"accelerated {names}, trained by {_names(optimizers)}")

    def joined(self, model: nn.Module) -> None:
        """One more model of an accelerated optimizer was called for the first time."""
        self._accelerated += 1
        self._line(f"accelerated {type(model).__name__} ({_weights([model])} weights), trained by the same")

    def switched(self, model: nn.Module, optimizers: Sequence[Optimizer], settings: Sequence[str]) -> None:
        """Settings of a Plan beside its precision, if any, hold for a model and for the optimizers that train it."""
        self._accelerated += 1
        if settings:
            self._line(
                f"applied {' '.join(settings)} to {type(model).__name__} ({_weights([model])} weights), trained by "
                f"{_names(optimizers)}"
            )

    def left(self, words: str, why: str) -> None:
        """Something stays as the script made it."""
        self._line(f"left alone {words}: {why}")

    def _line(self, line: str) -> None:
        if line not in self._reported:
            self._reported.add(line)
            self._lines.append(line)

    @property
    def unreported(self) -> bool:
        """Whether `tell` has something to say."""
        return bool(self._lines)

    def tell(self) -> None:
        """Report what has not been reported yet."""
        lines, self._lines = self._lines, []
        if not lines or (dist.is_available() and dist.is_initialized() and dist.get_rank() != 0):
            return
        if self._header is not None:
            lines, self._header = [self._header, *(f"  {line}" for line in lines)], None
        self._say("\n".join(f"penstock: {line}" for line in lines))

    def conclude(self, trained: int) -> None:
        """The script has ended; it made `trained` optimizers."""
        if not self._accelerated and not trained:
            self.left(
                "the script",
                "it made no optimizer of torch.optim; whether it updates weights by hand cannot be seen from outside",
            )
        elif not self._accelerated and not self._reported:
            self.left("the script", "no model that an optimizer trains was called with gradients")


def _weights(models: Iterable[nn.Module]) -> str:
    return f"{sum(p.numel() for model in models for p in model.parameters()):,}"


def _names(optimizers: Sequence[Optimizer]) -> str:
    counted = [f"{type(o).__name__} ({len(parameters_of(o))} tensors)" for o in optimizers]
    return " and ".join(counted)
