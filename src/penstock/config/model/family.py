"""The base of the configurations of all families, and what several of them have."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, MutableMapping
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


class Presets(MutableMapping[str, Any]):
    """Models by name. A `partial` is called when its model is first asked for: to make all of them takes 0.15 s."""

    def __init__(self) -> None:
        self._models: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        model = self._models[name]
        if isinstance(model, partial):
            self._models[name] = model = model()
        return model

    def __setitem__(self, name: str, model: Any) -> None:
        self._models[name] = model

    def __delitem__(self, name: str) -> None:
        del self._models[name]

    def __contains__(self, name: object) -> bool:
        return name in self._models

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)


NAMED = Presets()
"""Presets by name, all of which `penstock.config.model.presets` puts here."""

_SIZES = {"tiny": "ti", "small": "s", "base": "b", "large": "l", "huge": "h", "giant": "g", "xlarge": "xl"}
_SAYS_LESS = re.compile(r"^(timm|hf|hf_hub|hf-hub):|^[\w.-]+/(?=.)|\.[a-z]\w{2,}$")
"""Parts of a name elsewhere that are not the model's: a library, an owner on the hub, timm's tag of its weights."""
_TRAINED = re.compile(r"-(un)?cased$|-(224|384)(-in\d+k)?$|-v\d(\.\d)?$|-hf$|-instruct$")
"""Endings that say how weights were trained."""


def called_here(name: str) -> str | None:
    """The preset that timm, transformers or the hub call `name`, such as vit-s16 for `vit_small_patch16_224`."""
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
        """The same model for samples of so many tokens in each of its inputs. Images have the tokens that they have."""
        return self

    def with_labels(self, count: int) -> Any:
        """The same model for samples of so many labels, by which mixtures count visits; without mixtures, itself."""
        return with_stacks(self, lambda one: replace(one, labels=count) if one.experts else one)

    def with_classes(self, count: int) -> Any:
        """The same model with a head for so many classes of texts. Raises ConfigError where it cannot have one."""
        raise ConfigError(
            f"model.family {family_of(type(self))} has no head for classes of texts; choose another model."
        )

    def telling(self) -> Any:
        """The same model without what its head for classes does not need."""
        return self

    def writing(self) -> Any:
        """The same model without what continuing a text does not need."""
        return self

    def branch(self, name: str) -> Any:
        """The model of one of its branches alone, in a family that has no others. Raises ConfigError for a name that is
        none of them, and where no such family has its form. Of two heads it keeps that for words."""
        raise ConfigError(f"model.family {family_of(type(self))} has no branches; leave {quoted(name)} out.")

    def short_form(self) -> str:
        """The name of the equal preset, or `custom`."""
        return next((name for name, preset in NAMED.items() if preset == self), "custom")


AnyConfig = TypeVar("AnyConfig", bound=ModelFamily)


def with_stacks(config: AnyConfig, change: Callable[[Stack], Any]) -> AnyConfig:
    """The same model with what `change` makes of each of its settings that is a stack."""
    outer: Any = config
    values = {one.name: getattr(outer, one.name) for one in fields(outer)}
    inner = {name: change(value) for name, value in values.items() if isinstance(value, Stack)}
    if isinstance(outer, Stack):
        # Its own sizes must suit those of stacks inside it, which are left out meanwhile.
        without: dict[str, Any] = dict.fromkeys(inner)
        outer = change(replace(outer, **without) if inner else outer)
    return replace(outer, **inner) if inner else outer  # type: ignore[no-any-return]
