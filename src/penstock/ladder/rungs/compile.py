"""torch.compile: of each repeated block, and of the whole model."""

from penstock.ladder.rung import Rung, plan, register

for _region, _place, _why in (
    (
        "blocks",
        700,
        "Fuses the pointwise work of a block into few kernels; one compilation serves all blocks.",
    ),
    ("whole", 710, "Compiles the whole model at once: more to fuse, and longer to compile."),
):
    register(
        Rung(
            name=f"compile-{_region}",
            place=_place,
            title=f"compile {_region}",
            why=_why,
            apply=plan(compile=_region),
        )
    )
