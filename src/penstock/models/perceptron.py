"""The perceptron of a Transformer block, and its activations."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from penstock.config.stack import Layer, Mlp, Stack
from penstock.kernels.dropout import Dropout


def activate(x: Tensor, activation: Mlp) -> Tensor:
    """The activation at every element; of gated ones (Shazeer, 2020), that of the first half times the second half."""
    match activation:
        case "gelu" | "gelu_tanh":
            return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
        case "relu":
            return F.relu(x)
        case "silu":
            return F.silu(x)
    gate, x = x.chunk(2, dim=-1)
    if activation == "swiglu":
        return F.silu(gate) * x
    return F.gelu(gate, approximate="tanh" if activation == "geglu_tanh" else "none") * x


class MLP(nn.Module):
    """down(activation(up(x))), with dropout after the activation. The rows of a gate come before the others of up.

    `hidden` is the hidden width, by default that of the layer.
    """

    def __init__(self, sizes: Stack, layer: Layer, *, hidden: int | None = None, **where: Any) -> None:
        super().__init__()
        self.activation = sizes.mlp
        hidden = hidden or layer.hidden
        rows = hidden * (2 if sizes.gated else 1)
        self.up = nn.Linear(sizes.width, rows, bias=sizes.bias, **where)
        self.dropout = Dropout(sizes.hidden_dropout) if sizes.hidden_dropout else None
        self.down = nn.Linear(hidden, sizes.width, bias=sizes.bias, **where)

    def forward(self, x: Tensor) -> Tensor:
        hidden = activate(self.up(x), self.activation)
        return self.down(hidden if self.dropout is None else self.dropout(hidden))  # type: ignore[no-any-return]
