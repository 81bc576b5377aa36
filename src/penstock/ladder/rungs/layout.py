"""Sequence before batch inside the blocks."""

from penstock.ladder.rung import Rung, Setting, Situation, plan, register


def _obstacle(setting: Setting, situation: Situation) -> str | None:
    return None if "batch_second" in situation.layouts else "the model knows one layout only"


register(
    Rung(
        name="layout",
        place=500,
        title="batch second",
        why="Tokens are held as (sequence, batch, width), so that attention reads heads in place, without transposes.",
        apply=plan(layout="batch_second"),
        obstacle=_obstacle,
    )
)
