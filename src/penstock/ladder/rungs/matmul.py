"""Faster fp32 matrix products."""

from dataclasses import replace

from penstock.config.plan import Matmul
from penstock.ladder.rung import Rung, Setting, Situation, register


def _choice(situation: Situation) -> Matmul:
    return "high" if situation.machine.device == "cuda" else "medium"


def _apply(setting: Setting, situation: Situation) -> Setting:
    return replace(setting, plan=replace(setting.plan, matmul=_choice(situation)))


register(
    Rung(
        name="matmul",
        place=100,
        title="fast fp32 matmul",
        why="Products of fp32 matrices take the quick path: TF32 on a GPU, which keeps 10 bits of the fraction, and "
        "the alternative kernel library on a CPU.",
        apply=_apply,
        changes_numerics=True,
    )
)
