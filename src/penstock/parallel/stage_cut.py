"""Where a model is cut into stages: which stage holds which blocks, and which of its other parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from penstock.errors import ConfigError
from penstock.models.anatomy import Anatomy, anatomy_of
from penstock.models.roles import Embedding, Linear, Pooler, Stem, owned, walk
from penstock.planner.pipeline import balanced


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a model is cut: the number of the first block of each stage, and of the block after the last."""

    edges: tuple[int, ...]
    encoder: int
    """Blocks of the encoder of an encoder–decoder; 0 for other models."""

    @classmethod
    def of(cls, anatomy: Anatomy, counts: Sequence[int]) -> Cut:
        """Stages of so many blocks each. Raises ConfigError for a model that cannot be cut."""
        if anatomy.unknown or len(anatomy.stacks) > 2 or (
            len(anatomy.stacks) == 2 and anatomy.family.startswith("hf_")
        ):  # fmt: skip
            what = anatomy.unknown or f"a model of the family {anatomy.family}"
            raise ConfigError(
                f"plan.pp cuts a model by its Anatomy, and {what} cannot be cut: its blocks must be known by role, and "
                "take and return tokens. Use plan.pp=1, or one of Penstock's own models."
            )
        edges = [0]
        for count in counts:
            edges.append(edges[-1] + count)
        assert edges[-1] == len(anatomy.blocks)
        return cls(tuple(edges), len(anatomy.stacks[0].blocks) if len(anatomy.stacks) == 2 else 0)

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.edges) - 1

    def stage_of(self, block: int) -> int:
        """The stage of a block."""
        return next(s for s in range(self.stages) if block < self.edges[s + 1])

    def carries(self, stage: int) -> tuple[bool, bool]:
        """Whether a stage is sent tokens, and whether it is sent the memory."""
        at = self.edges[stage]
        return at not in (0, self.encoder), 0 < self.encoder <= at


def places_of(anatomy: Anatomy, cut: Cut) -> dict[str, frozenset[int]]:
    """The stages that use each part, by its name."""
    found: dict[str, set[int]] = {}
    at, tokens = 0, [r for r in anatomy.stacks[0].before if isinstance(r, Embedding) and r.kind == "token"]
    for stack in anatomy.stacks:
        home = [cut.stage_of(at + i) for i in range(len(stack.blocks))]
        at += len(home)
        for role in (*stack.before, *tokens):
            everywhere = isinstance(role, Embedding) and role.kind == "relative"
            for name in (role.name, *owned(role)):
                found.setdefault(name, set()).update(home if everywhere else home[:1])
        for block, stage in zip(stack.blocks, home):
            found[block.name] = {stage}
        for role in walk(stack.after):
            for name in (role.name, *owned(role)):
                found[name] = {home[-1]}
    return {name: frozenset(stages) for name, stages in found.items()}


def nearest(places: dict[str, frozenset[int]], name: str) -> frozenset[int] | None:
    """The stages of the part that a parameter belongs to; None where it belongs to none."""
    while name not in places:
        name, dot, _ = name.rpartition(".")
        if not dot:
            return None
    return places[name]


def counts_by_size(model: nn.Module, stages: int) -> tuple[int, ...]:
    """Blocks of each stage of a model of which no more is known than its Anatomy: products with weights make up most
    of the work, and each weight of a matrix is used once for a token.
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
            f"plan.pp leaves stages without a block: {stages} are asked for, and {type(model).__name__} has "
            f"{len(anatomy.blocks)} blocks; use at most that."
        )
    return balanced(
        [weights(block) for block in anatomy.blocks],
        stages,
        entrance=sum(weights(role.name) for role in before),
        end=sum(weights(role.name) for role in after),
    )
