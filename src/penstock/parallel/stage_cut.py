"""Where a model is cut into stages: which stage holds which blocks, and which of its other parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from torch import nn

from penstock.errors import ConfigError
from penstock.models.anatomy import Anatomy, anatomy_of
from penstock.models.roles import Embedding, Linear, Pooler, Stem, owned, walk
from penstock.planner.pipeline import balanced


class Carried(NamedTuple):
    """A value that is sent from one stage to the next."""

    stack: int
    """The number of the stack that makes it."""
    done: bool
    """Whether it is the stack's output; otherwise it is the tokens between two of its blocks."""


@dataclass(frozen=True, slots=True)
class StageCut:
    """Where a model is cut: the number of the first block of each stage, and one more than the last block's."""

    edges: tuple[int, ...]
    starts: tuple[int, ...]
    """The number of the first block of each stack, and one more than the last block's."""
    carried: tuple[tuple[Carried, ...], ...]
    """The values that each stage receives: outputs of stacks in the order in which they are made, then tokens."""

    @classmethod
    def of(cls, anatomy: Anatomy, counts: Sequence[int]) -> StageCut:
        """Cut into stages of `counts` blocks. Raises ConfigError for a model that cannot be cut."""
        if anatomy.unknown or (len(anatomy.stacks) > 1 and not anatomy.reads):
            model = anatomy.unknown or f"a model of the family {anatomy.family}"
            raise ConfigError(
                f"plan.pp cuts a model by its Anatomy, and {model} cannot be cut: its blocks must be known by role, "
                "and take and return tokens, and for several stacks it must be known what each reads. Use plan.pp=1, "
                "or one of Penstock's own models."
            )
        starts = (0, *accumulate(len(stack.blocks) for stack in anatomy.stacks))
        edges = (0, *accumulate(counts))
        assert edges[-1] == starts[-1]
        return cls(edges, starts, tuple(tuple(_carried(anatomy, starts, edge)) for edge in edges[:-1]))

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.edges) - 1

    def stage_of(self, block: int) -> int:
        """The stage of a block."""
        return next(s for s in range(self.stages) if block < self.edges[s + 1])


def _carried(anatomy: Anatomy, starts: Sequence[int], edge: int) -> Iterator[Carried]:
    """The values made before block `edge` that are read from there on."""
    last = len(anatomy.stacks) - 1
    reads = [anatomy.read_by(number) for number in range(last + 1)]
    for number in range(last + 1):
        if starts[number + 1] <= edge:
            later = (
                starts[reader + 1] > edge
                and (number in reads[reader][1] or (number == reads[reader][0] and starts[reader] >= edge))
                for reader in range(number + 1, last + 1)
            )
            if any(later) or number in anatomy.read_out:
                yield Carried(number, done=True)
        elif starts[number] < edge:
            yield Carried(number, done=False)


def places_of(anatomy: Anatomy, cut: StageCut) -> dict[str, frozenset[int]]:
    """The stages that use each part, by its name."""
    users: dict[str, set[int]] = {}
    tokens = [r.name for r in anatomy.stacks[0].before if isinstance(r, Embedding) and r.kind == "token"]
    for number, stack in enumerate(anatomy.stacks):
        home = [cut.stage_of(cut.starts[number] + i) for i in range(len(stack.blocks))]
        for role in stack.before:
            everywhere = isinstance(role, Embedding) and role.kind == "relative"
            for name in (role.name, *owned(role)):
                users.setdefault(name, set()).update(home if everywhere else home[:1])
        # In a foreign model it is unknown which stacks read the table.
        for name in stack.shares if anatomy.reads else tokens:
            users.setdefault(name, set()).add(home[0])
        for block, stage in zip(stack.blocks, home):
            users[block.name] = {stage}
        for role in walk(stack.after):
            for name in (role.name, *owned(role)):
                users[name] = {home[-1]}
    return {name: frozenset(stages) for name, stages in users.items()}


def counts_by_size(model: nn.Module, stages: int) -> tuple[int, ...]:
    """Number of blocks in each stage of a model without a configuration, balanced by the sizes of its matrices:
    products with them are most of the work, and each weight is used once per token.
    """
    anatomy = anatomy_of(model)

    def weights(name: str) -> float:
        try:
            module = model.get_submodule(name)
        except AttributeError:
            return 0.0
        return float(sum(p.numel() for p in module.parameters() if p.ndim > 1))

    after = [role for role in walk(anatomy.stacks[-1].after) if isinstance(role, Linear | Pooler)]
    before = [role for role in walk(anatomy.stacks[0].before) if isinstance(role, Stem)]
    if len(anatomy.blocks) < stages:
        raise ConfigError(
            f"plan.pp leaves stages without a block: {stages} are requested, and {type(model).__name__} has "
            f"{len(anatomy.blocks)} blocks; use at most that."
        )
    return balanced(
        [weights(block) for block in anatomy.blocks], stages,
        entrance=sum(weights(role.name) for role in before), end=sum(weights(role.name) for role in after),
    )  # fmt: skip
