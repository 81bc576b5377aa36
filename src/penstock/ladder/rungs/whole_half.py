"""Everything in half precision: weights, gradients, activations and optimizer state."""

from penstock.ladder.rung import Rung, plan, register

register(
    Rung(
        name="whole-half",
        place=1000,
        title="whole model half",
        why="Weights, gradients and optimizer state are half as wide too: no casts, half the traffic, half the memory. "
        "Small updates can be lost in rounding, so look at the loss.",
        # Without fp32 weights there are no masters, and without autocast nothing chooses fp8.
        apply=plan(precision="O3", dtype=lambda situation: situation.half, master="copy", fp8=False),
        changes_numerics=True,
    )
)
