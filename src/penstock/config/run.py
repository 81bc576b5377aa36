"""One training run, whole: what, on which data, by which recipe and Plan. Stored resolved with every run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from penstock.config.model import PRESETS, ModelConfig
from penstock.config.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Where samples come from and how they are read."""

    source: str = "digits"
    """`digits` (embedded), `imagefolder:PATH` or `pack:PATH`."""
    workers: int = 0
    """Loader processes; 0 reads in the training process."""
    bad_images: Literal["fail", "skip"] = "fail"
    max_pixels: int = 100_000_000
    """An image whose header claims more is refused before it is decoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Augment:
    """Augmentation, applied in batches on the device. All off by default but flip and crop."""

    crop_scale_min: float = 0.08
    """Smallest share of the area a random resized crop keeps; 1 turns cropping off."""
    flip: float = 0.5
    color: float = 0.0
    """Strength in [0, 1] of random brightness, contrast, saturation and sharpness changes."""
    color_ops: int = 2
    """How many colour operations each image gets when `color` is above 0 (RandAugment's N)."""
    erase: float = 0.0
    """Probability of random erasing (Zhong et al., AAAI 2020)."""
    mixup: float = 0.0
    """Alpha of mixup (Zhang et al., ICLR 2018); 0 is off."""
    cutmix: float = 0.0
    """Alpha of CutMix (Yun et al., ICCV 2019); 0 is off."""
    label_smoothing: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How weights are learned. Learning rates are per step at the given global batch, not scaled behind your back."""

    epochs: float = 10.0
    steps: int | None = None
    """Optimizer steps; overrides `epochs`."""
    lr: float = 1e-3
    min_lr: float = 0.0
    warmup_steps: int = 0
    weight_decay: float = 0.05
    """Not applied to biases, norms and other one-dimensional parameters."""
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    clip_norm: float | None = 1.0
    ema_decay: float | None = None
    layer_decay: float = 1.0
    """Learning-rate factor per block from the head down (Bao et al., BEiT, ICLR 2022); 1 is off."""
    eval_every_epochs: float = 1.0
    augment: Augment = field(default_factory=Augment)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything that decides a run. The same values give the same run again."""

    model: ModelConfig = PRESETS["vit-digits"]
    data: DataConfig = field(default_factory=DataConfig)
    recipe: Recipe = field(default_factory=Recipe)
    plan: Plan = field(default_factory=Plan)
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    machine: str | None = None
    """Name of a shipped Machine or path of one that `penstock probe` stored; none probes the cached one."""
    seed: int = 0
    output: str = "runs/latest"
    init_from: str | None = None
    """Folder or safetensors file of weights to start from (Hugging Face, timm or Penstock names)."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 saves at the end of each epoch."""
    keep: int = 2
    """Newest checkpoints kept; at least 2."""
    log_every: int = 10
