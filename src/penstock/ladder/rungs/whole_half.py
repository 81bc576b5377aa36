"""Everything in half precision: weights, gradients, activations and optimizer state."""

from dataclasses import replace

from penstock.config.plan import HalfDtype
from penstock.ladder.rung import Rung, Setting, Situation, register


def _dtype(situation: Situation) -> HalfDtype:
    return "bf16" if "bf16" in situation.machine.peak_flops else "fp16"


def _apply(setting: Setting, situation: Situation) -> Setting:
    # Without fp32 weights there are no masters, and without autocast nothing chooses fp8.
    plan = replace(setting.plan, precision="O3", dtype=_dtype(situation), master="copy", fp8=False)
    return replace(setting, plan=plan)


register(
    Rung(
        name="whole-half",
        place=1000,
        title="whole model half",
        why="Weights, gradients and optimizer state are half as wide too: no casts, half the traffic, half the memory. "
        "Small updates can be lost in rounding, so look at the loss.",
        apply=_apply,
        changes_numerics=True,
    )
)
