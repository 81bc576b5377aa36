"""The Transformer block.

Shapes: B samples, N tokens, D width, H heads, K features per head. Tokens come as (B, N, D), or as (N, B, D)
where `sequence_first` is set. Only attention and stochastic depth depend on the order.

Modules only ever call their submodules and read sizes from the tensors that they get. So a submodule may be replaced by
one that holds a share of the weights, or computes in another type.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.config.plan import AttentionBackend
from penstock.config.stack import Mlp, Stack
from penstock.kernels.attention import split_heads, token_attention

_RATE_UNIT = 2.0**-24


def activate(x: Tensor, activation: Mlp) -> Tensor:
    """GELU (Hendrycks & Gimpel, 2016), exact or by its tanh approximation, at every element."""
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def drop_path(branch: Tensor, rate: Tensor, *, batch_dim: int) -> Tensor:
    """Stochastic depth (Huang et al., ECCV 2016, eq. 2): zero the branch of each sample with probability `rate`, and
    scale those kept by 1 / (1 − rate).

    branch: (B, N, D), or (N, B, D) with `batch_dim` 1. `rate` is a tensor, not a number, so that blocks of
    different rates share one compiled graph and nothing waits for the device.
    """
    shape = [1] * branch.dim()
    shape[batch_dim] = branch.shape[batch_dim]
    keep = 1.0 - rate
    mask = (torch.rand(shape[batch_dim], device=branch.device) < keep).to(torch.float32) / keep
    return branch * mask.to(branch.dtype).view(shape)


class Attention(nn.Module):
    """Multi-head self-attention; `backend` and `sequence_first` change how it is computed and never its result.

    There are as many heads as the projection returns. `where` are the device and the type of the weights.
    """

    def __init__(self, sizes: Stack, **where: Any) -> None:
        super().__init__()
        self.head_width = sizes.head_width
        self.backend: AttentionBackend = "sdpa"
        self.sequence_first = False
        inner = sizes.heads * sizes.head_width
        # Rows are ordered (head, {q, k, v}, K); kernels/attention.py says why.
        self.qkv = nn.Linear(sizes.width, 3 * inner, bias=sizes.qkv_bias, **where)
        self.q_norm: nn.LayerNorm | None = None
        self.k_norm: nn.LayerNorm | None = None
        if sizes.qk_norm:
            self.q_norm = nn.LayerNorm(sizes.head_width, eps=sizes.norm_eps, **where)
            self.k_norm = nn.LayerNorm(sizes.head_width, eps=sizes.norm_eps, **where)
        self.out = nn.Linear(inner, sizes.width, **where)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split_heads(self.qkv(x), self.head_width)
        if self.q_norm is not None and self.k_norm is not None:
            # Autocast widens norms to fp32, but attention runs in the type of v.
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        mixed = token_attention(q, k, v, self.backend, sequence_first=self.sequence_first)
        return self.out(mixed)  # type: ignore[no-any-return]


class MLP(nn.Module):
    """down(activation(up(x))), with dropout after the activation."""

    def __init__(self, sizes: Stack, **where: Any) -> None:
        super().__init__()
        self.activation = sizes.mlp
        self.up = nn.Linear(sizes.width, sizes.mlp_width, **where)
        self.dropout = nn.Dropout(sizes.dropout) if sizes.dropout else None
        self.down = nn.Linear(sizes.mlp_width, sizes.width, **where)

    def forward(self, x: Tensor) -> Tensor:
        hidden = activate(self.up(x), self.activation)
        return self.down(hidden if self.dropout is None else self.dropout(hidden))  # type: ignore[no-any-return]


class Branch(nn.Module):
    """What happens to a residual branch before it is added: dropout, LayerScale, stochastic depth.

    LayerScale (Touvron et al., ICCV 2021, "Going deeper with Image Transformers", eq. 4) is a learned factor
    per feature, at first `layer_scale`; none leaves it out. `drop_path` is the rate of stochastic depth, none leaves it
    out. It is held as an integer, which casting the model to half precision leaves alone, and as a tensor, so that
    blocks of different rates share one compiled graph.
    """

    drop_rate: Tensor

    def __init__(
        self, sizes: Stack, *, layer_scale: float | None = None, drop_path: float | None = None, **where: Any
    ) -> None:
        super().__init__()
        self.sequence_first = False
        self.rate = drop_path
        self.initial_scale = layer_scale
        self.dropout = nn.Dropout(sizes.dropout) if sizes.dropout else None
        self.scale: nn.Parameter | None = None
        if layer_scale is not None:
            self.scale = nn.Parameter(torch.empty(sizes.width, **where))
        self.stochastic = drop_path is not None  # read in `forward`: a rate there would be compiled in
        if self.stochastic:
            rate = torch.zeros((), dtype=torch.int32, device=where.get("device"))
            self.register_buffer("drop_rate", rate, persistent=False)

    def init_weights(self) -> None:
        """LayerScale to its initial value, and the rate of stochastic depth to this block's."""
        if self.scale is not None and self.initial_scale is not None:
            nn.init.constant_(self.scale, self.initial_scale)
        if self.rate is not None:
            with torch.no_grad():
                self.drop_rate.fill_(round(self.rate / _RATE_UNIT))

    def forward(self, branch: Tensor) -> Tensor:
        if self.dropout is not None:
            branch = self.dropout(branch)
        if self.scale is not None:
            branch = branch * self.scale
        if self.stochastic and self.training:
            rate = self.drop_rate.to(torch.float32) * _RATE_UNIT
            branch = drop_path(branch, rate, batch_dim=1 if self.sequence_first else 0)
        return branch


class Block(nn.Module):
    """A pre-norm block: x + attention(norm(x)), then x + mlp(norm(x)). `branch` are the options of `Branch`."""

    def __init__(self, sizes: Stack, branch: dict[str, Any], **where: Any) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(sizes.width, eps=sizes.norm_eps, **where)
        self.attention = Attention(sizes, **where)
        self.branch1 = Branch(sizes, **branch, **where)
        self.norm2 = nn.LayerNorm(sizes.width, eps=sizes.norm_eps, **where)
        self.mlp = MLP(sizes, **where)
        self.branch2 = Branch(sizes, **branch, **where)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.branch1(self.attention(self.norm1(x)))
        return x + self.branch2(self.mlp(self.norm2(x)))  # type: ignore[no-any-return]
