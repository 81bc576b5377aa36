"""Which kernel computes attention."""

from penstock.config.plan import AttentionBackend
from penstock.ladder.rung import Rung, Setting, Situation, plan, register


def _rung(backend: AttentionBackend, place: int, why: str) -> Rung:
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
        apply=plan(attention=backend),
        obstacle=obstacle,
    )


_PLAIN = "Two batched products with the scores in memory: more traffic, but quick products for short ones."
register(_rung("plain", 600, _PLAIN))
register(_rung("flash", 610, "Pins the FlashAttention kernel of torch, which keeps no scores in memory."))
register(
    _rung("efficient", 620, "Pins the memory-efficient kernel of torch, which keeps no scores in memory.")
)
register(_rung("cudnn", 630, "Pins cuDNN's fused kernel, often the fastest on Hopper and later."))
