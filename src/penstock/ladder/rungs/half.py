"""Autocast: matrix products in half precision, weights and norms in fp32."""

from dataclasses import replace

from penstock.config.plan import HalfDtype
from penstock.ladder.rung import Rung, Setting, Situation, register


def _rung(dtype: HalfDtype, place: int) -> Rung:
    def apply(setting: Setting, situation: Situation) -> Setting:
        return replace(setting, plan=replace(setting.plan, precision="O1", dtype=dtype))

    def obstacle(setting: Setting, situation: Situation) -> str | None:
        rates = situation.machine.peak_flops
        if dtype == "fp16" and {"bf16", "fp16"} <= rates.keys():
            return "bf16 runs here, is as wide, and needs no loss scale"
        return None

    return Rung(
        name=f"half-{dtype}",
        place=place,
        title=f"autocast {dtype}",
        why=f"Matrix products read and multiply {dtype} numbers, half as wide; weights, norms and sums stay fp32.",
        apply=apply,
        obstacle=obstacle,
        changes_numerics=True,
    )


register(_rung("bf16", 200))
# After the optimizers: an overflowed fp16 step can be skipped on the device by the fused ones only.
register(_rung("fp16", 340))
