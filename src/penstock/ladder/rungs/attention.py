"""Which kernel computes attention."""

from dataclasses import replace

from penstock.config.plan import AttentionBackend
from penstock.ladder.rung import Rung, Setting, Situation, register


def _rung(backend: AttentionBackend, place: int, why: str) -> Rung:
    def apply(setting: Setting, situation: Situation) -> Setting:
        return replace(setting, plan=replace(setting.plan, attention=backend))

    def obstacle(setting: Setting, situation: Situation) -> str | None:
        if backend not in situation.attention:
            return f"the model cannot be switched to {backend} attention"
        if backend == "flash" and situation.machine.device == "cpu" and setting.plan.attention == "sdpa":
            return "on a CPU torch's own choice is flash already"
        return None

    return Rung(
        name=f"attention-{backend}",
        place=place,
        title=f"{backend} attention",
        why=why,
        apply=apply,
        obstacle=obstacle,
    )


register(
    _rung(
        "plain",
        600,
        "Two batched products with the scores in memory: more traffic, but quick products for short ones.",
    )
)
register(_rung("flash", 610, "Pins the FlashAttention kernel of torch, which keeps no scores in memory."))
register(
    _rung("efficient", 620, "Pins the memory-efficient kernel of torch, which keeps no scores in memory.")
)
register(_rung("cudnn", 630, "Pins cuDNN's fused kernel, often the fastest on Hopper and later."))
