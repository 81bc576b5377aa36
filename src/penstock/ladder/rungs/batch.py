"""More samples per step, which fill the device better."""

from penstock.ladder.rung import Rung, Setting, Situation, plan, register


def _obstacle(setting: Setting, situation: Situation) -> str | None:
    if not situation.splittable:
        return "the samples of your batch could not be told apart, so it cannot be made larger"
    return None


for _factor, _place in ((2, 800), (4, 810)):
    register(
        Rung(
            name=f"batch-x{_factor}",
            place=_place,
            title=f"batch × {_factor}",
            why="More samples per step: larger products, and launches and the optimizer's update are shared by more. "
            "The global batch grows with it, which a recipe must allow for.",
            apply=plan(micro_batch=lambda situation, factor=_factor: situation.micro_batch * factor),
            obstacle=_obstacle,
            changes_numerics=True,
        )
    )
