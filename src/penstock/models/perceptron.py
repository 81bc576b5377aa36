"""The perceptron of a Transformer block, and its activations."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from penstock.config.activations import ACTIVATIONS, UNGATED, Mlp
from penstock.config.layer import Layer
from penstock.config.stack import Stack
from penstock.kernels.bias_activation import apply_activation, gelu_tanh_in_inference
from penstock.kernels.dropout import Dropout


def activate(x: Tensor, activation: Mlp) -> Tensor:
    """The elementwise activation; for gated ones (Shazeer, 2020), the activation of the first half times the second
    half."""
    if activation == "gelu_tanh" and (made := gelu_tanh_in_inference(x)) is not None:
        return made
    if activation not in UNGATED:
        return apply_activation(x, activation)
    gate, x = x.chunk(2, dim=-1)
    limit = ACTIVATIONS[activation].limit
    if limit is not None:
        gate, x = gate.clamp(max=limit), x.clamp(-limit, limit) + 1.0
    return apply_activation(gate, UNGATED[activation]) * x


class MLP(nn.Module):
    """down(activation(up(x))), with dropout after the activation. The gate's rows come first in `up`. `hidden` is the
    hidden width, by default that of the layer.
    """

    def __init__(self, sizes: Stack, layer: Layer, *, hidden: int | None = None, **where: Any) -> None:
        super().__init__()
        self.activation = layer.perceptron.activation
        self.activated = False
        """Whether `up` applies the activation itself (`penstock.models.fuse`)."""
        hidden = hidden or layer.perceptron.width
        rows = hidden * (2 if layer.perceptron.gated else 1)
        self.up = nn.Linear(sizes.width, rows, bias=layer.bias, **where)
        self.dropout = Dropout(sizes.hidden_dropout) if sizes.hidden_dropout else None
        self.down = nn.Linear(hidden, sizes.width, bias=layer.bias, **where)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden = hidden if self.activated else activate(hidden, self.activation)
        return self.down(hidden if self.dropout is None else self.dropout(hidden))  # type: ignore[no-any-return]
