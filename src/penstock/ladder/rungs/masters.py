"""Half weights with fp32 master weights in the optimizer, and the form of them that spares the copy."""

from dataclasses import replace

from penstock.config.plan import HalfDtype
from penstock.ladder.rung import Rung, Setting, Situation, register


def _dtype(situation: Situation) -> HalfDtype:
    return "bf16" if "bf16" in situation.machine.peak_flops else "fp16"


def _apply(setting: Setting, situation: Situation) -> Setting:
    return replace(setting, plan=replace(setting.plan, precision="O2", dtype=_dtype(situation)))


def _remainder(setting: Setting, situation: Situation) -> Setting:
    return replace(setting, plan=replace(setting.plan, master="remainder"))


register(
    Rung(
        name="masters",
        place=350,
        title="fp32 master weights",
        why="The forward pass reads weights and writes activations and gradients that are half as wide, without casts; "
        "updates are made on fp32 copies in the optimizer.",
        apply=_apply,
        changes_numerics=True,
    )
)
register(
    Rung(
        name="masters-remainder",
        place=352,
        title="masters in 16 bits",
        why="The fp32 weight is the bf16 one and 16 bits beside it: no copy, 2 bytes a weight less, one pass less.",
        apply=_remainder,
        changes_numerics=True,
    )
)
