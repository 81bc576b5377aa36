"""Stages that generate: each rank of `pp` has some blocks of every stack, and tokens go from one rank to the next.

Every rank makes the whole pass. A block that lies elsewhere gives its tokens as they are. The first that lies here gets
what the stage before has made, and the last stage sends what the stack has made to all; so every rank chooses the same
tokens by the same features, and nothing else of generation knows of stages. Embeddings, norms between stacks and the
output lie on all ranks.

A stage would wait while the others compute. So texts are generated in as many parts as there are stages, each by a
thread: while one part's tokens are under way, another's are computed here (micro-batches).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn

from penstock.decode.texts import eagerly
from penstock.models.anatomy import ELSEWHERE, anatomy_of
from penstock.parallel import ParallelDims

T = TypeVar("T")
_OWN = "penstock_stages"
"""Attribute of a model that was cut."""
_thread = threading.local()


class Stages:
    """This rank's place among the stages, and what they send one another."""

    def __init__(self, dims: ParallelDims) -> None:
        self.group, self.place, self.count = dims.group("pp"), dims.place()["pp"], dims.pp

    def sent(self, x: Tensor, to: int) -> None:
        """Send to the stage `to`."""
        distributed.send(x.contiguous(), group=self.group, group_dst=to, tag=_part())

    def received(self, like: Tensor, source: int) -> Tensor:
        """The tensor that the stage `source` sends, of the shape and type of `like`."""
        found = torch.empty_like(like, memory_format=torch.contiguous_format)
        distributed.recv(found, group=self.group, group_src=source, tag=_part())
        return found

    def lasts(self, x: Tensor) -> Tensor:
        """The last stage's, on all."""
        last = self.count - 1
        if self.place != last:
            return self.received(x, last)
        for other in range(last):
            self.sent(x, other)
        return x

    def blocks(self, depth: int) -> range:
        """The blocks of a stack that this stage has."""
        return range(depth * self.place // self.count, depth * (self.place + 1) // self.count)


def _part() -> int:
    """Which part of the texts this thread generates: messages of the parts are told apart by it."""
    return getattr(_thread, "part", 0)


def cut(model: nn.Module, dims: ParallelDims) -> None:
    """Leave this rank its blocks of a model, in place. Every stack has as many blocks as there are stages, or more."""
    stages = Stages(dims)
    for stack in anatomy_of(model).stacks:
        names = [block.name for block in stack.blocks]
        here = stages.blocks(len(names))
        first, last = (model.get_submodule(names[number]) for number in (here[0], here[-1]))
        if stages.place:
            first.register_forward_pre_hook(functools.partial(_enter, stages))
        last.register_forward_hook(functools.partial(_leave, stages))
        for number, name in enumerate(names):
            if number not in here:
                parent, _, own = name.rpartition(".")
                setattr(model.get_submodule(parent), own, _Elsewhere())
        if stages.place + 1 < stages.count:
            model.get_submodule(names[-1]).register_forward_hook(lambda _, given, x: stages.lasts(x))
    model.__dict__[_OWN] = stages


class _Elsewhere(nn.Module):
    """Stands for a block of another rank."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__[ELSEWHERE] = True

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        return x


def _enter(stages: Stages, block: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    return stages.received(given[0], stages.place - 1), *given[1:]


def _leave(stages: Stages, block: nn.Module, given: Any, x: Tensor) -> Tensor:
    if stages.place + 1 == stages.count:
        return stages.lasts(x)
    stages.sent(x, stages.place + 1)
    return x


def stages_of(model: nn.Module) -> Stages | None:
    """The stages of a model that was cut."""
    found: Stages | None = model.__dict__.get(_OWN)
    return found


def in_parts(
    stages: Stages | None, generate: Callable[[slice], list[T]], count: int, dims: ParallelDims
) -> list[T]:
    """The results of `generate` for slices of `count` texts, in their order: of all at once, or of a part for each
    stage.

    Ranks that split layers take one step at a time, for their sums are not told apart by part; and so do GPUs, whose
    messages are not.
    """
    parts = 1
    if stages is not None and dims.tp == 1 and distributed.get_backend(stages.group) == "gloo":
        parts = min(stages.count, count)
    if parts < 2:
        return generate(slice(0, count))

    def run(part: int) -> list[T]:
        _thread.part = part
        return generate(slice(count * part // parts, count * (part + 1) // parts))

    # Around the threads, each of which would restore what another has set.
    with eagerly(), ThreadPoolExecutor(parts) as pool:
        return [one for found in pool.map(run, range(parts)) for one in found]
