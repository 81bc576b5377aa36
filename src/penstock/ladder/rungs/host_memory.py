"""Freed host memory stays mapped."""

from penstock.host_memory import unavailable
from penstock.ladder.rung import Rung, Setting, Situation, plan, register


def _obstacle(setting: Setting, situation: Situation) -> str | None:
    return unavailable() if situation.machine.device == "cpu" else None


register(
    Rung(
        name="memory",
        place=150,
        title="keep freed memory",
        why="The allocator keeps what a step frees, so that the next step does not have the kernel clear and map the "
        "same pages again.",
        apply=plan(host_memory="keep"),
        obstacle=_obstacle,
    )
)
