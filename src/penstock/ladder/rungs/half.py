"""Autocast: matrix products in half precision, weights and norms in fp32."""

from penstock.ladder.rung import Rung, Setting, Situation, plan, register


def _superfluous(setting: Setting, situation: Situation) -> str | None:
    if {"bf16", "fp16"} <= situation.machine.peak_flops.keys():
        return "bf16 runs here, is as wide, and needs no loss scale"
    return None


# fp16 after the optimizers: an overflowed step can be skipped on the device by the fused ones only.
for _dtype, _place in (("bf16", 200), ("fp16", 340)):
    register(
        Rung(
            name=f"half-{_dtype}",
            place=_place,
            title=f"autocast {_dtype}",
            why=f"Matrix products read and multiply {_dtype} numbers, half as wide; weights, norms and sums stay fp32.",
            apply=plan(precision="O1", dtype=_dtype),
            obstacle=_superfluous if _dtype == "fp16" else lambda setting, situation: None,
            changes_numerics=True,
        )
    )
