"""Half weights with fp32 master weights in the optimizer, and the form of them that spares the copy."""

from penstock.ladder.rung import Rung, plan, register

register(
    Rung(
        name="masters",
        place=350,
        title="fp32 master weights",
        why="The forward pass reads weights and writes activations and gradients that are half as wide, without casts; "
        "updates are made on fp32 copies in the optimizer.",
        apply=plan(precision="O2", dtype=lambda situation: situation.half),
        changes_numerics=True,
    )
)
register(
    Rung(
        name="masters-remainder",
        place=352,
        title="masters in 16 bits",
        why="The fp32 weight is the bf16 one and 16 bits beside it: no copy, 2 bytes a weight less, one pass less.",
        apply=plan(master="remainder"),
        changes_numerics=True,
    )
)
