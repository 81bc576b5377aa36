"""All families: their union, and functions of a configuration of any family."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, cast

from penstock.config.convert import word
from penstock.config.graph import TokenInput
from penstock.config.kinds import add_arm, dataclasses_of, family_of
from penstock.config.model.diffusion import DiffusionConfig
from penstock.config.model.family import NAMED, ModelFamily
from penstock.config.model.multimodal import MultimodalConfig
from penstock.config.model.text import DecoderConfig, EncoderConfig, Seq2SeqConfig
from penstock.config.model.universal import UniversalConfig
from penstock.config.model.vit import ViTConfig
from penstock.config.stack import Stack

ModelConfig = (
    ViTConfig
    | DecoderConfig
    | EncoderConfig
    | Seq2SeqConfig
    | DiffusionConfig
    | MultimodalConfig
    | UniversalConfig
)
"""The configuration of a model of any family."""
TextConfig = DecoderConfig | EncoderConfig | Seq2SeqConfig
"""The configuration of a text model whose family also exists in transformers."""


FAMILIES: dict[str, type] = {family_of(arm): arm for arm in dataclasses_of(ModelConfig)}
"""The configurations of models by family."""


def enrol(family: type[ModelFamily]) -> type[ModelFamily]:
    """Register a family of your own, so that its configurations can be parsed, saved and read. Usable as a decorator of
    its dataclass."""
    FAMILIES[family_of(family)] = family
    add_arm(ViTConfig, family)
    return family


def stacks(config: ModelConfig) -> tuple[Stack, ...]:
    """The stack of each run of a model, in the order in which they compute."""
    return tuple(run.stack for run in config.graph.runs)


def vocabulary_of(config: ModelConfig) -> int:
    """Rows of a model's largest table of tokens; 0 without one."""
    return max((one.vocabulary for one in config.graph.inputs_of(TokenInput)), default=0)


def option_words(config: ModelConfig) -> list[str]:
    """The command-line words for a model: the nearest preset of its family, and an option for each changed
    field."""
    near = (
        [name, *_options(preset, config)] for name, preset in NAMED.items() if type(preset) is type(config)
    )
    family_words = ["--model.family", config.family, *_options(type(config)(), config)]
    return min(near, key=len, default=family_words)


def title(config: ModelConfig) -> str:
    """The model's name for a headline: `vit-s16 (classifier pooled)`."""
    name, *changes = option_words(config)
    name = config.family if name.startswith("--") else name
    # A list of layers is too long for a headline.
    changed = ", ".join(change.removeprefix("--model.").partition(" '[")[0] for change in changes)
    return f"{name} ({changed})" if changed else name


def _options(before: ModelConfig, after: ModelConfig) -> Iterator[str]:
    return (f"--model.{name} {word(value)}" for name, value in changes(before, after))


def changes(before: Any, after: Any) -> Iterator[tuple[str, Any]]:
    """Dotted name and new value of each field in which two configurations of one class differ."""
    for one in fields(after):
        old, new = getattr(before, one.name), getattr(after, one.name)
        if is_dataclass(new):
            inner = list(changes(cast(Any, type(new))() if old is None else old, new))
            if old is None and not inner:  # any setting of a part creates the part
                inner = [(fields(new)[0].name, getattr(new, fields(new)[0].name))]
            yield from ((f"{one.name}.{name}", value) for name, value in inner)
        elif new != old:
            yield one.name, new
