"""The nonlinearity of a perceptron."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from penstock.config.model import Mlp


def activate(x: Tensor, activation: Mlp) -> Tensor:
    """GELU (Hendrycks & Gimpel, 2016), exact or by its tanh approximation, at every element."""
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
