from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from penstock.config.run import Augment
from penstock.data import augment as augmenting
from penstock.data.augment import Draws, Mix, augment_batch, center_batch, draw

NOTHING = Augment(crop_scale_min=1, flip=0)
EVERYTHING = Augment(color=0.7, erase=0.5, mixup=0.3, cutmix=1.0, label_smoothing=0.1)


def images(batch: int = 6, side: int = 16, channels: int = 3) -> torch.Tensor:
    return torch.randint(0, 256, (batch, side, side, channels), dtype=torch.uint8)


def labels(batch: int = 6) -> torch.Tensor:
    return torch.arange(batch) % 4


def run(config: Augment, x: torch.Tensor, positions: object = None, seed: int = 0, size: int = 16) -> tuple:
    where = np.arange(len(x)) if positions is None else np.asarray(positions)
    y = labels(len(x)).to(x.device)
    return augment_batch(x, y, config, image_size=size, classes=4, seed=seed, positions=where)


def drawn(config: Augment, count: int = 4000, size: int = 100, first: int = 0) -> Draws:
    positions = np.arange(first, first + count)
    return draw(config, stored=(size, size), image_size=size, channels=3, seed=0, positions=positions)


def test_without_augmentation_images_are_only_normalised() -> None:
    x = images()
    result, targets = run(NOTHING, x)
    torch.testing.assert_close(result, (x.permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5)
    assert torch.equal(targets, labels())


@pytest.mark.parametrize("config", [NOTHING, Augment(), EVERYTHING])
def test_shapes_types_and_range(config: Augment) -> None:
    for channels in (1, 3):
        result, targets = run(config, images(channels=channels), size=24)
        assert result.shape == (6, channels, 24, 24)
        assert result.dtype == torch.float32
        assert result.min() >= -1 - 1e-5
        assert result.max() <= 1 + 1e-5
        assert targets.dtype == (torch.int64 if targets.ndim == 1 else torch.float32)


def test_a_sample_depends_on_its_position_alone() -> None:
    """So that a batch may be split over ranks, and a run resumed anywhere."""
    config = Augment(color=0.7, erase=0.5, label_smoothing=0.1)
    x = images(8)
    whole, _ = run(config, x, range(100, 108))
    for start in (0, 3, 5):
        part, _ = run(config, x[start : start + 3], range(100 + start, 103 + start))
        torch.testing.assert_close(part, whole[start : start + 3], rtol=0, atol=1e-5)


def test_seed_and_position_decide_everything() -> None:
    x = images()
    first, second = run(EVERYTHING, x, range(6)), run(EVERYTHING, x, range(6))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    torch.manual_seed(99)
    assert torch.equal(run(EVERYTHING, x, range(6))[0], first[0])
    assert not torch.equal(run(EVERYTHING, x, range(6, 12))[0], first[0])
    assert not torch.equal(run(EVERYTHING, x, range(6), seed=1)[0], first[0])


def test_crops_have_the_wanted_area_ratio_and_place() -> None:
    boxes = drawn(Augment(crop_scale_min=0.25)).boxes
    top, left, height, width = boxes.T
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + height <= 100).all()
    assert (left + width <= 100).all()
    area, ratio = height * width / 1e4, width / height
    assert area.min() > 0.24
    assert area.max() > 0.95
    assert 0.74 < ratio.min() < 0.77
    assert 1.3 < ratio.max() < 1.36
    # Uniform on [0.25, 1]: mean 0.625; cutting sides that are too long takes a little off.
    assert abs(area.mean() - 0.61) < 0.02
    assert abs(np.log(ratio).mean()) < 0.02
    room = height < 90
    assert abs((top[room] / (100 - height[room])).mean() - 0.5) < 0.02


def test_flips_have_their_probability() -> None:
    assert abs(drawn(Augment(flip=0.3)).flips.mean() - 0.3) < 0.03
    x = images()
    torch.testing.assert_close(run(Augment(crop_scale_min=1, flip=1), x)[0], run(NOTHING, x)[0].flip(-1))


def test_every_colour_operation_is_drawn_alike() -> None:
    draws = drawn(Augment(color=0.5, color_ops=3))
    assert draws.operations.shape == draws.factors.shape == (3, 4000)
    counts = np.bincount(draws.operations.ravel(), minlength=6)
    assert ((counts - 2000) ** 2 / 2000).sum() < 25.7  # 99.99 % of chi-squared, 5 degrees of freedom
    assert abs(draws.factors - 1).max() == pytest.approx(0.45, abs=0.001)
    assert not len(drawn(Augment(color=0)).operations)


def test_colour_is_applied_as_drawn() -> None:
    config = Augment(crop_scale_min=1, flip=0, color=0.8)
    x = images()
    draws = drawn(config, 6, 16)
    expected = augmenting.randaugment.apply(x.permute(0, 3, 1, 2).float(), draws.operations, draws.factors)
    torch.testing.assert_close(run(config, x)[0], expected / 127.5 - 1)


def test_erasing_fills_one_rectangle() -> None:
    config = Augment(crop_scale_min=1, flip=0, erase=0.5)
    x = images(200)
    result, _ = run(config, x)
    plain, _ = run(NOTHING, x)
    draws = drawn(config, 200, 16)
    assert abs((draws.erased[:, 2] > 0).mean() - 0.5) < 0.12
    for row, (top, left, height, width) in enumerate(draws.erased.tolist()):
        expected = plain[row].clone()
        fill = torch.from_numpy(draws.fill[row])[:, None, None]
        expected[:, top : top + height, left : left + width] = fill
        torch.testing.assert_close(result[row], expected)
    area = draws.erased[:, 2] * draws.erased[:, 3] / 256
    assert area.max() < 0.45
    assert abs(draws.fill.mean()) < 0.15


def test_mixup_blends_with_the_reverse() -> None:
    config = Augment(crop_scale_min=1, flip=0, mixup=0.4)
    x = images()
    plain, _ = run(NOTHING, x)
    mixed, targets = run(config, x)
    mix = drawn(config, 6, 16).mix
    assert mix is not None
    assert mix.box is None
    torch.testing.assert_close(mixed, mix.share * plain + (1 - mix.share) * plain.flip(0))
    hot = F.one_hot(labels(), 4).float()
    torch.testing.assert_close(targets, mix.share * hot + (1 - mix.share) * hot.flip(0))


def test_cutmix_pastes_a_box_of_the_reverse() -> None:
    config = Augment(crop_scale_min=1, flip=0, cutmix=1.0)
    x = images()
    plain, _ = run(NOTHING, x)
    seen = 0
    for position in range(20):
        mixed, targets = run(config, x, range(position, position + 6))
        mix = drawn(config, 6, 16, position).mix
        assert mix is not None
        assert mix.box is not None
        top, left, height, width = mix.box
        expected = plain.clone()
        rows, columns = slice(top, top + height), slice(left, left + width)
        expected[:, :, rows, columns] = plain.flip(0)[:, :, rows, columns]
        torch.testing.assert_close(mixed, expected)
        hot = F.one_hot(labels(), 4).float()
        share = 1 - height * width / 256
        torch.testing.assert_close(targets, share * hot + (1 - share) * hot.flip(0))
        seen += height * width > 0
    assert seen > 10


@pytest.mark.parametrize("alpha", [0.2, pytest.param(1.0, marks=pytest.mark.sweep), 5.0])
def test_the_share_is_beta_distributed(alpha: float) -> None:
    mixes = [drawn(Augment(mixup=alpha), 1, 8, position).mix for position in range(2000)]
    shares = np.array([mix.share for mix in mixes if mix])
    assert abs(shares.mean() - 0.5) < 0.04
    assert abs(shares.var() - 1 / (4 * (2 * alpha + 1))) < 0.02


def test_mixup_and_cutmix_take_turns() -> None:
    config = Augment(mixup=0.8, cutmix=1.0)
    mixes = [drawn(config, 1, 8, position).mix for position in range(1000)]
    assert abs(np.mean([mix is not None and mix.box is None for mix in mixes]) - 0.5) < 0.07


def test_label_smoothing_is_torchs() -> None:
    logits = torch.randn(6, 4)
    targets = augmenting.soft_targets(labels(), 4, 0.1, None)
    torch.testing.assert_close(
        F.cross_entropy(logits, targets), F.cross_entropy(logits, labels(), label_smoothing=0.1)
    )
    mixed = augmenting.soft_targets(labels(), 4, 0.1, Mix(0.3, None))
    torch.testing.assert_close(mixed.sum(1), torch.ones(6))


def test_the_centre_is_cropped_for_evaluation() -> None:
    x = images(side=16)
    expected = x[:, 1:15, 1:15].permute(0, 3, 1, 2).float() / 127.5 - 1
    torch.testing.assert_close(center_batch(x, image_size=14), expected)
    whole = center_batch(x, image_size=32, crop_share=1.0)
    enlarged = F.interpolate(x.permute(0, 3, 1, 2).float(), size=(32, 32), mode="bilinear") / 127.5 - 1
    torch.testing.assert_close(whole, enlarged, rtol=0, atol=1.1 / 127.5)


def test_autocast_does_not_reach_the_data() -> None:
    x = images()
    outside = run(EVERYTHING, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = run(EVERYTHING, x)
    assert all(torch.equal(a, b) for a, b in zip(outside, inside))


@pytest.mark.gpu
def test_a_gpu_makes_the_same_choices_without_a_sync() -> None:
    x = images(32, 64)
    config = Augment(color=0.5, erase=0.5, mixup=0.3, cutmix=1.0, label_smoothing=0.1)
    on_cpu = run(config, x, size=56)
    on_device = x.cuda()
    run(config, on_device, size=56)
    where = np.arange(32)
    y = labels(32).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        on_gpu = augment_batch(on_device, y, config, image_size=56, classes=4, seed=0, positions=where)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # Solarize and posterize have steps, which a level's rounding can cross: so nearly all, not all.
    assert ((on_gpu[0].cpu() - on_cpu[0]).abs() < 3 / 127.5).float().mean() > 0.98
    torch.testing.assert_close(on_gpu[1].cpu(), on_cpu[1])
