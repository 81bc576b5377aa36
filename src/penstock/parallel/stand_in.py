"""Stand-ins for the parts of a model that a stage of a pipeline does not have: see `penstock.parallel.pipeline`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.models.wrap import class_under, set_class
from penstock.parallel.parts import OfRanks
from penstock.parallel.sequence import divide
from penstock.parallel.stage_cut import Carried
from penstock.parallel.tensor import BEGINS, ENDS


class Left(Exception):
    """Ends a stage's forward pass, with the values for the next stage."""

    def __init__(self, values: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.values = values


class Running(Protocol):
    """The running stage, with the attributes that stand-ins need."""

    _active: Any
    _made: dict[Carried, Tensor]
    _probing: bool
    device: torch.device
    emptied: dict[nn.Module, dict[str, Tensor]]

    def like(self) -> torch.dtype:
        """Type of the tokens in this stage."""


class StandIn(nn.Module):
    """Is called instead of `original`, and also has its attributes."""

    def __init__(self, original: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["original"] = original
        self.call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["original"], name)


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The tokens passed to a block."""
    tokens: Tensor = args[0] if args else kwargs["hidden_states"]
    return tokens


def _as_split(module: nn.Module, x: Tensor) -> Tensor:
    """Tokens without values in the shape of `module`'s outputs: with sequence parallelism the first block of a stack
    gets a rank's own tokens, and its end returns all of them.
    """
    begins, ends = module.__dict__.get(BEGINS), module.__dict__.get(ENDS)
    if begins is not None:
        x = divide(x, begins)
    if ends is not None:
        shape = list(x.shape)
        shape[ends.dim] = ends.tokens
        x = x.new_zeros(shape)
    return x


def passing(module: nn.Module) -> StandIn:
    """A block that returns its tokens unchanged."""
    return StandIn(module, lambda *args, **kwargs: _as_split(module, _tokens(args, kwargs)))


def entry(running: Running, module: nn.Module, value: Carried, carried: tuple[Carried, ...]) -> StandIn:
    """A part that returns one of the values received from the previous stage.

    While shapes are probed nothing was received: shapes are those of its arguments, and the last value ends the pass.
    """

    def call(*args: Any, **kwargs: Any) -> Tensor:
        x = _as_split(module, _tokens(args, kwargs))  # in every pass, because it stores the number of tokens
        if running._probing:
            running._made[value] = x
            if value == carried[-1]:
                raise Left(tuple(running._made[each] for each in carried if each in running._made))
            return x
        values = running._active[1]
        # If a past holds the outputs of earlier stacks, these are not computed: only tokens are sent.
        sent = carried if len(values) == len(carried) else tuple(each for each in carried if not each.done)
        received: Tensor = values[sent.index(value)]
        running._made[value] = received
        return received

    return StandIn(module, call)


def exit_(running: Running, module: nn.Module, carried: tuple[Carried, ...]) -> StandIn:
    """A block that ends the pass with the values for the next stage."""

    def call(*args: Any, **kwargs: Any) -> None:
        x = _tokens(args, kwargs)
        if not isinstance(x, Tensor):
            raise ConfigError(
                f"plan.pp needs blocks that take and return tokens, but {type(module).__name__} is called with a "
                f"{type(x).__name__}; use plan.pp=1."
            )
        made = (each for each in carried if not each.done or each in running._made)
        raise Left(tuple(running._made[each] if each.done else x for each in made))

    return StandIn(module, call)


def tap(running: Running, module: nn.Module, value: Carried) -> StandIn:
    """The part itself; its output is sent to a later stage."""

    def call(*args: Any, **kwargs: Any) -> Any:
        output = module(*args, **kwargs)
        running._made[value] = output
        return output

    return StandIn(module, call)


class Blank:
    """Zeros instead of a parameter, or of a module's output."""

    def __init__(self, running: Running, owner: nn.Module, key: str) -> None:
        self.running = running
        value: Any = getattr(owner, key)
        self.module: nn.Module | None = value if isinstance(value, nn.Module) else None
        self.shape = torch.Size()
        if self.module is None:
            self.shape = (running.emptied[owner][key] if value is None else value).shape
        self._copy: nn.Module | None = None
        self._shapes: dict[Any, torch.Size] = {}

    def instead(self) -> Any:
        """The replacement for the module or tensor."""
        if self.module is not None:
            return StandIn(self.module, self)
        return torch.zeros(1, device=self.running.device).expand(self.shape)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        key = tuple(
            value.shape if isinstance(value, Tensor) else value for value in (*args, *kwargs.values())
        )
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = self._output_shape(args, kwargs)
        return torch.zeros(shape, device=self.running.device, dtype=self.running.like())

    @torch.no_grad()
    def _output_shape(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Size:
        """The shape of the module's output, computed without values."""
        if self._copy is None:
            assert self.module is not None
            pairs = {
                id(p): nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), requires_grad=False)
                for p in self.module.parameters()
            }
            self._copy = copy.deepcopy(self.module, dict(pairs))
            for copied, original in zip(self._copy.modules(), self.module.modules(), strict=True):
                set_class(copied, class_under(original, OfRanks))
                for name, value in self.running.emptied.get(original, {}).items():
                    setattr(copied, name, nn.Parameter(value, requires_grad=False))
            self._copy.to("meta")

        def moved(value: Any) -> Any:
            return value.to("meta") if isinstance(value, Tensor) else value

        output: Tensor = self._copy(
            *map(moved, args), **{name: moved(value) for name, value in kwargs.items()}
        )
        return output.shape
