"""Position embeddings for another image size than the one they were learned at."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.errors import ConfigError


def resize_positions(positions: Tensor, tokens: int, *, class_token: bool, antialias: bool = True) -> Tensor:
    """Bicubic interpolation of (tokens', D) on its square grid to (tokens, D), in fp32.

    The class token's row, where there is one, comes first and is kept. `antialias` is what timm does;
    transformers interpolates without, and so does Penstock for weights that come from there.

    Raises ConfigError when either number of tokens is no square grid.
    """
    if positions.shape[0] == tokens:
        return positions
    extra = int(class_token)
    old, new = (math.isqrt(n - extra) for n in (positions.shape[0], tokens))
    if old * old + extra != positions.shape[0] or new * new + extra != tokens:
        raise ConfigError(
            f"Position embeddings of {positions.shape[0]} tokens cannot become {tokens}: less the class "
            f"token, both must be squares. Check that model.classifier is the one the weights were trained "
            f"with."
        )
    grid = positions[extra:].float().T.reshape(1, -1, old, old)
    grid = F.interpolate(grid, size=(new, new), mode="bicubic", align_corners=False, antialias=antialias)
    patches = grid.reshape(-1, new * new).T.to(positions.dtype)
    return torch.cat([positions[:extra], patches])
