"""The pooled classifier: no class token."""

from dataclasses import replace

from penstock.config.model import ViTConfig
from penstock.ladder.rung import Rung, Setting, Situation, register, vision_only


def _apply(setting: Setting, situation: Situation) -> Setting:
    assert isinstance(setting.model, ViTConfig)  # `_obstacle` holds this
    return replace(setting, model=replace(setting.model, classifier="pooled"))


def _obstacle(setting: Setting, situation: Situation) -> str | None:
    if isinstance(setting.model, ViTConfig) and setting.model.classifier == "pooled":
        return "the model has a pooled classifier already"
    return vision_only(setting)


register(
    Rung(
        name="classifier",
        place=400,
        title="pooled classifier",
        why="The mean over patches is classified instead of a class token: one token less, and a rounder length.",
        apply=_apply,
        obstacle=_obstacle,
        changes_numerics=True,
    )
)
