"""Augmentation of a whole batch on its device, with random numbers that the host draws by counter.

`draw` makes every choice (boxes, flips, operations, mixing) as small host arrays that are pure functions of (seed,
stream position), and `augment_batch` applies them. So the choices are the same on a CPU and a GPU, on one rank or
eight, in a resumed run and an uninterrupted one, and nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.config.run import Augment
from penstock.data import randaugment
from penstock.data.hashing import BATCH, SAMPLE, generator, uniforms
from penstock.data.resample import Boxes, resample, to_device

Floats = NDArray[np.float32]

RATIO = 4 / 3
"""A crop's width over height is between 3/4 and 4/3 (Szegedy et al., CVPR 2015, section 6)."""
ERASE_AREA = (0.02, 1 / 3)
ERASE_RATIO = 1 / 0.3
"""Zhong et al., AAAI 2020, section 4.1: area and aspect ratio of the erased rectangle."""
COLOR_REACH = 0.9
"""At strength 1 a factor is in [0.1, 1.9], RandAugment's reach at its greatest magnitude."""


@dataclass(frozen=True, slots=True)
class Mix:
    """How a batch is mixed with its reverse: `share` of each image stays, the rest comes from its partner."""

    share: float
    box: tuple[int, int, int, int] | None
    """top, left, height, width that CutMix pastes; none for mixup."""


@dataclass(frozen=True, slots=True)
class Draws:
    """Every choice for one batch. B samples, N colour rounds."""

    boxes: Boxes
    flips: NDArray[np.bool_]
    operations: NDArray[np.int64]
    """(N, B)"""
    factors: Floats
    """(N, B), 1 is no change"""
    moves: NDArray[np.int64]
    """(N, B), operations of RandAugment"""
    amounts: Floats
    """(N, B) in [-1, 1]"""
    erased: Boxes
    """(B, 4), of height 0 where nothing is erased"""
    fill: Floats
    """(B, 3) in [-1, 1]: each erased rectangle gets one random colour, in normalised units"""
    mix: Mix | None


def draw(
    config: Augment, *, stored: tuple[int, int], image_size: int, channels: int, seed: int,
    positions: NDArray[np.int64],
) -> Draws:  # fmt: skip
    """Draw for the samples at these stream positions; `stored` is the (height, width) of the stored images.

    Per-sample choices depend on the sample's position alone, mixing on the first position of the batch.
    """
    rounds = config.color_ops if config.color else 0
    start, turns = 13 + 2 * rounds, config.randaugment
    table = uniforms(seed, SAMPLE, counters=positions, columns=start + 2 * turns)
    picked = table[:, 13 : 13 + rounds].T * randaugment.operations(channels)
    swing = 2 * table[:, 13 + rounds : start].T - 1
    amount = config.randaugment_magnitude / randaugment.GREATEST_MAGNITUDE
    erased = _draw_boxes(table[:, 6:10], ERASE_AREA, ERASE_RATIO, image_size, image_size)
    erased[table[:, 5] >= config.erase, 2] = 0
    return Draws(
        boxes=_draw_boxes(table[:, 0:4], (config.crop_scale_min, 1.0), RATIO, *stored),
        flips=table[:, 4] < config.flip,
        operations=picked.astype(np.int64),
        factors=(1 + COLOR_REACH * config.color * swing).astype(np.float32),
        moves=(table[:, start : start + turns].T * len(randaugment.OPERATIONS)).astype(np.int64),
        amounts=np.where(table[:, start + turns :].T < 0.5, -amount, amount).astype(np.float32),
        erased=erased,
        fill=2 * table[:, 10:13] - 1,
        mix=_draw_mix(config, image_size, seed, int(positions[0])) if len(positions) else None,
    )


def _draw_boxes(table: Floats, areas: tuple[float, float], most: float, height: int, width: int) -> Boxes:
    """Boxes (B, 4) drawn from uniform numbers (B, 4): a share of the area between two bounds, an aspect ratio up to
    `most` on a logarithmic scale, and a position. A side that is too long is cut."""
    low, high = areas
    if low >= 1:
        return np.tile(np.array((0, 0, height, width), np.int64), (len(table), 1))
    area = low + (high - low) * table[:, 0].astype(np.float64)
    ratio = most ** (2 * table[:, 1].astype(np.float64) - 1)
    boxes = np.empty((len(table), 4), np.int64)
    boxes[:, 2] = np.clip(np.rint(height * np.sqrt(area / ratio)), 1, height)
    boxes[:, 3] = np.clip(np.rint(width * np.sqrt(area * ratio)), 1, width)
    boxes[:, 0] = table[:, 2] * (height - boxes[:, 2] + 1)
    boxes[:, 1] = table[:, 3] * (width - boxes[:, 3] + 1)
    return boxes


def _draw_mix(config: Augment, size: int, seed: int, position: int) -> Mix | None:
    """Mixup or CutMix; if both are on, either with equal chance."""
    if not (config.mixup or config.cutmix):
        return None
    random = generator(seed, BATCH, position)
    cut = bool(config.cutmix) and (not config.mixup or random.random() < 0.5)
    alpha = config.cutmix if cut else config.mixup
    share = float(random.beta(alpha, alpha))
    if not cut:
        return Mix(share, None)
    # Yun et al., ICCV 2019, equation 2: a box of area 1 − share around a uniform centre, cut at the border. The
    # labels use the share that remains after the cut.
    side = size * np.sqrt(1 - share)
    center = random.integers(0, size, 2)
    low = np.clip(np.rint(center - side / 2), 0, size).astype(int)
    high = np.clip(np.rint(center + side / 2), 0, size).astype(int)
    height, width = (high - low).tolist()
    return Mix(1 - height * width / size**2, (int(low[0]), int(low[1]), height, width))


def normalize_(images: Tensor) -> Tensor:
    """Map 0..255 to [-1, 1], in place: mean and deviation 0.5, as the published ViT weights expect."""
    return images.mul_(1 / 127.5).sub_(1)


def erase(images: Tensor, boxes: Boxes, fill: Floats) -> Tensor:
    """Fill each image's box (B, 4) with its colour (B, 3)."""
    if not boxes[:, 2].any():
        return images
    edges = to_device(boxes, images.device)
    colors = to_device(fill[:, : images.shape[1]], images.device)
    line = torch.arange(images.shape[-1], device=images.device)
    rows = (line >= edges[:, 0:1]) & (line < edges[:, 0:1] + edges[:, 2:3])
    columns = (line >= edges[:, 1:2]) & (line < edges[:, 1:2] + edges[:, 3:4])
    return torch.where(rows[:, None, :, None] & columns[:, None, None, :], colors[:, :, None, None], images)


def mix_images(images: Tensor, mix: Mix) -> Tensor:
    """Blend with, or paste from, the batch in reverse order."""
    if mix.box is None:
        return torch.lerp(images.flip(0), images, mix.share)
    top, left, height, width = mix.box
    region = images[:, :, top : top + height, left : left + width]
    region.copy_(region.flip(0))
    return images


def soft_targets(labels: Tensor, classes: int, smoothing: float, mix: Mix | None) -> Tensor:
    """(B,) to (B, classes): 1 − s on the class and s over all (Szegedy et al., CVPR 2016, section 7)."""
    off = smoothing / classes
    targets = torch.full((len(labels), classes), off, device=labels.device)
    targets.scatter_(1, labels[:, None], 1 - smoothing + off)
    return targets if mix is None else torch.lerp(targets.flip(0), targets, mix.share)


@torch.no_grad()
def augment_batch(
    images: Tensor, labels: Tensor, config: Augment, *, image_size: int, classes: int, seed: int,
    positions: NDArray[np.int64],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Augment a batch on the device it is on.

    images (B, H, W, C) uint8 and labels (B,) int64 become images (B, C, image_size, image_size) float32 in
    [-1, 1] and targets: (B,) int64, or (B, classes) float32 where mixup, CutMix or label smoothing are on.
    `positions` (B,) are the samples' places in the stream; with `seed` they decide everything random.
    """
    height, width, channels = images.shape[1:]
    draws = draw(
        config, stored=(height, width), image_size=image_size, channels=channels, seed=seed, positions=positions
    )  # fmt: skip
    with torch.autocast(images.device.type, enabled=False):
        x = resample(images, draws.boxes, draws.flips, image_size)
        if len(draws.operations):
            x = randaugment.apply(x, draws.operations, draws.factors)
        if len(draws.moves):
            x = randaugment.apply(x, draws.moves, draws.amounts, tuple(randaugment.OPERATIONS.values()))
        x = erase(normalize_(x), draws.erased, draws.fill)
        if draws.mix is not None:
            x = mix_images(x, draws.mix)
        if draws.mix is None and not config.label_smoothing:
            return x, labels
        return x, soft_targets(labels, classes, config.label_smoothing, draws.mix)


@torch.no_grad()
def center_batch(images: Tensor, *, image_size: int, crop_share: float = 0.875) -> Tensor:
    """Images for evaluation, without randomness: the central `crop_share` of each side, resized and normalised."""
    height, width = images.shape[1:3]
    tall, wide = max(1, round(height * crop_share)), max(1, round(width * crop_share))
    box = ((height - tall) // 2, (width - wide) // 2, tall, wide)
    boxes = np.tile(np.array(box, np.int64), (len(images), 1))
    with torch.autocast(images.device.type, enabled=False):
        return normalize_(resample(images, boxes, np.zeros(len(images), bool), image_size))
