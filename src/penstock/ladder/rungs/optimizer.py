"""Multi-tensor optimizers: fewer launches, and fewer passes over memory."""

from dataclasses import replace

from penstock.config.plan import OptimizerForm
from penstock.ladder.rung import Rung, Setting, Situation, register


def _rung(form: OptimizerForm, place: int, why: str) -> Rung:
    def apply(setting: Setting, situation: Situation) -> Setting:
        return replace(setting, plan=replace(setting.plan, optimizer=form))

    return Rung(name=f"optimizer-{form}", place=place, title=f"{form} optimizer", why=why, apply=apply)


register(
    _rung(
        "foreach",
        300,
        "Each operator of the update covers many tensors in one launch. On a CPU torch has no such kernels.",
    )
)
register(
    _rung(
        "fused",
        310,
        "The whole update is one kernel per group of tensors: weights, gradients and moments are read once.",
    )
)
register(
    _rung(
        "contiguous",
        320,
        "Weights and gradients live in one flat buffer per group, which the fused update, clipping and clearing "
        "cross in a single pass.",
    )
)
