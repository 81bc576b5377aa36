"""From images to tokens: one linear map per patch, or a few strided convolutions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock.config.model import ViTConfig
from penstock.planner.operations import conv_widths


class PatchStem(nn.Module):
    """One linear map per patch (Dosovitskiy et al., ICLR 2021, eq. 1): (B, C, H, W) → (B, N, D) or (N, B, D).

    A convolution whose stride is its kernel is this matrix product, and the product is faster; the weight is
    (D, C·P·P), the convolution's kernel flattened.
    """

    def __init__(
        self, config: ViTConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.patch = config.patch_size
        self.sequence_first = False
        features = config.channels * config.patch_size**2
        self.proj = nn.Linear(features, config.width, device=device, dtype=dtype)

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

    def __init__(
        self, config: ViTConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.sequence_first = False
        layers: list[nn.Module] = []
        channels = config.channels
        for width in conv_widths(config):
            layers += [
                nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False, device=device, dtype=dtype),
                nn.BatchNorm2d(width, device=device, dtype=dtype),
                nn.ReLU(),
            ]
            channels = width
        self.layers = nn.Sequential(*layers)
        self.proj = nn.Linear(channels, config.width, device=device, dtype=dtype)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.layers(images).flatten(2)  # (B, C', N)
        order = (2, 0, 1) if self.sequence_first else (0, 2, 1)
        # Contiguous, so that the product is one matrix product of all rows and its bias is added inside.
        return self.proj(maps.permute(order).contiguous())  # type: ignore[no-any-return]
