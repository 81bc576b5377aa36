"""Families of transformers' text models as data, with each option of their config.json: `presets/libraries.toml`."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from reprlib import repr as brief
from typing import Any, Literal

from penstock.boundary.files import shown
from penstock.config.activations import GATED_NAMES, PLAIN_NAMES, Mlp
from penstock.config.convert import shown_value
from penstock.config.load import from_dict
from penstock.config.model import FAMILIES, ModelConfig, TextConfig, changes
from penstock.config.shipped import read_shipped, with_forms
from penstock.config.theirs.names import Names, names_of

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
    global_last: bool = False
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
    stored_fields: tuple[str, ...] = ()
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
    values: Mapping[str, Any], known: Container[str], must: Mapping[str, Sequence[Any]]
) -> Iterator[str]:
    """A problem for each option of a config.json that our models do not have, or that has a value they cannot
    represent."""
    for option, value in values.items():
        if option in must:
            if value not in must[option]:
                allowed = must[option][0]
                yield f"config.json has {option} {shown_value(value)}, but Penstock's model has {allowed!r} only."
        elif value in ([], {}, "", None) or value is False:
            continue  # turned off, it has no effect
        elif option not in known and not option.startswith("_"):
            yield (
                f"config.json has {shown(option)} {shown_value(value)}, whose effect Penstock does not "
                "know; remove it if it does not change what the model computes."
            )


_ACTIVATIONS: dict[str, Mapping[str, Mlp]] = {
    "plain": PLAIN_NAMES,
    "gated": GATED_NAMES,
    # T5's `gated-gelu` is the tanh approximation.
    "feed_forward": {**PLAIN_NAMES, "gated-gelu": "geglu_tanh", "gated-silu": "swiglu"},
}


def _read(model_type: str, table: dict[str, Any]) -> Library:
    """A library from its table, with None for "none", tuples for lists, and without empty entries."""
    settings: dict[str, Any] = _plain(table)
    base, activation = settings.pop("base"), settings.pop("activation")
    family: Any = FAMILIES[base.pop("family")]
    names = activation["names"]
    settings["base"] = from_dict(family, base, origin=f"libraries.toml, {model_type}")
    settings["activation"] = activation["option"], _ACTIVATIONS[names] if isinstance(names, str) else names
    settings["options"] = {name: (option[0], option[1:]) for name, option in settings["options"].items()}
    settings["names"] = partial(names_of, settings["names"])
    if isinstance(window := settings.get("window"), dict):
        settings["window"] = WindowTurns(**window)
    settings |= {name: frozenset(settings[name]) for name in ("free", "nulls") if name in settings}
    return Library(model_type=model_type, **settings)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items() if entry != [] or name == "heads"}
    if isinstance(value, list):
        return tuple(map(_plain, value))
    return None if value == "none" else value


_TABLES = read_shipped("libraries")
LIBRARIES = tuple(
    _read(model_type, with_forms(table, _TABLES["forms"]))
    for model_type, table in _TABLES["libraries"].items()
)
ELSEWHERE: dict[str, str] = _TABLES["elsewhere"]
"""Why models of other types are not read, and what to use instead."""


def global_turns(windowed: Sequence[bool]) -> dict[str, int]:
    """Our fields for the blocks without a window, from a list that says which blocks have one."""
    full = [number for number, one in enumerate(windowed) if not one]
    every = 0 if not full else full[1] - full[0] if len(full) > 1 else len(windowed)
    return {"global_every": every, "global_offset": full[0] if full else 0}


def settled_stack(stack: Any) -> Any:
    """The same stack without values that follow from other fields."""
    changes: dict[str, Any] = {}
    if stack.layers == replace(stack, unequal=()).layers:
        changes["unequal"] = ()
    if stack.kv_heads == stack.heads:
        changes["kv_heads"] = None
    if stack.head_features and stack.head_features * stack.heads == stack.width:
        changes["head_features"] = None
    if not any(layer.window for layer in stack.layers):
        changes |= {
            "window": None, "window_base": None, "window_scaled": True, "global_every": 0, "global_offset": 0,
        }  # fmt: skip
    elif not changes.get("unequal", stack.unequal):
        changes |= global_turns([layer.window > 0 for layer in stack.layers])
    if stack.attention_scale == stack.layers[0].head_width ** -0.5:
        changes["attention_scale"] = None
    if stack.router_normalised == (stack.experts_per_token > 1):
        changes["router_normalised"] = None
    if stack.expert_width == stack.mlp_width:
        changes["expert_width"] = None
    if stack.weights_dropout == stack.dropout:
        changes["attention_dropout"] = None
    if stack.hidden_dropout in (0.0, stack.dropout):
        changes["mlp_dropout"] = None if stack.hidden_dropout else 0.0
    return replace(stack, **changes)


def differences(config: Any, readable: Any) -> Iterator[str]:
    """Each setting in which a model differs from the one that can be read back."""
    for name, value in changes(readable, config):
        yield f"model.{name}={brief(value) if isinstance(value, tuple) else value}"
