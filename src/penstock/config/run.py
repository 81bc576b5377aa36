"""One training run, whole: what, on which data, by which recipe and Plan. Stored resolved with every run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from penstock.config.convert import (
    Count,
    Natural,
    NotNegative,
    Positive,
    Probability,
    Range,
    Seed,
    Share,
    check_fields,
    nearest,
)
from penstock.config.model import PRESETS, ModelConfig
from penstock.config.plan import Plan
from penstock.errors import ConfigError

_DEVICE = re.compile(r"^(auto|cpu|cuda|cuda:[0-9]+)$")
SOURCES = ("digits", "imagefolder", "pack")


def _raise(problems: list[str]) -> None:
    if problems:
        raise ConfigError(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Where samples come from and how they are read."""

    SHORT_FIELD: ClassVar[str] = "source"
    """What `--data TEXT` sets."""

    source: str = "digits"
    """`digits` (embedded), `imagefolder:PATH` or `pack:PATH`."""
    workers: Natural = 0
    """Loader processes; 0 reads in the training process."""
    bad_images: Literal["fail", "skip"] = "fail"
    """What a broken image does: end the run, or be logged and passed over (up to 1 % of them)."""
    max_pixels: Count = 100_000_000
    """An image whose header claims more is refused before it is decoded."""

    def __post_init__(self) -> None:
        _raise(check_fields(self, "data") or list(self._problems()))

    def _problems(self) -> Iterator[str]:
        kind, _, path = self.source.partition(":")
        if kind not in SOURCES or (kind == "digits") == bool(path):
            yield (
                f"data.source is {self.source!r}, but must be digits, imagefolder:PATH or pack:PATH."
                f"{nearest(kind, SOURCES)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Augment:
    """Augmentation, applied in batches on the device. All off by default but flip and crop."""

    crop_scale_min: Share = 0.08
    """Smallest share of the area a random resized crop keeps; 1 turns cropping off."""
    flip: Share = 0.5
    color: Share = 0.0
    """Strength in [0, 1] of random brightness, contrast, saturation and sharpness changes."""
    color_ops: Natural = 2
    """How many colour operations each image gets when `color` is above 0 (RandAugment's N)."""
    erase: Share = 0.0
    """Probability of random erasing (Zhong et al., AAAI 2020)."""
    mixup: NotNegative = 0.0
    """Alpha of mixup (Zhang et al., ICLR 2018); 0 is off."""
    cutmix: NotNegative = 0.0
    """Alpha of CutMix (Yun et al., ICCV 2019); 0 is off."""
    label_smoothing: Share = 0.0

    def __post_init__(self) -> None:
        _raise(check_fields(self, "recipe.augment"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How weights are learned. Learning rates are per step at the given global batch, not scaled behind your back."""

    epochs: Positive = 10.0
    steps: Count | None = None
    """Optimizer steps; overrides `epochs`."""
    lr: Positive = 1e-3
    """Peak learning rate, reached after the warm-up."""
    min_lr: NotNegative = 0.0
    """Where the cosine ends."""
    warmup_steps: Natural = 0
    """Steps over which the learning rate rises linearly."""
    weight_decay: NotNegative = 0.05
    """Not applied to biases, norms and other one-dimensional parameters."""
    beta1: Probability = 0.9
    beta2: Probability = 0.999
    eps: Positive = 1e-8
    clip_norm: Positive | None = 1.0
    """Gradients are scaled down to this global 2-norm."""
    loss_scale: Positive | None = None
    """A constant loss scale, as `penstock scale` recommends one; if none, a dynamic one. Only fp16 has one."""
    spikes: Literal["log", "skip", "rewind"] = "log"
    """What a loss that leaps up does: be logged, have its step skipped, or send the run back to the newest checkpoint
    and on with later samples. Steps that are not finite are always skipped, and three in a row end the run."""
    spike_deviations: Positive = 8.0
    """A leap is a loss so many standard deviations above the mean of the last 50."""
    ema_decay: Share | None = None
    """Decay per step of the exponential moving average of the weights that evaluation then uses."""
    layer_decay: Annotated[float, Range(0, 1, open_low=True)] = 1.0
    """Learning-rate factor per block from the head down (Bao et al., BEiT, ICLR 2022); 1 is off."""
    eval_every_epochs: Positive = 1.0
    augment: Augment = field(default_factory=Augment)

    def __post_init__(self) -> None:
        _raise(check_fields(self, "recipe"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything that decides a run. The same values give the same run again."""

    model: ModelConfig = PRESETS["vit-digits"]
    """Name of a preset (`vit-s16`); its fields can be changed one by one beside it."""
    data: DataConfig = field(default_factory=DataConfig)
    """`digits`, `imagefolder:PATH` or `pack:PATH`."""
    recipe: Recipe = field(default_factory=Recipe)
    plan: Plan = field(default_factory=Plan)
    """How to run, as one line: `precision=O1 optimizer=fused`, or `baseline`."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    machine: str | None = None
    """Name of a shipped Machine or path of one that `penstock probe` stored; none probes the cached one."""
    seed: Seed = 0
    """Decides weights, sample order, augmentation and dropout."""
    output: str = "runs/latest"
    """Folder of the run: configuration, metrics, checkpoints, exported weights."""
    init_from: str | None = None
    """Folder or safetensors file of weights to start from (Hugging Face, timm or Penstock names)."""
    checkpoint_every: Natural = 0
    """Steps between checkpoints; 0 saves at the end of each epoch."""
    keep: Annotated[int, Range(2)] = 2
    """Newest checkpoints kept; at least 2."""
    save_in_background: bool = False
    """Copy the state and go on training while the copy is written; takes the memory of the copy on the host."""
    log_every: Count = 10
    """Steps between lines of the log; numbers stay on the device in between."""

    def __post_init__(self) -> None:
        _raise(check_fields(self, "") or list(self._problems()))

    def _problems(self) -> Iterator[str]:
        if not _DEVICE.match(self.device):
            yield f"device is {self.device!r}, but must be auto, cpu, cuda or cuda:N."
        if not self.output:
            yield "output is empty, but must name the folder of the run."
