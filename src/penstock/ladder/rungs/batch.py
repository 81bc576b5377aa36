"""More samples per step, which fill the device better."""

from dataclasses import replace

from penstock.ladder.rung import Rung, Setting, Situation, register


def _rung(factor: int, place: int) -> Rung:
    def apply(setting: Setting, situation: Situation) -> Setting:
        return replace(setting, plan=replace(setting.plan, micro_batch=situation.micro_batch * factor))

    def obstacle(setting: Setting, situation: Situation) -> str | None:
        if not situation.splittable:
            return "the samples of your batch could not be told apart, so it cannot be made larger"
        return None

    return Rung(
        name=f"batch-x{factor}",
        place=place,
        title=f"batch × {factor}",
        why="More samples per step: larger products, and launches and the optimizer's update are shared by more. "
        "The global batch grows with it, which a recipe must allow for.",
        apply=apply,
        obstacle=obstacle,
        changes_numerics=True,
    )


register(_rung(2, 800))
register(_rung(4, 810))
