"""The optimizers, one row each: their state, reads and writes per weight, and the forms that torch has of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

Algorithm = Literal[
    "adamw", "muon", "sgd", "lion", "adafactor", "adam", "adamax", "nadam", "radam", "rmsprop", "rprop", "adagrad",
    "adadelta", "asgd", "lbfgs", "sparseadam",
]  # fmt: skip
OptimizerForm = Literal["loop", "foreach", "fused", "contiguous"]

ALL_FORMS: tuple[OptimizerForm, ...] = get_args(OptimizerForm)
_UNFUSED: tuple[OptimizerForm, ...] = ("loop", "foreach", "contiguous")
SKIPS_ON_DEVICE: tuple[OptimizerForm, ...] = ("fused", "contiguous")
"""Forms of torch's fused kernels, which skip an overflowed step without making the host wait."""

BY_WIDTH: tuple[Algorithm, ...] = ("adamw", "adam", "adamax", "nadam", "radam", "lion")
"""Optimizers whose updates are of the learning rate's size in each element, which `recipe.lr_width` is for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRule:
    """How one optimizer updates weights, in elements per weight."""

    torch: str = ""
    """Name of the class in `torch.optim`; "" for Penstock's own."""
    moments: int
    """Elements of state per weight."""
    forms: tuple[OptimizerForm, ...] = _UNFUSED
    """The values of `Plan.optimizer` that it has."""
    operators: int = 10
    """Elementwise operators of one update that is not fused."""
    accesses: float = 20
    """Elements per weight that these read and write."""
    settings: tuple[str, ...] = ()
    """Options that a recipe sets, where beta1 is `momentum` and beta2 is `alpha`; others keep torch's defaults."""
    matrices: Literal["", "orthogonal", "factored"] = ""
    """Treatment of whole matrices: their updates are orthogonalised, or the state has means over rows and columns."""
    decays: bool = True
    """Whether it has weight decay."""
    refused: str = ""
    """Why it cannot train here, and what to use."""

    @property
    def skips(self) -> tuple[OptimizerForm, ...]:
        """Forms of `plan.optimizer` that skip an overflowed step without making the host wait."""
        return tuple(form for form in self.forms if form in SKIPS_ON_DEVICE and "fused" in self.forms)


_ADAM = ("betas", "eps")
OPTIMIZERS: dict[Algorithm, UpdateRule] = {
    "adamw": UpdateRule(torch="AdamW", moments=2, forms=ALL_FORMS, settings=_ADAM),
    # The row describes its matrices; other parameters use AdamW, in any form but flat buffers, which hold no matrices.
    "muon": UpdateRule(
        moments=1, forms=("loop", "foreach", "fused"), operators=7, accesses=12, settings=_ADAM,
        matrices="orthogonal"
    ),
    "sgd": UpdateRule(
        torch="SGD", moments=1, forms=ALL_FORMS, operators=4, accesses=40 / 3, settings=("momentum",)
    ),
    "lion": UpdateRule(moments=1, operators=5, accesses=13, settings=("betas",)),
    "adafactor": UpdateRule(
        torch="Adafactor", moments=0, forms=("loop", "foreach"), operators=14, accesses=22, matrices="factored"
    ),
    "adam": UpdateRule(torch="Adam", moments=2, forms=ALL_FORMS, settings=_ADAM),
    "adamax": UpdateRule(torch="Adamax", moments=2, settings=_ADAM),
    "nadam": UpdateRule(torch="NAdam", moments=2, settings=_ADAM),
    "radam": UpdateRule(torch="RAdam", moments=2, settings=_ADAM),
    "rmsprop": UpdateRule(torch="RMSprop", moments=1, operators=6, accesses=15, settings=("alpha", "eps")),
    "rprop": UpdateRule(torch="Rprop", moments=2, decays=False),
    "adagrad": UpdateRule(torch="Adagrad", moments=1, operators=5, accesses=13),
    "adadelta": UpdateRule(torch="Adadelta", moments=2),
    "asgd": UpdateRule(torch="ASGD", moments=1, operators=5, accesses=13),
    "lbfgs": UpdateRule(
        torch="LBFGS", moments=0, refused="searches along a line, for which it evaluates the loss of a batch many "
        "times a step, and a training step evaluates it once"
    ),
    "sparseadam": UpdateRule(
        torch="SparseAdam", moments=2, refused="updates the rows that sparse gradients name, and gradients here are "
        "dense"
    ),
}  # fmt: skip
"""The row of each optimizer that `recipe.optimizer` accepts, by name."""


def form_problems(algorithm: Algorithm, form: OptimizerForm) -> Iterator[str]:
    """Why an optimizer cannot train, or does not have a form."""
    row = OPTIMIZERS[algorithm]
    if row.refused:
        usable = ", ".join(name for name, other in OPTIMIZERS.items() if not other.refused)
        yield f"recipe.optimizer={algorithm} {row.refused}; use adamw, or another of {usable}."
    elif form not in row.forms:
        why = "flat buffers hold no matrices" if form == "contiguous" else "it has no such kernel"
        yield (
            f"plan.optimizer={form} cannot launch recipe.optimizer={algorithm}, for {why}; use plan.optimizer="
            f"{' or '.join(row.forms)}."
        )
