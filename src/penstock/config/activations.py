"""Activations of perceptrons. A new one is a row here and its formula in `penstock.kernels.bias_activation`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Mlp = Literal[
    "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2", "silu", "swiglu", "geglu", "geglu_tanh", "swiglu_clamped",
]  # fmt: skip


class Pass(NamedTuple):
    """One of several operators of torch that compute an activation."""

    name: str
    function: str = ""
    """The function that it computes, in the words of a probe; "" for sums and products."""
    forward: tuple[float, float] = (1, 1)
    """Elements read and written per element of the activation in the forward pass."""
    backward: tuple[float, float] = (1, 1)
    """Elements read and written per element of the activation in the backward pass."""
    launches: int = 1
    keeps: bool = False
    """Whether it saves a tensor as large as the activation, in addition to the first operator's input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationRow:
    """One activation."""

    names: tuple[str, ...] = ()
    """transformers' names; the first is written. A gated activation has the names of its gate's function."""
    classes: tuple[str, ...] = ()
    """Classes of its modules in torch, timm and transformers."""
    gate: Mlp | None = None
    """The function that a gated activation applies to its gate; None: it has no gate."""
    limit: float | None = None
    """Clamp of the gate from above, and of the other factor on both sides, to which 1 is then added; None: neither."""
    kernel: int | None = None
    """Its number in the C++ kernels, for a gated one the number of its gate; None: torch's operators compute it."""
    merged: str = ""
    """The function whose measured rate predicts a single kernel of it; "": its own."""
    passes: tuple[Pass, ...] = ()
    """Operators of torch that compute it; none: it has an operator of its own."""
    keeps_output: bool = False
    """Whether its gradient is computed from its output, which the next matrix product saves anyway."""


ACTIVATIONS: dict[Mlp, ActivationRow] = {
    "gelu": ActivationRow(names=("gelu", "gelu_python"), classes=("GELU", "GELUActivation"), kernel=0),
    "gelu_tanh": ActivationRow(
        names=("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
        classes=("GELUTanh", "NewGELUActivation", "PytorchGELUTanh", "FastGELUActivation"), kernel=1
    ),
    "gelu_quick": ActivationRow(
        names=("quick_gelu",), classes=("QuickGELUActivation", "QuickGELU"), kernel=4, merged="silu",
        # Its backward pass has two multiplications, and the sum of both gradients of x.
        passes=(
            Pass("scale"), Pass("", "sigmoid", backward=(2, 1)),
            Pass("gate", forward=(2, 1), backward=(6, 3), launches=2, keeps=True)
        ),
    ),
    "relu": ActivationRow(names=("relu",), classes=("ReLU",), kernel=3, keeps_output=True),
    "relu2": ActivationRow(
        names=("relu2",), classes=("ReLUSquaredActivation",), merged="relu",
        passes=(Pass("", "relu", backward=(2, 1)), Pass("square", backward=(6, 3), launches=2))
    ),
    "silu": ActivationRow(names=("silu", "swish"), classes=("SiLU", "SiLUActivation"), kernel=2),
    "swiglu": ActivationRow(names=("silu", "swish"), gate="silu"),
    "geglu": ActivationRow(names=("gelu",), gate="gelu"),
    "geglu_tanh": ActivationRow(names=("gelu_pytorch_tanh",), gate="gelu_tanh"),
    "swiglu_clamped": ActivationRow(gate="gelu_quick", limit=7.0),
}  # fmt: skip
UNGATED: dict[Mlp, Mlp] = {name: row.gate for name, row in ACTIVATIONS.items() if row.gate is not None}
"""The function that a gated activation applies to its gate."""
KERNELS = frozenset(
    name
    for name, row in ACTIVATIONS.items()
    if row.limit is None and ACTIVATIONS[row.gate or name].kernel is not None
)
"""Activations with a fused kernel; torch's operators compute the rest."""
PLAIN_NAMES: dict[str, Mlp] = {
    word: name for name, row in ACTIVATIONS.items() if row.gate is None for word in row.names
}
"""Activations without a gate, by transformers' names."""
GATED_NAMES: dict[str, Mlp] = {word: name for name in UNGATED for word in ACTIVATIONS[name].names}
"""Gated activations, by transformers' names of the function of their gate."""
