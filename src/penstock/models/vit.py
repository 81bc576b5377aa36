"""The Vision Transformer (Dosovitskiy et al., ICLR 2021, "An Image is Worth 16x16 Words").

Shapes: B samples, C channels, N tokens, D width. `token_order` says whether the blocks see (B, N, D) or (N, B, D);
the parameters, their names and the results are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from penstock.config.model import ViTConfig
from penstock.errors import ConfigError
from penstock.kernels.dropout import Dropout
from penstock.models.base import Switched, Undrawn
from penstock.models.block import Block, Branch


class PatchStem(nn.Module):
    """One linear map per patch (Dosovitskiy et al., ICLR 2021, eq. 1): (B, C, H, W) → (B, N, D) or (N, B, D).

    A convolution whose stride is its kernel is this matrix product, and the product is faster; the weight is
    (D, C·P·P), the convolution's kernel flattened.
    """

    def __init__(self, config: ViTConfig, **where: Any) -> None:
        super().__init__()
        self.patch = config.patch_size
        self.sequence_first = False
        features = config.channels * config.patch_size**2
        self.proj = nn.Linear(features, config.width, **where)

    def forward(self, images: Tensor) -> Tensor:
        batch, channels, height, width = images.shape
        p = self.patch
        patches = images.view(batch, channels, height // p, p, width // p, p)
        order = (2, 4, 0, 1, 3, 5) if self.sequence_first else (0, 2, 4, 1, 3, 5)
        rows = patches.permute(order).reshape(-1, channels * p * p)
        shape = (-1, batch) if self.sequence_first else (batch, -1)
        return self.proj(rows.view(*shape, rows.shape[-1]))  # type: ignore[no-any-return]


class ConvStem(nn.Module):
    """Stride-2 3×3 convolutions with batch norm and ReLU, then one linear map (Xiao et al., NeurIPS 2021,
    §4).

    There is one convolution per halving of the image, log₂(patch) in all; widths double up to D.
    """

    def __init__(self, config: ViTConfig, **where: Any) -> None:
        super().__init__()
        self.sequence_first = False
        layers: list[nn.Module] = []
        channels = config.channels
        for width in config.stem_widths:
            layers += [
                nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False, **where),
                nn.BatchNorm2d(width, **where),
                nn.ReLU(),
            ]
            channels = width
        self.layers = nn.Sequential(*layers)
        self.proj = nn.Linear(channels, config.width, **where)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.layers(images).flatten(2)  # (B, C', N)
        order = (2, 0, 1) if self.sequence_first else (0, 2, 1)
        # Contiguous, so that the product is one matrix product of all rows and its bias is added inside.
        return self.proj(maps.permute(order).contiguous())  # type: ignore[no-any-return]


class ViT(Switched):
    """Images (B, C, S, S) to logits (B, classes); weights are drawn from torch's global generator.

    With `device="meta"` nothing is allocated or computed. Then call `to_empty(device=…)` and `init_weights()`, which
    also sets what no state dict has.
    """

    def __init__(
        self, config: ViTConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        # Allocated first, so that each weight is drawn once, and alike however the model came to be.
        with Undrawn():
            self._build(config, device=device, dtype=dtype)
        self.init_weights()

    def _build(self, config: ViTConfig, **where: Any) -> None:
        stem = PatchStem if config.stem == "patchify" else ConvStem
        self.stem: PatchStem | ConvStem = stem(config, **where)
        self.class_token: nn.Parameter | None = None
        if config.classifier == "token":
            self.class_token = nn.Parameter(torch.empty(config.width, **where))
        self.positions = nn.Parameter(torch.empty(config.tokens, config.width, **where))
        self.dropout = Dropout(config.dropout) if config.dropout else None
        self.blocks = nn.ModuleList()
        for i, layer in enumerate(config.layers):
            rate = config.drop_path * i / max(config.depth - 1, 1) if config.drop_path else None
            self.blocks.append(
                Block(config, layer, {"layer_scale": config.layer_scale, "drop_path": rate}, **where)
            )
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps, **where)
        self.head = nn.Linear(config.width, config.classes, **where)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw all weights: normal of deviation 0.02, biases 0, norms 1, convolutions by He et al."""
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
