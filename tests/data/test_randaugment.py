"""RandAugment's operations against Pillow's, from which it was defined."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from penstock.config.run import Augment
from penstock.data.augment import augment_batch, draw
from penstock.data.randaugment import BLEND, DEGREES, OPERATIONS, SHEAR, SHIFT

AMOUNTS = torch.tensor([-1.0, -0.7, -0.33, -0.1, 0.0, 0.05, 0.2, 0.5, 0.9, 1.0])
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
