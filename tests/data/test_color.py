from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from penstock.data import color

FACTORS = [0.1, 0.6, 1.0, 1.4, 1.9]

PILLOW: dict[Callable[..., torch.Tensor], Callable[[Image.Image, float], Image.Image]] = {
    color.brightness: lambda image, factor: ImageEnhance.Brightness(image).enhance(factor),
    color.contrast: lambda image, factor: ImageEnhance.Contrast(image).enhance(factor),
    color.saturation: lambda image, factor: ImageEnhance.Color(image).enhance(factor),
    color.sharpness: lambda image, factor: ImageEnhance.Sharpness(image).enhance(factor),
    color.solarize: lambda image, factor: ImageOps.solarize(image, 256 * (1 - abs(factor - 1))),
    color.posterize: lambda image, factor: ImageOps.posterize(image, 8 - round(4 * abs(factor - 1))),
}


def batch(channels: int = 3) -> torch.Tensor:
    return torch.randint(0, 256, (len(FACTORS), channels, 12, 9)).float()


def by_pillow(images: torch.Tensor, operation: Callable[..., torch.Tensor]) -> torch.Tensor:
    results = []
    for image, factor in zip(images, FACTORS):
        array = image.permute(1, 2, 0).squeeze(-1).byte().numpy()
        result = np.asarray(PILLOW[operation](Image.fromarray(array), factor))
        results.append(torch.from_numpy(result.reshape(*image.shape[1:], -1).copy()).permute(2, 0, 1).float())
    return torch.stack(results)


@pytest.mark.parametrize("operation", color.OPERATIONS, ids=lambda operation: operation.__name__)
@pytest.mark.parametrize("channels", [1, 3])
def test_every_operation_is_pillows(operation: Callable[..., torch.Tensor], channels: int) -> None:
    images = batch(channels)
    result = operation(images, torch.tensor(FACTORS))
    # Pillow rounds grey, blur and result to whole levels: at most 1.9 × 0.5 and 0.5 apart, plus its cut to integers.
    torch.testing.assert_close(result, by_pillow(images, operation), rtol=0, atol=2.0)


@pytest.mark.parametrize("operation", color.OPERATIONS, ids=lambda operation: operation.__name__)
def test_factor_one_changes_nothing(operation: Callable[..., torch.Tensor]) -> None:
    images = batch()
    torch.testing.assert_close(operation(images, torch.ones(len(images))), images, rtol=0, atol=1e-4)


def test_each_image_gets_its_own_operations_in_turn() -> None:
    images = batch()
    chosen = np.array([[0, 1, 2, 3, 5], [4, 0, 0, 1, 2]])
    factors = np.array([FACTORS, FACTORS[::-1]], np.float32)
    expected = []
    for number, image in enumerate(images):
        changed = image[None]
        for turn in range(2):
            factor = torch.tensor(factors[turn, number : number + 1])
            changed = color.OPERATIONS[chosen[turn, number]](changed, factor)
        expected.append(changed[0])
    torch.testing.assert_close(color.apply(images.clone(), chosen, factors), torch.stack(expected))


def test_tiny_images_have_no_sharpness() -> None:
    images = torch.rand(2, 3, 2, 2)
    assert torch.equal(color.sharpness(images, torch.tensor([0.1, 1.9])), images)


def test_grey_images_never_draw_saturation() -> None:
    assert color.operations(3) == 6
    assert color.OPERATIONS[color.operations(1) :] == (color.saturation,)
