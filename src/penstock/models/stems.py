"""Stems: images to the vectors of their patches (Dosovitskiy et al., ICLR 2021, "An Image is Worth 16x16 Words").

Shapes: B samples, C channels, N patches, D width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from penstock.config.graph import PatchInput


class PatchStem(nn.Module):
    """One linear map per patch (Dosovitskiy et al., ICLR 2021, eq. 1): (B, C, S, S) → (B, N, D).

    A convolution whose stride is its kernel is this matrix product, and the product is faster; the weight is
    (D, C·P·P), the convolution's kernel flattened.
    """

    def __init__(self, images: PatchInput, width: int, **where: Any) -> None:
        super().__init__()
        self.patch = images.patch_size
        self.proj = nn.Linear(images.channels * images.patch_size**2, width, bias=images.bias, **where)

    def forward(self, images: Tensor) -> Tensor:
        batch, channels, height, width = images.shape
        p = self.patch
        patches = images.view(batch, channels, height // p, p, width // p, p)
        rows = patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * p * p)
        return self.proj(rows)  # type: ignore[no-any-return]


def images_of(patches: Tensor, images: PatchInput) -> Tensor:
    """The inverse of `PatchStem`'s split of images: patches (B, N, C·P·P) to images (B, C, S, S)."""
    p, side = images.patch_size, images.image_size // images.patch_size
    pixels = patches.view(-1, side, side, images.channels, p, p)
    return pixels.permute(0, 3, 1, 4, 2, 5).reshape(-1, images.channels, side * p, side * p)


class ConvStem(nn.Module):
    """Stride-2 3×3 convolutions with batch norm and ReLU, then one linear map (Xiao et al., NeurIPS 2021,
    §4).

    There is one convolution per halving of the image, log₂(patch) in all; widths double up to D.
    """

    def __init__(self, images: PatchInput, width: int, **where: Any) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = images.channels
        for wider in images.stem_widths(width):
            layers += [
                nn.Conv2d(channels, wider, 3, stride=2, padding=1, bias=False, **where),
                nn.BatchNorm2d(wider, **where),
                nn.ReLU(),
            ]
            channels = wider
        self.layers = nn.Sequential(*layers)
        self.proj = nn.Linear(channels, width, bias=images.bias, **where)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.layers(images).flatten(2)  # (B, C', N)
        # Contiguous, so that the product is one matrix product of all rows and its bias is added inside.
        return self.proj(maps.transpose(1, 2).contiguous())  # type: ignore[no-any-return]
