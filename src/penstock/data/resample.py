"""Crop, flip and resize a batch of stored images, each by its own box.

The filter is bilinear, with a triangle as wide as the shrinking (antialiased), like Pillow's `resize(box=...)` and
torch's `interpolate(antialias=True)`. Resampling is separable, so a crop with a flip and a resize is two small matrix
products, `rows @ image @ columns.T`: that is the reference, and what a GPU runs. On a CPU torch's 8-bit kernel does the
same image by image, five times faster than the products or `grid_sample`; it rounds to whole grey levels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

Boxes = NDArray[np.int64]
"""(B, 4): top, left, height, width of each crop, in stored pixels."""


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A small host array on the device, without waiting for it."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def _weights(start: Tensor, extent: Tensor, stored: int, size: int, mirror: Tensor | None) -> Tensor:
    """(B, size, stored): the weight of each stored pixel in each of the result. start, extent: (B,) float."""
    start, extent = start[:, None], extent[:, None]
    scale = extent / size
    position = (torch.arange(size, device=start.device) + 0.5) * scale
    if mirror is not None:
        position = torch.where(mirror[:, None], extent - position, position)
    pixel = torch.arange(stored, device=start.device) + 0.5
    distance = (pixel[None, None, :] - (start + position)[:, :, None]).abs()
    weight = (1 - distance / scale.clamp(min=1.0)[:, :, None]).clamp_(min=0)
    # Only pixels of the crop count. Dividing by the sum repeats the border pixel, as Pillow and torch do.
    inside = (pixel >= start) & (pixel < start + extent)
    weight = weight * inside[:, None, :]
    return weight / weight.sum(-1, keepdim=True)


def resample_products(images: Tensor, boxes: Boxes, flips: NDArray[np.bool_], size: int) -> Tensor:
    """(B, H, W, C) uint8 to (B, C, size, size) float32 in 0..255, by two batched matrix products."""
    device = images.device
    # fp16 holds 0..255 exactly, and weights to 11 bits. So tensor cores make an error below a tenth of a grey level,
    # and the result does not depend on the Plan's fp32 matmul setting.
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    box = to_device(boxes.astype(np.float32), device)
    mirror = to_device(flips, device)
    rows = _weights(box[:, 0], box[:, 2], images.shape[1], size, None).to(dtype)
    columns = _weights(box[:, 1], box[:, 3], images.shape[2], size, mirror).to(dtype)
    x = images.permute(0, 3, 1, 2).to(dtype)
    return (rows[:, None] @ x @ columns[:, None].transpose(-1, -2)).float()


def _resample_bytes(images: Tensor, boxes: Boxes, flips: NDArray[np.bool_], size: int) -> Tensor:
    """Resample like `resample_products`, in 8-bit arithmetic on a CPU: within one grey level of the reference."""
    batch, _, _, channels = images.shape
    out = torch.empty(batch, size, size, channels, dtype=torch.uint8)
    for image, target, (top, left, height, width), flip in zip(images, out, boxes.tolist(), flips.tolist()):
        crop = image[top : top + height, left : left + width]
        if (height, width) != (size, size):
            channels_first = crop.permute(2, 0, 1)[None]
            crop = F.interpolate(
                channels_first, size=(size, size), mode="bilinear", antialias=True, align_corners=False
            )[0].permute(1, 2, 0)
        target.copy_(crop.flip(1) if flip else crop)
    return out.permute(0, 3, 1, 2).contiguous().float()


def resample(images: Tensor, boxes: Boxes, flips: NDArray[np.bool_], size: int) -> Tensor:
    """Crop, flip and resize: (B, H, W, C) uint8 to (B, C, size, size) float32 in 0..255.

    `boxes` and `flips` are host arrays. Every box must lie in the image and hold at least one pixel.
    """
    unmoved = not flips.any() and bool(np.all(boxes == boxes[0]))
    top, left, height, width = boxes[0].tolist()
    if unmoved and (height, width) == (size, size):
        crop = images[:, top : top + size, left : left + size]
        return crop.permute(0, 3, 1, 2).contiguous().float()
    # Tiny images (the digits) are faster in one product than in a call for each.
    if images.device.type == "cpu" and max(images.shape[1:3]) > 16:
        return _resample_bytes(images, boxes, flips, size)
    return resample_products(images, boxes, flips, size)
