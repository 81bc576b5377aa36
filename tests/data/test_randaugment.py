"""RandAugment's operations against Pillow's, from which it was defined."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from penstock.config.run import Augment
from penstock.data.augment import augment_batch, draw
from penstock.data.randaugment import (
    BLEND,
    COLOR_OPERATIONS,
    DEGREES,
    OPERATIONS,
    SHEAR,
    SHIFT,
    apply,
    operations,
    saturation,
    sharpness,
)

AMOUNTS = torch.tensor([-1.0, -0.7, -0.33, -0.1, 0.0, 0.05, 0.2, 0.5, 0.9, 1.0])
FACTORS = [0.1, 0.6, 1.0, 1.4, 1.9]
SHAPES = [(1, 12, 9), (3, 32, 32), (3, 37, 53)]


def _moved(image: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
    fill = (128,) * len(image.getbands())
    return image.transform(
        image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST, fillcolor=fill if len(fill) > 1 else 128,
    )  # fmt: skip


def _rotated(image: Image.Image, degrees: float) -> Image.Image:
    bands = len(image.getbands())
    return image.rotate(degrees, Image.Resampling.NEAREST, fillcolor=(128,) * bands if bands > 1 else 128)


PILLOW: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "identity": lambda image, amount: image,
    "autocontrast": lambda image, amount: ImageOps.autocontrast(image),
    "equalize": lambda image, amount: ImageOps.equalize(image),
    "rotate": lambda image, amount: _rotated(image, DEGREES * amount),
    "solarize": lambda image, amount: ImageOps.solarize(image, 256 * (1 - abs(amount))),
    "saturation": lambda image, amount: ImageEnhance.Color(image).enhance(1 + BLEND * amount),
    "posterize": lambda image, amount: ImageOps.posterize(image, 8 - round(4 * abs(amount))),
    "contrast": lambda image, amount: ImageEnhance.Contrast(image).enhance(1 + BLEND * amount),
    "brightness": lambda image, amount: ImageEnhance.Brightness(image).enhance(1 + BLEND * amount),
    "sharpness": lambda image, amount: ImageEnhance.Sharpness(image).enhance(1 + BLEND * amount),
    "shear_x": lambda image, amount: _moved(image, (1, SHEAR * amount, 0, 0, 1, 0)),
    "shear_y": lambda image, amount: _moved(image, (1, 0, 0, SHEAR * amount, 1, 0)),
    "shift_x": lambda image, amount: _moved(image, (1, 0, SHIFT * image.width * amount, 0, 1, 0)),
    "shift_y": lambda image, amount: _moved(image, (1, 0, 0, 0, 1, SHIFT * image.height * amount)),
}
EXACT = (
    "identity", "equalize", "rotate", "solarize", "posterize", "shear_x", "shear_y", "shift_x", "shift_y",
)  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_is_pillows(name: str, shape: tuple[int, int, int]) -> None:
    images = torch.randint(0, 256, (len(AMOUNTS), *shape)).float()
    images[0] = 77.0  # of one level: nothing to spread
    images[1] = images[1] / 4 + 90
    images[1].round_()
    result = OPERATIONS[name](images.clone(), AMOUNTS)
    for image, amount, found in zip(images, AMOUNTS.tolist(), result):
        array = image.permute(1, 2, 0).squeeze(-1).byte().numpy()
        made = np.asarray(PILLOW[name](Image.fromarray(array), amount)).reshape(*shape[1:], shape[0])
        expected = torch.from_numpy(made.copy()).permute(2, 0, 1).float()
        # Pillow rounds greys, blurs and results to whole levels; what moves or counts pixels is the same to the pixel.
        torch.testing.assert_close(found, expected, rtol=0, atol=0.0 if name in EXACT else 2.0)


def test_there_are_the_papers_fourteen_and_all_are_drawn() -> None:
    assert len(OPERATIONS) == 14
    draws = draw(
        Augment(randaugment=2, randaugment_magnitude=7),
        stored=(32, 32), image_size=32, channels=3, seed=0, positions=np.arange(7000),
    )  # fmt: skip
    assert draws.moves.shape == draws.amounts.shape == (2, 7000)
    for turn in draws.moves:
        assert np.bincount(turn, minlength=14) == pytest.approx(np.full(14, 500), rel=0.2)
    assert set(np.unique(draws.amounts).tolist()) == {np.float32(-0.7).item(), np.float32(0.7).item()}
    assert abs(draws.amounts.mean()) < 0.05


def test_it_changes_images_and_nothing_else_that_is_drawn() -> None:
    images = torch.randint(0, 256, (8, 24, 24, 3), dtype=torch.uint8)
    labels = torch.arange(8)

    def run(config: Augment, chosen: slice = slice(None)) -> torch.Tensor:
        positions = np.arange(8)[chosen]
        made, _ = augment_batch(
            images[chosen], labels[chosen], config, image_size=16, classes=8, seed=3, positions=positions
        )
        return made

    plain, changed = run(Augment(erase=0.5)), run(Augment(erase=0.5, randaugment=2))
    assert not torch.equal(plain, changed)
    assert changed.min() >= -1
    assert changed.max() <= 1
    # The same whatever batch an image is in, and off by default.
    torch.testing.assert_close(run(Augment(erase=0.5, randaugment=2), slice(3, 6)), changed[3:6])
    assert torch.equal(run(Augment(erase=0.5, randaugment=0, randaugment_magnitude=1)), plain)


# Operations on colours alone.


@pytest.mark.parametrize("operation", COLOR_OPERATIONS, ids=lambda operation: operation.__name__)
def test_factor_one_changes_nothing(operation: Callable[..., torch.Tensor]) -> None:
    images = torch.randint(0, 256, (len(FACTORS), 3, 12, 9)).float()
    torch.testing.assert_close(operation(images, torch.ones(len(images))), images, rtol=0, atol=1e-4)


def test_each_image_gets_its_own_operations_in_turn() -> None:
    images = torch.randint(0, 256, (len(FACTORS), 3, 12, 9)).float()
    chosen = np.array([[0, 1, 2, 3, 5], [4, 0, 0, 1, 2]])
    factors = np.array([FACTORS, FACTORS[::-1]], np.float32)
    expected = []
    for number, image in enumerate(images):
        changed = image[None]
        for turn in range(2):
            factor = torch.tensor(factors[turn, number : number + 1])
            changed = COLOR_OPERATIONS[chosen[turn, number]](changed, factor)
        expected.append(changed[0])
    torch.testing.assert_close(apply(images.clone(), chosen, factors), torch.stack(expected))


def test_tiny_images_have_no_sharpness() -> None:
    images = torch.rand(2, 3, 2, 2)
    assert torch.equal(sharpness(images, torch.tensor([0.1, 1.9])), images)


def test_grey_images_never_draw_saturation() -> None:
    assert operations(3) == 6
    assert COLOR_OPERATIONS[operations(1) :] == (saturation,)
