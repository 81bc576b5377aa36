"""The Vision Transformer (Dosovitskiy et al., ICLR 2021, "An Image is Worth 16x16 Words").

Shapes: B samples, C channels, N tokens, D width. `layout` says whether the blocks see (B, N, D) or (N, B, D);
the parameters, their names and the results are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.config.model import ViTConfig
from penstock.config.plan import AttentionBackend, Layout
from penstock.errors import ConfigError
from penstock.kernels.attention import BACKENDS
from penstock.models.layers import Attention, Block, Branch
from penstock.models.stem import ConvStem, PatchStem


class _Undrawn(TorchFunctionMode):
    """Within it torch's modules leave their weights as allocated, instead of drawing what is drawn again later."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (nn.init.kaiming_uniform_, nn.init.uniform_):
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


class ViT(nn.Module):
    """Images (B, C, S, S) to logits (B, classes); weights are drawn from torch's global generator.

    `device="meta"` builds without memory or computation. After `to_empty(device=…)` call `init_weights()`,
    which also restores what is not in a state dict.
    """

    def __init__(
        self,
        config: ViTConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        # Allocated first, so that each weight is drawn once, and alike however the model came to be.
        with _Undrawn():
            self._build(config, device, dtype)
        self.init_weights()

    def _build(self, config: ViTConfig, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        stem = PatchStem if config.stem == "patchify" else ConvStem
        self.stem: PatchStem | ConvStem = stem(config, device=device, dtype=dtype)
        self.class_token: nn.Parameter | None = None
        if config.classifier == "token":
            self.class_token = nn.Parameter(torch.empty(config.width, device=device, dtype=dtype))
        self.positions = nn.Parameter(torch.empty(config.tokens, config.width, device=device, dtype=dtype))
        self.dropout = nn.Dropout(config.dropout) if config.dropout else None
        last = max(config.depth - 1, 1)
        self.blocks = nn.ModuleList(
            Block(config, config.drop_path * i / last, device=device, dtype=dtype)
            for i in range(config.depth)
        )
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps, device=device, dtype=dtype)
        self.head = nn.Linear(config.width, config.classes, device=device, dtype=dtype)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw all weights anew: normal of deviation 0.02, biases 0, norms 1, convolutions by He et
        al.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.LayerNorm | nn.BatchNorm2d):
                module.reset_parameters()
            elif isinstance(module, Branch):
                module.init_weights()
        nn.init.normal_(self.positions, std=0.02)
        if self.class_token is not None:
            nn.init.normal_(self.class_token, std=0.02)

    @property
    def layout(self) -> Layout:
        """Order of the token tensor inside the blocks."""
        return "batch_second" if self.stem.sequence_first else "batch_first"

    def set_layout(self, layout: Layout) -> None:
        """Choose the order of the token tensor inside the blocks; parameters stay as they are."""
        if layout not in ("batch_first", "batch_second"):
            raise ConfigError(f"There is no layout {layout!r}; choose batch_first or batch_second.")
        for module in self.modules():
            if isinstance(module, PatchStem | ConvStem | Attention | Branch):
                module.sequence_first = layout == "batch_second"

    def set_attention(self, backend: AttentionBackend) -> None:
        """Choose the kernel of attention in every block."""
        if backend not in BACKENDS:
            raise ConfigError(
                f"There is no attention backend {backend!r}; choose one of {', '.join(BACKENDS)}."
            )
        for module in self.modules():
            if isinstance(module, Attention):
                module.backend = backend

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images)
        for block in self.blocks:
            x = block(x)
        return self.read_out(x)

    def embed(self, images: Tensor) -> Tensor:
        """Images (B, C, S, S) to tokens with positions, (B, N, D) or (N, B, D)."""
        size, channels = self.config.image_size, self.config.channels
        if images.shape[1:] != (channels, size, size):
            raise ConfigError(
                f"The model takes images of shape (batch, {channels}, {size}, {size}), but was given "
                f"{tuple(images.shape)}; resize the images, or build the model with another model.image_size."
            )
        x = self.stem(images)
        sequence_first = self.stem.sequence_first
        if self.class_token is None:
            x = x + (self.positions.unsqueeze(1) if sequence_first else self.positions)
        else:
            positions = self.positions[1:]
            x = x + (positions.unsqueeze(1) if sequence_first else positions)
            token = (self.class_token + self.positions[0]).to(x.dtype)
            dim = 0 if sequence_first else 1
            x = torch.cat([token.expand_as(x.narrow(dim, 0, 1)), x], dim=dim)
        return x if self.dropout is None else self.dropout(x)  # type: ignore[no-any-return]

    def read_out(self, x: Tensor) -> Tensor:
        """Tokens of the last block to logits (B, classes)."""
        dim = 0 if self.stem.sequence_first else 1
        if self.class_token is not None:
            # Only the class token is read, so only it is normalised; a copy, so that the rest can be freed.
            x = self.norm(x.select(dim, 0).clone())
        elif self.config.pool_norm == "before":
            x = self.norm(x).mean(dim)
        else:
            x = self.norm(x.mean(dim))
        return self.head(x)  # type: ignore[no-any-return]
