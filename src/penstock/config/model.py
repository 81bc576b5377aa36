"""What is trained: the shape of a model, and nothing of how it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.config.convert import check_fields, nearest
from penstock.errors import ConfigError

Classifier = Literal["token", "pooled"]
Stem = Literal["patchify", "conv"]
PoolNorm = Literal["before", "after"]
Activation = Literal["gelu", "gelu_tanh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ViTConfig:
    """A Vision Transformer (Dosovitskiy et al., ICLR 2021, "An Image is Worth 16x16 Words", Table 1).

    Sizes count pixels, patches or features; `mlp_width` is the hidden width of the MLP, not a ratio, because g/14's
    ratio (6144 / 1408) is no round number.
    """

    family: Literal["vit"] = "vit"
    image_size: int = 224
    patch_size: int = 16
    channels: int = 3
    width: int = 768
    depth: int = 12
    heads: int = 12
    mlp_width: int = 3072
    classes: int = 1000
    classifier: Classifier = "token"
    """`token`: a learned class token is read out. `pooled`: the mean over patches is, so 196 tokens instead of 197."""
    stem: Stem = "patchify"
    """`patchify`: one linear map per patch. `conv`: 3×3 stride-2 convolutions (Xiao et al., NeurIPS 2021)."""
    pool_norm: PoolNorm = "before"
    """Whether the final norm acts on the tokens before pooling, or on the pooled vector after (timm's `fc_norm`)."""
    activation: Activation = "gelu"
    qkv_bias: bool = True
    qk_norm: bool = False
    layer_scale: float | None = None
    """Initial value of LayerScale (Touvron et al., ICCV 2021), or none."""
    drop_path: float = 0.0
    """Stochastic depth at the last block; rises linearly from 0 at the first."""
    dropout: float = 0.0
    norm_eps: float = 1e-6

    @classmethod
    def parse(cls, name: str) -> ViTConfig:
        """The preset called `name`. Raises `ConfigError` naming the nearest."""
        if name not in PRESETS:
            raise ConfigError(
                f"There is no model preset {name!r}.{nearest(name, PRESETS)} Presets are {', '.join(PRESETS)}."
            )
        return PRESETS[name]

    def short_form(self) -> str:
        """The name of the preset that this is, or `custom`."""
        return next((name for name, preset in PRESETS.items() if preset == self), "custom")

    def __post_init__(self) -> None:
        problems = check_fields(self, "model") or self._problems()
        if problems:
            raise ConfigError(problems)

    def _problems(self) -> list[str]:
        problems = [
            f"model.{name} is {getattr(self, name)}, but must be at least 1."
            for name in (
                "image_size",
                "patch_size",
                "channels",
                "width",
                "depth",
                "heads",
                "mlp_width",
                "classes",
            )
            if getattr(self, name) < 1
        ]
        if problems:
            return problems
        if self.image_size % self.patch_size:
            down = self.image_size // self.patch_size * self.patch_size
            near = f"{down} or {down + self.patch_size}" if down else f"{self.patch_size}"
            problems.append(
                f"model.image_size {self.image_size} is no multiple of model.patch_size {self.patch_size}; "
                f"the nearest that fit are {near}."
            )
        if self.width % self.heads:
            problems.append(
                f"model.width {self.width} cannot be split over model.heads {self.heads}; "
                f"use a number of heads that divides {self.width}."
            )
        if self.stem == "conv" and (self.patch_size < 2 or self.patch_size & (self.patch_size - 1)):
            problems.append(
                f"model.stem 'conv' halves the image with each layer, so model.patch_size must be a power of two "
                f"of at least 2, not {self.patch_size}; use stem 'patchify'."
            )
        problems.extend(
            f"model.{name} is {getattr(self, name)}, but is a probability in [0, 1)."
            for name in ("drop_path", "dropout")
            if not 0.0 <= getattr(self, name) < 1.0
        )
        return problems

    @property
    def patches(self) -> int:
        """Patches in an image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def tokens(self) -> int:
        """Tokens the blocks see: the patches, and the class token where there is one."""
        return self.patches + (self.classifier == "token")

    @property
    def head_width(self) -> int:
        """Features of one attention head."""
        return self.width // self.heads


ModelConfig = ViTConfig
"""Every model family's configuration; a union once there is a second family."""


def _vit(width: int, depth: int, heads: int, mlp_width: int, patch_size: int) -> ViTConfig:
    return ViTConfig(width=width, depth=depth, heads=heads, mlp_width=mlp_width, patch_size=patch_size)


# Dosovitskiy et al. 2021 Table 1 (B, L, H); Touvron et al. 2021 Table 1 (Ti, S); Zhai et al. 2022 Table 2 (g).
PRESETS: dict[str, ModelConfig] = {
    "vit-ti16": _vit(192, 12, 3, 768, 16),
    "vit-s16": _vit(384, 12, 6, 1536, 16),
    "vit-b16": _vit(768, 12, 12, 3072, 16),
    "vit-b32": _vit(768, 12, 12, 3072, 32),
    "vit-l16": _vit(1024, 24, 16, 4096, 16),
    "vit-h14": _vit(1280, 32, 16, 5120, 14),
    "vit-h16": _vit(1280, 32, 16, 5120, 16),
    "vit-g14": _vit(1408, 40, 16, 6144, 14),
    # Small enough to learn the embedded digits in a minute on a laptop: 8×8 pixels, 16 patches.
    "vit-digits": ViTConfig(
        image_size=8, patch_size=2, channels=1, width=96, depth=6, heads=3, mlp_width=384, classes=10,
        classifier="pooled",
    ),
}  # fmt: skip
