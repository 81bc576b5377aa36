"""The parts of a Transformer block.

Shapes: B samples, N tokens, D width, H heads, K features per head. Tokens come as (B, N, D), or as (N, B, D)
where `sequence_first` is set; everything but attention and stochastic depth is blind to the order.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock.config.model import ViTConfig
from penstock.config.plan import AttentionBackend
from penstock.kernels.activation import activate
from penstock.kernels.attention import attend, split_heads
from penstock.kernels.drop_path import drop_path

_RATE_UNIT = 2.0**-24


class Attention(nn.Module):
    """Multi-head self-attention; `backend` and `sequence_first` change how it is computed and never its result.

    The number of heads is read from what the projection returns, so a projection that holds some of the heads computes
    these.
    """

    def __init__(
        self, config: ViTConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.backend: AttentionBackend = "sdpa"
        self.sequence_first = False
        # Rows are ordered (head, {q, k, v}, K); kernels/attention.py says why.
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=config.qkv_bias, device=device, dtype=dtype)
        self.q_norm: nn.LayerNorm | None = None
        self.k_norm: nn.LayerNorm | None = None
        if config.qk_norm:
            self.q_norm = nn.LayerNorm(config.head_width, eps=config.norm_eps, device=device, dtype=dtype)
            self.k_norm = nn.LayerNorm(config.head_width, eps=config.norm_eps, device=device, dtype=dtype)
        self.out = nn.Linear(config.width, config.width, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split_heads(self.qkv(x), self.head_width)
        if self.q_norm is not None and self.k_norm is not None:
            # Autocast widens norms to fp32, but attention runs in the type of v.
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        return self.out(attend(q, k, v, self.backend, sequence_first=self.sequence_first))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """down(activation(up(x))), with dropout after the activation."""

    def __init__(
        self, config: ViTConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.activation = config.mlp
        self.up = nn.Linear(config.width, config.mlp_width, device=device, dtype=dtype)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else None
        self.down = nn.Linear(config.mlp_width, config.width, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        hidden = activate(self.up(x), self.activation)
        return self.down(hidden if self.dropout is None else self.dropout(hidden))  # type: ignore[no-any-return]


class Branch(nn.Module):
    """What happens to a residual branch before it is added: dropout, LayerScale, stochastic depth.

    LayerScale (Touvron et al., ICCV 2021, "Going deeper with Image Transformers", eq. 4) is a learned factor
    per feature. The rate of stochastic depth is held as an integer, which casting the model to half precision
    leaves alone, and as a tensor, so that blocks of different rates share one compiled graph.
    """

    drop_rate: Tensor

    def __init__(
        self, config: ViTConfig, rate: float, *, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.sequence_first = False
        self.rate = rate
        self.initial_scale = config.layer_scale
        self.dropout = nn.Dropout(config.dropout) if config.dropout else None
        self.scale: nn.Parameter | None = None
        if config.layer_scale is not None:
            self.scale = nn.Parameter(torch.empty(config.width, device=device, dtype=dtype))
        self.stochastic = config.drop_path > 0.0
        if self.stochastic:
            self.register_buffer(
                "drop_rate", torch.zeros((), dtype=torch.int32, device=device), persistent=False
            )

    def init_weights(self) -> None:
        """LayerScale to its initial value, and the rate of stochastic depth to this block's."""
        if self.scale is not None and self.initial_scale is not None:
            nn.init.constant_(self.scale, self.initial_scale)
        if self.stochastic:
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
    """A pre-norm Transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, config: ViTConfig, drop_path_rate: float, *, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, eps=config.norm_eps, device=device, dtype=dtype)
        self.attention = Attention(config, device=device, dtype=dtype)
        self.branch1 = Branch(config, drop_path_rate, device=device, dtype=dtype)
        self.norm2 = nn.LayerNorm(config.width, eps=config.norm_eps, device=device, dtype=dtype)
        self.mlp = MLP(config, device=device, dtype=dtype)
        self.branch2 = Branch(config, drop_path_rate, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.branch1(self.attention(self.norm1(x)))
        return x + self.branch2(self.mlp(self.norm2(x)))  # type: ignore[no-any-return]
