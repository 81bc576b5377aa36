"""Faster fp32 matrix products."""

from penstock.ladder.rung import Rung, plan, register

register(
    Rung(
        name="matmul",
        place=100,
        title="fast fp32 matmul",
        why="Products of fp32 matrices take the quick path: TF32 on a GPU, which keeps 10 bits of the fraction, and "
        "the alternative kernel library on a CPU.",
        apply=plan(matmul=lambda situation: "high" if situation.machine.device == "cuda" else "medium"),
        changes_numerics=True,
    )
)
