"""The two-layer perceptron of a Transformer block."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from penstock.config.model import Mlp


def activate(x: Tensor, activation: Mlp) -> Tensor:
    """GELU (Hendrycks & Gimpel, 2016), exact or by its tanh approximation, at every element."""
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def mlp(
    x: Tensor, up: tuple[Tensor, Tensor | None], down: tuple[Tensor, Tensor | None], activation: Mlp
) -> Tensor:
    """down(activation(up(x))). x: (..., D); up: weight (M, D) and bias (M); down: weight (D, M) and bias
    (D).
    """
    return F.linear(activate(F.linear(x, *up), activation), *down)
