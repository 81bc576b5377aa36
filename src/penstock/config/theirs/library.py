"""`Library`: a family of transformers' text models as data."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.boundary.files import shown
from penstock.config.activations import Mlp
from penstock.config.convert import shown_value
from penstock.config.model import ModelConfig, TextConfig
from penstock.config.shipped import read_shipped
from penstock.config.theirs.names import Names

FREE = frozenset(read_shipped("libraries")["free"])
"""Options that do not affect what a model computes: names, tokens, initialisation, defaults of generation, and entries
in the hub's files that transformers' models do not read. Options that begin with an underscore do not either.
"""
Option = tuple[Any, tuple[str, ...]]
"""transformers' default, and our fields; a default that begins with `=` names another option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowTurns:
    """Options of models in which every n-th block attends to all tokens and the others have a window, possibly with
    other rotary positions; each with its default."""

    window: tuple[str, int]
    every: tuple[str, int]
    """An empty name means no option: only `layer_types` says which blocks have a window."""
    base: tuple[str, float] = ("", 0.0)
    """Rotary base of blocks that attend to all tokens; an empty name: all have the library's rotary positions."""
    near_base: tuple[str, float] = ("", 0.0)
    """Rotary base of blocks with a window."""
    last: bool = False
    """Whether the last of n blocks attends to all tokens, not the first."""
    scale: tuple[str, int] | None = None
    """The option by whose square root scores are divided; none: the features of a head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """One family of transformers' models."""

    model_type: str
    architectures: Mapping[str, str]
    """Classes with a head, by our name for the head: `words`, or an encoder's heads."""
    base: ModelConfig
    """Configuration of all models of the family, unless an option says otherwise."""
    options: Mapping[str, Option]
    must: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Options that must have one of these values; the first is written."""
    activation: tuple[str, Mapping[str, Mlp]]
    """The option that names the activation, and our activation for each value."""
    names: Callable[[TextConfig], Names]
    prefix: str
    """Prefix of the base model's weights in a model with a head."""
    heads: tuple[str, ...]
    """Prefixes of the names of other weights."""
    ignored: str = r"(?!)"
    """Weights that may be left out: a regular expression, in which `{depth}` is the number of blocks."""
    nulls: frozenset[str] = frozenset()
    """Options whose null differs from transformers' default."""
    rotary: bool = False
    partial: bool = False
    """Whether rotary positions may rotate only a share of a head's features, or be scaled pair by pair."""
    unturned: bool = False
    """Whether some blocks may have no rotary positions."""
    saves_itself: bool = False
    """Whether models read from it are written as it again, although another computes the same."""
    last_token: tuple[str, ...] = ()
    """Options that name a token, written as the vocabulary's last, because transformers' defaults may be outside it."""
    own: tuple[str, ...] = ()
    """Our fields that config.json stores under `penstock`, because transformers has one value for all models."""
    default: str = ""
    """Activation if the option is absent."""
    of_classes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Allowed values of options that affect only a head for classes."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Names that some versions of transformers give to options, mapped to the names in `options`."""
    free: frozenset[str] = frozenset()
    """Options besides `FREE` that do not affect what its models compute."""
    window: Literal["none", "flagged", "always", "given"] | WindowTurns = "none"
    """Whether models have the `sliding_window` in config.json: only with `use_sliding_window`, always, or if it is
    given; or in all blocks but every n-th."""
    mixtures: Mapping[str, str] = field(default_factory=dict)
    """Options with the number of blocks with mixtures, mapped to the option with the number of all blocks; ours is the
    interval between mixtures."""
    shift: int = 0
    """Difference between `max_position_embeddings` and the number of positions in use."""
    written: bool = True
    """Whether our models are written as this one. If not, they are written as another one that computes the same."""


def refused(
    values: Mapping[str, Any], known: Container[str], must: Mapping[str, tuple[Any, ...]]
) -> Iterator[str]:
    """A problem for each option of a config.json that our models do not have, or that has a value they cannot
    represent."""
    for option, value in values.items():
        if option in must:
            if value not in must[option]:
                allowed = must[option][0]
                yield f"config.json has {option} {shown_value(value)}, but Penstock's model has {allowed!r} only."
        elif option not in known and not option.startswith("_") and not _is_off(value):
            yield (
                f"config.json has {shown(option)} {shown_value(value)}, whose effect Penstock does not "
                "know; remove it if it does not change what the model computes."
            )


def _is_off(value: Any) -> bool:
    """Whether an unknown option has no effect because it is turned off."""
    return value is None or value is False or value in ({}, [], "")
