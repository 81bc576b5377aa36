"""RandAugment's 14 operations on a batch on its device, in grey levels 0..255, with a draw for each image. The colour
operations are also used alone.

Cubuk et al., "RandAugment", CVPR Workshops 2020, section 3 and the operations of AutoAugment (CVPR 2019, table 6). Each
maps (B, C, H, W) float to the same shape, with one signed amount in [-1, 1] per image, (B,); colour operations have a
factor around 1 instead. Geometric operations equal Pillow's `Image.transform` and `rotate` with the nearest pixel
exactly; colour operations equal `ImageOps` and `ImageEnhance`, but without rounding to whole levels in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from penstock.data.resample import to_device

GREATEST_MAGNITUDE = 10
BLEND = 0.9
"""At the greatest magnitude a factor of brightness, contrast, saturation or sharpness is 0.1 or 1.9."""
DEGREES = 30.0
SHEAR = 0.3
SHIFT = 150 / 331
"""Largest shift, as a share of the side: AutoAugment moves images of 331 pixels by up to 150."""
FILL = 128.0
"""Value of pixels that come in from outside the image."""
_ONE = 1 << 16


def _affine(images: Tensor, across: list[Tensor], down: list[Tensor]) -> Tensor:
    """An affine transform with the nearest pixel: the result at (x, y) is the pixel at x' = a x + b y + c, y' = d x + e
    y + f, for `across` (a, b, c) and `down` (d, e, f) of pixel centres. In 16.16 fixed point, as in Pillow, so that
    both choose the same pixel.
    """
    height, width = images.shape[-2:]
    x = torch.arange(width, device=images.device)
    y = torch.arange(height, device=images.device)[:, None]

    def source(row: list[Tensor]) -> Tensor:
        a, b, c = row
        start, dx, dy = (
            (v * _ONE + 0.5).floor().long()[:, None, None] for v in (c + a * 0.5 + b * 0.5, a, b)
        )
        return (start + dx * x + dy * y) >> 16

    column, line = source(across), source(down)
    inside = (column >= 0) & (column < width) & (line >= 0) & (line < height)
    place = (line.clamp(0, height - 1) * width + column.clamp(0, width - 1)).flatten(1)
    moved = images.flatten(2).gather(2, place[:, None].expand(-1, images.shape[1], -1))
    return torch.where(inside[:, None], moved.view_as(images), FILL)


def _moving(
    *, shear_x: float = 0.0, shear_y: float = 0.0, shift_x: float = 0.0, shift_y: float = 0.0
) -> Callable[[Tensor, Tensor], Tensor]:
    """A geometric operation from its matrix at the greatest amount; shifts are shares of the side."""

    def move(images: Tensor, amount: Tensor) -> Tensor:
        amount, (height, width) = amount.double(), images.shape[-2:]
        one = torch.ones_like(amount)
        across = [one, shear_x * amount, shift_x * width * amount]
        return _affine(images, across, [shear_y * amount, one, shift_y * height * amount])

    return move


def _rotate(images: Tensor, amount: Tensor) -> Tensor:
    """Counter-clockwise about the centre for a positive amount."""
    angle = -amount.double() * (DEGREES * math.pi / 180)
    cos, sin = angle.cos(), angle.sin()
    x, y = images.shape[-1] / 2, images.shape[-2] / 2
    return _affine(images, [cos, sin, x - x * cos - y * sin], [-sin, cos, y + x * sin - y * cos])


def _identity(images: Tensor, amount: Tensor) -> Tensor:
    return images


def _autocontrast(images: Tensor, amount: Tensor) -> Tensor:
    """Each channel spread over 0..255."""
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    spread = high - low
    return torch.where(spread > 0, (images - low) * (255 / spread.clamp(min=1e-6)), images).clamp(0, 255)


def _equalize(images: Tensor, amount: Tensor) -> Tensor:
    """Each channel's levels spread so that all are about equally frequent."""
    levels = images.round().clamp_(0, 255).long().flatten(2)
    counts = torch.zeros(*levels.shape[:2], 256, dtype=torch.long, device=images.device)
    counts.scatter_add_(2, levels, torch.ones_like(levels))
    # The count of the highest level that occurs is left out; where nothing remains, the channel stays.
    highest = 255 - (counts.flip(2) > 0).long().argmax(2, keepdim=True)
    step = (levels.shape[2] - counts.gather(2, highest)) // 255
    table = (step // 2 + counts.cumsum(2) - counts) // step.clamp(min=1)
    changed = table.clamp_(0, 255).gather(2, levels).view_as(images).to(images.dtype)
    return torch.where((step > 0)[..., None], changed, images)


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


def _by_factor(
    operation: Callable[[Tensor, Tensor], Tensor], reach: float = BLEND
) -> Callable[[Tensor, Tensor], Tensor]:
    """A colour operation whose factor is 1 ± `reach` times the amount."""
    return lambda images, amount: operation(images, 1 + reach * amount)


COLOR_OPERATIONS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    brightness, contrast, sharpness, solarize, posterize, saturation,
)  # fmt: skip
"""Saturation is last, because grey images do not draw it."""


def operations(channels: int) -> int:
    """Number of colour operations that change an image with this many channels."""
    return len(COLOR_OPERATIONS) - (channels != 3)


def apply(
    images: Tensor, chosen: NDArray[np.int64], factors: NDArray[np.float32],
    operations: Sequence[Callable[[Tensor, Tensor], Tensor]] = COLOR_OPERATIONS,
) -> Tensor:  # fmt: skip
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


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "identity": _identity, "autocontrast": _autocontrast, "equalize": _equalize, "rotate": _rotate,
    "solarize": _by_factor(solarize, 1.0), "saturation": _by_factor(saturation),
    "posterize": _by_factor(posterize, 1.0), "contrast": _by_factor(contrast),
    "brightness": _by_factor(brightness), "sharpness": _by_factor(sharpness),
    "shear_x": _moving(shear_x=SHEAR), "shear_y": _moving(shear_y=SHEAR), "shift_x": _moving(shift_x=SHIFT),
    "shift_y": _moving(shift_y=SHIFT),
}  # fmt: skip
"""All are drawn equally often. Saturation leaves a grey image as it is."""
