"""The base of the configurations of all families, and functions that several of them share."""

from __future__ import annotations

import re
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import cached_property, partial
from typing import Annotated, Any, Literal, TypeVar

from penstock.boundary.files import quoted
from penstock.config.convert import Checked, Range, nearest
from penstock.config.graph import Graph
from penstock.config.kinds import family_of
from penstock.config.model_rules import model_problems
from penstock.config.stack import Stack
from penstock.errors import ConfigError

Classifier = Literal["token", "pooled"]
PoolNorm = Literal["before", "after", "none"]
Pooler = Literal["tanh", "norm"]
EncoderHead = Literal["words", "classes", "none"]
Branch = Literal["understanding", "generating"]
Pixels = Annotated[int, Range(1, 1 << 16)]
Words = Annotated[int, Range(1, 1 << 24)]
Tokens = Annotated[int, Range(1, 1 << 28)]


class Presets(UserDict[str, Any]):
    """Models by name. A `partial` is called when its model is first looked up: to create all models takes 0.15 s."""

    def __getitem__(self, name: str) -> Any:
        model = super().__getitem__(name)
        if isinstance(model, partial):
            self[name] = model = model()
        return model


NAMED = Presets()
"""Presets by name; `penstock.config.model.presets` adds them."""

_SIZES = {"tiny": "ti", "small": "s", "base": "b", "large": "l", "huge": "h", "giant": "g", "xlarge": "xl"}
_SAYS_LESS = re.compile(r"^(timm|hf|hf_hub|hf-hub):|^[\w.-]+/(?=.)|\.[a-z]\w{2,}$")
"""Parts of a foreign name that do not belong to the model: a library, an owner on the hub, timm's tag of its
weights."""
_TRAINED = re.compile(r"-(un)?cased$|-(224|384)(-in\d+k)?$|-v\d(\.\d)?$|-hf$|-instruct$")
"""Suffixes that say how weights were trained."""


def called_here(name: str) -> str | None:
    """The preset for a model's name in timm, transformers or the hub, such as vit-s16 for `vit_small_patch16_224`."""
    while (shorter := _SAYS_LESS.sub("", name)) != name:
        name = shorter
    name = name.lower().replace("_", "-").replace("meta-", "")
    while (shorter := _TRAINED.sub("", name)) != name:
        name = shorter
    if patches := re.fullmatch(r"(?:deit|vit)-(\w+)-patch(\d+)", name):
        name = f"vit-{_SIZES.get(patches[1], patches[1])}{patches[2]}"
    name = re.sub(r"^(llama|qwen)-(?=\d)", r"\1", name).replace("3.1-", "3-").replace("3.2-", "3-")
    name = {"gpt2-small": "gpt2", "dit-xl-2": "dit-xl2"}.get(name, name)
    return name if name in NAMED else None


class ModelFamily(Checked, where="model"):
    """The base of the configurations of all families: frozen dataclasses with a field `family` and a `graph`."""

    @classmethod
    def parse(cls, name: str) -> Any:
        """The preset called `name`, of any family. Raises `ConfigError` naming the nearest."""
        if name not in NAMED:
            same = called_here(name)
            near = f" Did you mean {same!r}?" if same else nearest(name, NAMED)
            raise ConfigError(
                f"There is no model preset {quoted(name)}.{near} Presets are {', '.join(NAMED)}."
            )
        return NAMED[name]

    @cached_property
    def graph(self) -> Graph:
        """The parts of the model."""
        raise NotImplementedError

    def _problems(self) -> Iterator[str]:
        yield from model_problems(self.graph)

    @property
    def tokens(self) -> int:
        """Tokens of one sample of the first input."""
        return self.graph.inputs[0].length

    def with_lengths(self, *lengths: int) -> Any:
        """The same model with other lengths of its text inputs, in tokens. The lengths of images do not change."""
        return self

    def with_labels(self, count: int) -> Any:
        """The same model for samples with `count` labels, by which mixtures count visits; without mixtures, itself."""
        return with_stacks(self, lambda one: replace(one, labels=count) if one.experts else one)

    def with_classes(self, count: int) -> Any:
        """The same model with a head for `count` classes of texts. Raises ConfigError if it cannot have one."""
        raise ConfigError(
            f"model.family {family_of(type(self))} has no head for classes of texts; choose another model."
        )

    def telling(self) -> Any:
        """The same model without the parts that its head for classes does not need."""
        return self

    def writing(self) -> Any:
        """The same model without the parts that generating text does not need."""
        return self

    def branch(self, name: str) -> Any:
        """The model of one branch, in a family without other branches. Raises ConfigError for a name that is not a
        branch, and if no such family has its form. Of two heads it keeps the one for words."""
        raise ConfigError(f"model.family {family_of(type(self))} has no branches; leave {quoted(name)} out.")

    def short_form(self) -> str:
        """The name of the equal preset, or `custom`."""
        return next((name for name, preset in NAMED.items() if preset == self), "custom")


AnyConfig = TypeVar("AnyConfig", bound=ModelFamily)


def with_stacks(config: AnyConfig, change: Callable[[Stack], Any]) -> AnyConfig:
    """The same model with `change` applied to each of its settings that is a stack."""
    outer: Any = config
    values = {one.name: getattr(outer, one.name) for one in fields(outer)}
    inner = {name: change(value) for name, value in values.items() if isinstance(value, Stack)}
    if isinstance(outer, Stack):
        # Its own sizes are checked against those of its nested stacks, so these are removed meanwhile.
        without: dict[str, Any] = dict.fromkeys(inner)
        outer = change(replace(outer, **without) if inner else outer)
    return replace(outer, **inner) if inner else outer  # type: ignore[no-any-return]
