"""Larger images: more work per sample, in shapes that suit the hardware."""

from dataclasses import replace

from penstock.config.model import ViTConfig
from penstock.ladder.rung import Rung, Setting, Situation, register, vision_only

_SIZE = 256


def _larger(size: int, patch: int) -> int:
    """256 pixels for the usual 224; for other sizes, a seventh more, as whole patches."""
    if size == 224 and _SIZE % patch == 0:
        return _SIZE
    patches = size // patch
    return patch * (patches + max(1, round(patches / 7)))


def _apply(setting: Setting, situation: Situation) -> Setting:
    assert isinstance(setting.model, ViTConfig)  # `vision_only` holds this
    larger = _larger(setting.model.image_size, setting.model.patch_size)
    return replace(setting, model=replace(setting.model, image_size=larger))


register(
    Rung(
        name="image",
        place=900,
        title="larger image (FLOP/s)",
        why="224 pixels make 14 × 14 patches, 256 make 16 × 16: powers of two that tiles divide. A sample is then more "
        "work, so this is compared in model FLOP/s, and is reported rather than carried.",
        apply=_apply,
        obstacle=lambda setting, situation: vision_only(setting),
        changes_numerics=True,
        compared_by="flops",
        carried=False,
    )
)
