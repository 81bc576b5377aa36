"""Several processes: whole replicas, shards, and shards in groups, each rank with the baseline's micro-batch."""

from penstock.config.plan import Sharding
from penstock.ladder.rung import Rung, Setting, Situation, plan, register


def group_size(procs: int) -> int:
    """Ranks of a group with sharding=hsdp: the largest that leaves two groups or more; 1 where none does."""
    return max((size for size in range(1, procs // 2 + 1) if procs % size == 0), default=1)


def _rung(sharding: Sharding, place: int, title: str, why: str) -> Rung:
    def shard(situation: Situation) -> int:
        return group_size(situation.procs) if sharding == "hsdp" else 1

    def obstacle(setting: Setting, situation: Situation) -> str | None:
        if situation.procs == 1:
            return "it takes several processes: give their number, such as --procs 2"
        if sharding == "hsdp" and group_size(situation.procs) == 1:
            return (
                f"{situation.procs} processes do not make two groups of two or more: give a number that does, such "
                "as --procs 4"
            )
        return None

    apply = plan(dp=lambda situation: situation.procs, sharding=sharding, shard=shard)
    return Rung(
        name=f"parallel-{sharding}", place=place, title=title, why=why, apply=apply, obstacle=obstacle, twin=True
    )  # fmt: skip


register(
    _rung(
        "ddp",
        850,
        "replicas (DDP)",
        "Each process has a copy of the model and its own samples; gradients are averaged while the backward pass goes "
        "on. The global batch grows with the number of processes, which a recipe must allow for.",
    )
)
register(
    _rung(
        "fsdp",
        860,
        "shards (FSDP)",
        "Each process keeps its rows of weights, gradients and optimizer states, and gathers one block ahead: memory "
        "per process shrinks, and more is sent than by replicas.",
    )
)
register(
    _rung(
        "hsdp",
        870,
        "grouped shards (HSDP)",
        "Shards within groups of neighbours, whole copies between them: gathering stays within a group, and between "
        "groups only gradients go, once a step.",
    )
)
