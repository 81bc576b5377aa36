"""Colour operations on batches, in grey levels 0..255: the part of RandAugment that moves no pixel.

Cubuk et al., "RandAugment", CVPR Workshops 2020, section 3: each image gets N operations, drawn uniformly. Each takes
(B, C, H, W) float and one strength per image (B,), and keeps the shape. The definitions are those of Pillow's
`ImageEnhance` and `ImageOps`, without rounding to whole levels in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from penstock.data.resample import to_device


def _blend(base: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    """`base` at factor 0, the image at 1, and an extrapolation above 1."""
    return torch.lerp(base, images, factor[:, None, None, None]).clamp_(0, 255)


def grey(images: Tensor) -> Tensor:
    """(B, 1, H, W): the luma of ITU-R BT.601, as in Pillow's mode L."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.unbind(1)
    return (0.299 * red + 0.587 * green + 0.114 * blue)[:, None]


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    return (images * factor[:, None, None, None]).clamp_(0, 255)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    return _blend(grey(images).mean((1, 2, 3), keepdim=True).expand_as(images), images, factor)


def saturation(images: Tensor, factor: Tensor) -> Tensor:
    return _blend(grey(images).expand_as(images), images, factor)


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the 3 × 3 smoothing (1 1 1, 1 5 1, 1 1 1) / 13. The outermost pixels stay."""
    if min(images.shape[-2:]) < 3:
        return images
    channels = images.shape[1]
    kernel = torch.full((channels, 1, 3, 3), 1 / 13, device=images.device)
    kernel[:, :, 1, 1] = 5 / 13
    smooth = images.clone()
    smooth[:, :, 1:-1, 1:-1] = F.conv2d(images, kernel, groups=channels)
    return _blend(smooth, images, factor)


def solarize(images: Tensor, factor: Tensor) -> Tensor:
    """Invert what is at or above the threshold 256 × (1 − |factor − 1|)."""
    threshold = 256 * (1 - (factor - 1).abs())
    return torch.where(images < threshold[:, None, None, None], images, 255 - images)


def posterize(images: Tensor, factor: Tensor) -> Tensor:
    """Keep the highest 8 − round(4 |factor − 1|) bits."""
    step = torch.exp2((4 * (factor - 1).abs()).round())[:, None, None, None]
    return (images.round() / step).floor_() * step


OPERATIONS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    brightness, contrast, sharpness, solarize, posterize, saturation,
)  # fmt: skip
"""Saturation is last, because grey images draw from the others only."""


def operations(channels: int) -> int:
    """How many of the operations change an image of that many channels."""
    return len(OPERATIONS) if channels == 3 else len(OPERATIONS) - 1


def apply(
    images: Tensor,
    chosen: NDArray[np.int64],
    factors: NDArray[np.float32],
    operations: Sequence[Callable[[Tensor, Tensor], Tensor]] = OPERATIONS,
) -> Tensor:
    """In each round apply its operation to each image: `chosen` and `factors` are (rounds, B) host arrays.

    Images that share an operation are gathered and changed together, so that each operation is computed once. The host
    knows which they are, so that nothing waits for the device. Changes `images` in place.
    """
    order = np.argsort(chosen, axis=1, kind="stable")
    order_on_device = to_device(order, images.device)
    factors_on_device = to_device(np.take_along_axis(factors, order, axis=1), images.device)
    for turn in range(len(chosen)):
        start = 0
        for operation, count in zip(
            operations, np.bincount(chosen[turn], minlength=len(operations)).tolist()
        ):
            if count:
                rows = order_on_device[turn, start : start + count]
                changed = operation(
                    images.index_select(0, rows), factors_on_device[turn, start : start + count]
                )
                images.index_copy_(0, rows, changed)
                start += count
    return images
