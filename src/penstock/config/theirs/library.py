"""The form in which a family of transformers' text models is data: `Library`."""

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
"""Options that change nothing that a model computes: names, tokens, how weights are drawn, defaults of generation, and
what stands in files on the hub though transformers' models do not read it. So do those that begin with an underscore.
"""
Option = tuple[Any, tuple[str, ...]]
"""transformers' default, and our fields; the default names another option behind a `=`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowTurns:
    """The options of models in which every n-th block sees all tokens and the others have a window, and with it other
    rotary positions or the same; each with its default."""

    window: tuple[str, int]
    every: tuple[str, int]
    """An empty name is no option: `layer_types` alone says which blocks have a window."""
    base: tuple[str, float] = ("", 0.0)
    """Rotary base of blocks that see all tokens; an empty name: all have the rotary positions of the library."""
    near_base: tuple[str, float] = ("", 0.0)
    """Rotary base of blocks with a window."""
    last: bool = False
    """Whether the last of n blocks sees all tokens, and not the first."""
    scale: tuple[str, int] | None = None
    """The number by whose square root scores are divided; none: the features of a head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """One family of transformers' models."""

    model_type: str
    architectures: Mapping[str, str]
    """Classes with a head, by ours: `words`, or what an encoder has."""
    base: ModelConfig
    """Configuration that holds for all of theirs, where no option says otherwise."""
    options: Mapping[str, Option]
    must: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Options that must have one of these values; the first is written."""
    activation: tuple[str, Mapping[str, Mlp]]
    """The option that names the activation, and what its values are."""
    names: Callable[[TextConfig], Names]
    prefix: str
    """Prefix of the base model's weights where there is a head."""
    heads: tuple[str, ...]
    """How names of other weights begin."""
    ignored: str = r"(?!)"
    """Weights that may be left out: a regular expression, in which `{depth}` is the number of blocks."""
    nulls: frozenset[str] = frozenset()
    """Options with a default of theirs whose null is a value of its own."""
    rotary: bool = False
    partial: bool = False
    """Whether rotary positions may turn a share of a head's features, or be scaled pair by pair."""
    unturned: bool = False
    """Whether some blocks may have no rotary positions."""
    saves_itself: bool = False
    """Whether what it reads is written as this one, though another computes the same."""
    last_token: tuple[str, ...] = ()
    """Options that name a token, written as the vocabulary's last: defaults of theirs may lie outside it."""
    own: tuple[str, ...] = ()
    """Fields of ours that config.json keeps under `penstock`, because transformers has one value for all."""
    default: str = ""
    """Activation where the option is absent."""
    of_classes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values allowed of options that change nothing but a head of classes."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Options that some versions of transformers call otherwise, with the names in `options`."""
    free: frozenset[str] = frozenset()
    """Options besides `FREE` that change nothing that its models compute."""
    window: Literal["none", "flagged", "always", "given"] | WindowTurns = "none"
    """Whether models have the `sliding_window` that config.json names: with `use_sliding_window` alone, always, or if
    it is given; or all blocks have one but every n-th."""
    mixtures: Mapping[str, str] = field(default_factory=dict)
    """Options that count the blocks with mixtures out of those that another option counts. Ours say every how many."""
    shift: int = 0
    """Difference between `max_position_embeddings` and the positions that are ever used."""
    written: bool = True
    """Whether our models are written as this one. What is only read is written as the one that it computes the same
    as."""


def refused(
    values: Mapping[str, Any], known: Container[str], must: Mapping[str, tuple[Any, ...]]
) -> Iterator[str]:
    """Each option of a config.json that has no place in our models, or another value than they have."""
    for option, value in values.items():
        if option in must:
            if value not in must[option]:
                allowed = must[option][0]
                yield f"config.json has {option} {shown_value(value)}, but Penstock's model has {allowed!r} only."
        elif option not in known and not option.startswith("_") and not _is_off(value):
            yield (
                f"config.json has {shown(option)} {shown_value(value)}, of which Penstock does not know what it "
                "changes; remove it if it changes nothing that the model computes."
            )


def _is_off(value: Any) -> bool:
    """Whether an option that is not known can change nothing, because it is turned off."""
    return value is None or value is False or value in ({}, [], "")
