"""Sequence before batch inside the blocks."""

from penstock.ladder.rung import Rung, Setting, Situation, plan, register


def _obstacle(setting: Setting, situation: Situation) -> str | None:
    return None if "batch_second" in situation.token_orders else "the model knows one token order only"


register(
    Rung(
        name="token-order",
        place=500,
        title="batch second",
        why="Tokens are held as (sequence, batch, width), so that attention reads heads in place, without transposes.",
        apply=plan(token_order="batch_second"),
        obstacle=_obstacle,
    )
)
