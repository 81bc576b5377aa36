"""Multi-tensor optimizers: fewer launches, and fewer passes over memory."""

from penstock.ladder.rung import Rung, plan, register

for _form, _place, _why in (
    (
        "foreach",
        300,
        "Each operator of the update covers many tensors in one launch. On a CPU torch has no such kernels.",
    ),
    (
        "fused",
        310,
        "The whole update is one kernel per group of tensors: weights, gradients and moments are read once.",
    ),
    (
        "contiguous",
        320,
        "Weights and gradients live in one flat buffer per group, which the fused update, clipping and clearing "
        "cross in a single pass.",
    ),
):
    register(
        Rung(
            name=f"optimizer-{_form}",
            place=_place,
            title=f"{_form} optimizer",
            why=_why,
            apply=plan(optimizer=_form),
        )
    )
