"""torch.compile: of each repeated block, and of the whole model."""

from dataclasses import replace

from penstock.config.plan import Compile
from penstock.ladder.rung import Rung, Setting, Situation, register


def _rung(region: Compile, place: int, why: str) -> Rung:
    def apply(setting: Setting, situation: Situation) -> Setting:
        return replace(setting, plan=replace(setting.plan, compile=region))

    return Rung(name=f"compile-{region}", place=place, title=f"compile {region}", why=why, apply=apply)


register(
    _rung(
        "blocks",
        700,
        "Fuses the pointwise work of a block into few kernels; one compilation serves all blocks.",
    )
)
register(_rung("whole", 710, "Compiles the whole model at once: more to fuse, and longer to compile."))
