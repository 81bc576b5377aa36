"""Stages that generate: each rank of `pp` has some blocks of every stack, and tokens go from one rank to the next.

Every rank makes the whole pass. A block of another rank returns its tokens unchanged. The first block of a rank
receives the output of the stage before, and the last stage sends the output of the stack to all; so every rank chooses
the same tokens by the same features, and nothing else of generation knows of stages. Embeddings, norms between stacks
and the output are on all ranks.

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


class DecodeStages:
    """This rank's place among the stages, and what they send one another."""

    def __init__(self, dims: ParallelDims) -> None:
        self.group, self.place, self.count = dims.group("pp"), dims.place()["pp"], dims.pp

    def send(self, x: Tensor, to: int) -> None:
        """Send to the stage `to`."""
        distributed.send(x.contiguous(), group=self.group, group_dst=to, tag=_part())

    def receive(self, like: Tensor, source: int) -> Tensor:
        """The tensor that the stage `source` sends, of the shape and type of `like`."""
        tensor = torch.empty_like(like, memory_format=torch.contiguous_format)
        distributed.recv(tensor, group=self.group, group_src=source, tag=_part())
        return tensor

    def share_last(self, x: Tensor) -> Tensor:
        """The last stage's `x`, on all stages."""
        last = self.count - 1
        if self.place != last:
            return self.receive(x, last)
        for stage in range(last):
            self.send(x, stage)
        return x

    def blocks(self, depth: int) -> range:
        """The blocks of a stack that this stage has."""
        return range(depth * self.place // self.count, depth * (self.place + 1) // self.count)


def _part() -> int:
    """The part of the texts that this thread generates, which is the tag of its messages."""
    return getattr(_thread, "part", 0)


def cut(model: nn.Module, dims: ParallelDims) -> None:
    """Leave this rank its blocks of a model, in place. Every stack has as many blocks as there are stages, or more."""
    stages = DecodeStages(dims)
    for stack in anatomy_of(model).stacks:
        names = [block.name for block in stack.blocks]
        own_blocks = stages.blocks(len(names))
        first, last = (model.get_submodule(names[number]) for number in (own_blocks[0], own_blocks[-1]))
        if stages.place:
            first.register_forward_pre_hook(functools.partial(_enter, stages))
        last.register_forward_hook(functools.partial(_leave, stages))
        for number, name in enumerate(names):
            if number not in own_blocks:
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, _Elsewhere())
        if stages.place + 1 < stages.count:
            model.get_submodule(names[-1]).register_forward_hook(lambda _, inputs, x: stages.share_last(x))
    model.__dict__[_OWN] = stages


class _Elsewhere(nn.Module):
    """Stands for a block of another rank."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__[ELSEWHERE] = True

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        return x


def _enter(stages: DecodeStages, block: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return stages.receive(inputs[0], stages.place - 1), *inputs[1:]


def _leave(stages: DecodeStages, block: nn.Module, inputs: Any, x: Tensor) -> Tensor:
    if stages.place + 1 == stages.count:
        return stages.share_last(x)
    stages.send(x, stages.place + 1)
    return x


def stages_of(model: nn.Module) -> DecodeStages | None:
    """The stages of a model that was cut."""
    stages: DecodeStages | None = model.__dict__.get(_OWN)
    return stages


def in_parts(
    stages: DecodeStages | None, generate: Callable[[slice], list[T]], count: int, dims: ParallelDims
) -> list[T]:
    """The results of `generate` for slices of `count` texts, in their order: of all at once, or of a part for each
    stage.

    Ranks that split layers take one step at a time, because their sums have no tag; and so do GPUs, whose messages have
    none.
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
        return [result for results in pool.map(run, range(parts)) for result in results]
