"""Sequence before batch inside the blocks."""

from dataclasses import replace

from penstock.ladder.rung import Rung, Setting, Situation, register


def _apply(setting: Setting, situation: Situation) -> Setting:
    return replace(setting, plan=replace(setting.plan, layout="batch_second"))


def _obstacle(setting: Setting, situation: Situation) -> str | None:
    if "batch_second" not in situation.layouts:
        return "the model knows one layout only"
    return None


register(
    Rung(
        name="layout",
        place=500,
        title="batch second",
        why="Tokens are held as (sequence, batch, width), so that attention reads heads in place, without transposes.",
        apply=_apply,
        obstacle=_obstacle,
    )
)
