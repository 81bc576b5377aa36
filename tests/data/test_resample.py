from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from penstock.data.resample import resample, resample_products

BOXES = np.array([[0, 0, 40, 30], [3, 5, 20, 17], [10, 0, 30, 8], [39, 29, 1, 1], [1, 2, 16, 16]])
NO_FLIPS = np.zeros(len(BOXES), bool)


def pictures(height: int = 40, width: int = 30, channels: int = 3) -> torch.Tensor:
    return torch.randint(0, 256, (len(BOXES), height, width, channels), dtype=torch.uint8)


def interpolated(images: torch.Tensor, boxes: np.ndarray, flips: np.ndarray, size: int) -> torch.Tensor:
    """Torch's own, in floating point, image by image."""
    results = []
    for image, (top, left, height, width), flip in zip(images, boxes.tolist(), flips.tolist()):
        crop = image[top : top + height, left : left + width].permute(2, 0, 1)[None].float()
        result = F.interpolate(crop, size=(size, size), mode="bilinear", antialias=True, align_corners=False)
        results.append(result.flip(-1) if flip else result)
    return torch.cat(results)


@pytest.mark.parametrize("size", [1, 7, 16, 64])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_products_are_torchs_antialiased_resize(size: int, channels: int) -> None:
    images, flips = pictures(channels=channels), np.array([True, False, True, True, False])
    expected = interpolated(images, BOXES, flips, size)
    torch.testing.assert_close(resample_products(images, BOXES, flips, size), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("size", [1, 7, 16, 64])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_cpus_bytes_are_the_products_rounded(size: int, channels: int) -> None:
    images, flips = pictures(channels=channels), np.array([False, True, False, True, True])
    fast = resample(images, BOXES, flips, size)
    assert fast.dtype == torch.float32
    assert fast.is_contiguous()
    # Each of the two passes rounds to whole levels, with weights of 8 to 16 bits.
    torch.testing.assert_close(fast, resample_products(images, BOXES, flips, size), rtol=0, atol=1.5)


def test_a_crop_of_the_wanted_size_is_exact() -> None:
    images = pictures()
    boxes = np.tile([3, 4, 16, 16], (len(images), 1))
    expected = images[:, 3:19, 4:20].permute(0, 3, 1, 2).float()
    assert torch.equal(resample(images, boxes, NO_FLIPS, 16), expected)
    flips = np.ones(len(images), bool)
    assert torch.equal(resample(images, boxes, flips, 16), expected.flip(-1))


def test_a_flat_image_stays_flat() -> None:
    images = torch.full((5, 40, 30, 3), 200, dtype=torch.uint8)
    for method in (resample, resample_products):
        result = method(images, BOXES, NO_FLIPS, 11)
        torch.testing.assert_close(result, torch.full_like(result, 200), rtol=0, atol=1e-3)


@pytest.mark.gpu
def test_a_gpu_gives_the_same_within_a_fifth_of_a_level() -> None:
    images, flips = pictures(), np.array([True, False, True, True, False])
    fast = resample(images.cuda(), BOXES, flips, 16).cpu()
    # fp16 rounds the sum over rows to 11 bits: half of 1/8 at 255.
    torch.testing.assert_close(fast, resample_products(images, BOXES, flips, 16), rtol=0, atol=0.2)
