"""The models that timm's names mean."""

from __future__ import annotations

import re
from dataclasses import replace

from penstock.boundary.files import quoted
from penstock.config.model import PRESETS, ViTConfig
from penstock.errors import ConfigError

_TIMM_SIZES = {
    "tiny": "vit-ti16", "small": "vit-s16", "base": "vit-b16", "large": "vit-l16", "huge": "vit-h14",
    "giant": "vit-g14",
}  # fmt: skip
"""Presets of the same width and depth, by timm's names of sizes."""
_TIMM_BACKBONES = {
    "dinov2": ("14", "()", "dinov2-{}14", {"small": "s", "base": "b", "large": "l", "giant": "g"}),
    "dinov3": ("16", "()", "dinov3-vit{}16", {"small": "s", "base": "b", "large": "l"}),
    "siglip": ("[1-9][0-9]?", "_([0-9]{1,4})", "siglip-{}", {"base": "b16", "so400m": "so400m14"}),
    "clip": ("[1-9][0-9]?", "_([0-9]{1,4})", "clip-vit-{}", {"base": "b32", "large": "l14"}),
}
"""Kinds of backbones: patch and image sizes in timm's names, and presets by timm's names of sizes."""
_TIMM = re.compile(
    rf"(?:vit|deit)_(?P<size>{'|'.join(_TIMM_SIZES)})(?P<distilled>_distilled)?"
    r"_patch(?P<patch>[1-9]\d?)_(?P<pixels>[1-9]\d{1,3})(?:\.(?P<tag>\w+))?"
)


def timm_config(name: str) -> ViTConfig:
    """The model with the name `name` in timm, such as `vit_small_patch16_224.augreg_in1k`. Raises ConfigError for
    models other than its plain ViTs, and for a tag that does not determine the number of classes."""
    parts = _TIMM.fullmatch(name)
    if parts is None:
        if (backbone := _timm_backbone(name)) is not None:
            return backbone
        raise ConfigError(
            f"timm:{quoted(name)[1:-1]} is not one of timm's models whose shape is known: vit_SIZE_patchP_PIXELS and "
            f"deit_SIZE_patchP_PIXELS, with SIZE {', '.join(_TIMM_SIZES)}, and ViTs of {', '.join(_TIMM_BACKBONES)}, "
            "such as vit_base_patch14_dinov2. Change one by --model.NAME VALUE, or measure timm's own module: "
            "penstock ladder --model my_module:factory."
        )
    tag, classes = parts["tag"] or "in1k", {"in1k": 1000, "augreg_in21k": 21843}
    if tag.rpartition("_")[2] == "in1k":
        tag = "in1k"
    if tag not in classes:
        raise ConfigError(
            f"timm:{name} has weights without a head for ImageNet's classes; leave .{tag} out, and set --model.classes."
        )
    base = PRESETS[_TIMM_SIZES[parts["size"]]]
    assert isinstance(base, ViTConfig)
    return replace(
        base, patch_size=int(parts["patch"]), image_size=int(parts["pixels"]), classes=classes[tag],
        distilled=parts["distilled"] is not None,
    )  # fmt: skip


def _timm_backbone(name: str) -> ViTConfig | None:
    """The backbone that timm calls `name`, such as `vit_base_patch14_reg4_dinov2.lvd142m`, with a head for ImageNet."""
    for kind, (patch, pixels, preset, sizes) in _TIMM_BACKBONES.items():
        form = rf"vit_({'|'.join(sizes)})_patch({patch})(_reg4)?_{kind}{pixels}(\..*)?"
        if (parts := re.fullmatch(form, name)) and (parts[3] is None or kind == "dinov2"):
            base = PRESETS[preset.format(sizes[parts[1]])]
            assert isinstance(base, ViTConfig)
            side, patch_size = int(parts[4] or (256 if kind == "dinov3" else base.image_size)), int(parts[2])
            return replace(
                base, patch_size=patch_size, image_size=side - side % patch_size,  # timm's names omit these
                registers=4 if parts[3] else base.registers, qkv_bias=kind != "dinov3",
            )  # fmt: skip
    return None
