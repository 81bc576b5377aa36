"""Matrix products of the blocks in fp8."""

from dataclasses import replace

from penstock.ladder.rung import Rung, Setting, Situation, register


def _apply(setting: Setting, situation: Situation) -> Setting:
    return replace(setting, plan=replace(setting.plan, fp8=True))


def _obstacle(setting: Setting, situation: Situation) -> str | None:
    if "fp8" not in situation.machine.peak_flops:
        return f"{situation.machine.name} does not multiply in fp8"
    if setting.plan.precision not in ("O1", "O2") or setting.plan.dtype != "bf16":
        return "it replaces the bf16 products of autocast, which did not pay"
    return None


register(
    Rung(
        # After compilation, which fuses the scaling into its neighbours: eager, the scaling costs what fp8 gains.
        name="fp8",
        place=750,
        title="fp8 products",
        why="Products in the blocks read half the bytes of bf16 and run at twice the rate on GPUs that have fp8.",
        apply=_apply,
        obstacle=_obstacle,
        changes_numerics=True,
    )
)
