"""Conversion of text models to transformers' config.json and back, by the tables of `libraries`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, make_dataclass, replace
from functools import cache, reduce
from itertools import islice
from operator import or_
from types import NoneType
from typing import Any, Literal, get_args

from penstock.boundary.files import quoted
from penstock.config.convert import NotNegative, shown_value
from penstock.config.graph import Init
from penstock.config.kinds import dataclasses_of, field_types
from penstock.config.load import MOST_PROBLEMS, from_dict
from penstock.config.model import (
    DecoderConfig,
    EncoderConfig,
    Seq2SeqConfig,
    TextConfig,
    Tokens,
    Words,
    stacks,
    with_stacks,
)
from penstock.config.theirs.backbones import BACKBONES
from penstock.config.theirs.library import (
    ELSEWHERE,
    FREE,
    LIBRARIES,
    Library,
    differences,
    refused,
    settled_stack,
)
from penstock.config.theirs.places import options_of, read_places, written_places
from penstock.errors import ConfigError

_log = logging.getLogger(__name__)
_OWN = ("init", "sequence", "decoder_sequence")
"""Fields that any library stores under `penstock`, if its models have them."""


TEXTS_OF = {"gemma3": "gemma3_text"}
"""The model_type of the language model inside each model that also reads images; `text_config` has its options."""


def library_of(model_type: Any) -> Library:
    """The entry of a config.json's model_type, or of its language model's. Raises ConfigError for one that is not
    known."""
    model_type = TEXTS_OF.get(str(model_type), model_type)
    for library in LIBRARIES:
        if library.model_type == model_type:
            return library
    start = f"config.json is of model_type {shown_value(model_type)}"
    if isinstance(model_type, str) and (why := ELSEWHERE.get(model_type)):
        raise ConfigError(f"{start}, and is not read: {ELSEWHERE.get(why.removeprefix('as '), why)}.")
    images = (name for one in BACKBONES for name in (one.model_type, one.whole) if name)
    model_types = ", ".join(map(repr, (*images, *(library.model_type for library in LIBRARIES))))
    raise ConfigError(f"{start}; known are {model_types}.")


def read_text_config(values: Mapping[str, Any]) -> TextConfig:
    """The model that a config.json of transformers describes; what is absent has transformers' default.

    Raises ConfigError with every option that our models cannot honour.
    """
    library = library_of(values.get("model_type"))
    values = _language_model(values)
    values = {library.renamed.get(name, name): value for name, value in values.items()}
    kind = _record(library.model_type)
    options = {name: value for name, value in values.items() if name in field_types(kind)}
    given: Any = from_dict(kind, options, origin="config.json")
    known = {*field_types(kind), *FREE, *library.free, *library.of_classes}
    problems = list(islice(refused(values, known, library.must), MOST_PROBLEMS))
    settings = _settings(given, library, problems)
    if (methods := library.must.get("topk_method")) and "router_groups" in settings:
        whole = values.get("topk_method", methods[-1]) == "greedy"  # whatever the groups are
        groups = {name: 1 if whole else settings[name] or 1 for name in ("router_groups", "groups_per_token")}
        settings |= groups
    option, activations = library.activation
    activation = getattr(given, option)
    if activation not in activations:
        problems.append(
            f"config.json has {option} {shown_value(activation)}; known are {', '.join(activations)}."
        )
    settings |= read_places(given, library, problems)
    problems += [
        f"config.json has {name} under penstock, which no {library.model_type} reads; remove it there."
        for name in ("output_bias", "balance")
        if getattr(given.penstock, name) is not None and name not in library.stored_fields
    ]
    if problems:
        raise ConfigError(problems)
    both = isinstance(library.base, Seq2SeqConfig)
    settings |= {
        f"{side}mlp": activations[activation] for side in (("encoder.", "decoder.") if both else ("",))
    }
    if library.shift:
        settings["max_positions"] = max(1, settings["max_positions"] - library.shift)
    if library.saves_itself:
        settings["saved_as"] = library.model_type
    if isinstance(library.base, EncoderConfig):
        settings |= _head(given, library, values)
    own = {name: getattr(given.penstock, name) for name in _stored_fields(library)}
    settings |= {name: value for name, value in own.items() if value is not None}
    settings.setdefault("sequence", settings.get("max_positions", 512))
    if both:
        settings.setdefault("decoder_sequence", settings["sequence"])
    base: Any = library.base
    return settled(from_dict(type(base), settings, base=base, origin="config.json"))


def _language_model(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options of the language model inside a model that also reads images."""
    if values.get("model_type") not in TEXTS_OF:
        return values
    inner = values.get("text_config")
    if not isinstance(inner, dict):
        raise ConfigError("config.json is of a model of images and texts, but has no text_config; add it.")
    _log.info("Only the language model of the %s in config.json is read.", values["model_type"])
    return inner


def _settings(given: Any, library: Library, problems: list[str]) -> dict[str, Any]:
    """Our fields by dotted path, from the options of config.json; contradictions are added to `problems`."""
    settings: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for option, path in ((option, path) for option, (_, paths) in library.options.items() for path in paths):
        value = _value(given, option, library)
        if option == "n_inner" and value is None:
            value = 4 * given.n_embd
        if option in library.mixtures:
            value = _value(given, library.mixtures[option], library) // value
            if value > 2:
                problems.append(
                    f"config.json has a mixture in the second of every {value} blocks by {option}, but Penstock's "
                    "stacks in the last; there must be one in each block or in every second."
                )
        if path in settings and settings[path] != value:
            problems.append(
                f"config.json has {option} {value!r} and {origin[path]} {settings[path]!r}, but Penstock's model "
                f"has one {path.rpartition('.')[2]} for both."
            )
        settings[path], origin[path] = value, option
    return settings


def _stored_fields(library: Library) -> list[str]:
    """Our fields that a config.json of this library stores under `penstock`."""
    return [name for name in (*_OWN, *library.stored_fields) if hasattr(library.base, name)]


@dataclass(frozen=True, kw_only=True)
class _Own:
    """The entries that config.json stores under `penstock`, because transformers has no field for them."""

    init: Init | None = None
    sequence: Tokens | None = None
    decoder_sequence: Tokens | None = None
    output_bias: bool | None = None
    balance: NotNegative | None = None
    bias_rate: NotNegative | None = None


_Problem = Literal["regression", "single_label_classification", "multi_label_classification"]
_LABELS: dict[str, tuple[Any, Any]] = {
    "architectures": (tuple[str, ...] | None, None),
    "id2label": (dict[str, str] | None, None),
    "num_labels": (Words | None, None),
    "problem_type": (_Problem | None, None),
}


@cache
def _record(model_type: str) -> type:
    """The dataclass of a library's config.json: each option has the type and the range of our field for it."""
    library = library_of(model_type)
    entries = {**_LABELS, library.activation[0]: (str, library.default), **options_of(library)}
    for option, (default, paths) in library.options.items():
        follows = isinstance(default, str) and default.startswith("=")
        kind: Any = type(library.base)
        for part in paths[0].split("."):
            kind = field_types(next(iter(dataclasses_of(kind))))[part]
        # An option with a default cannot be null, even if our field can be None.
        wanted = (one for one in get_args(kind) if one is not NoneType)
        always = reduce(or_, wanted) if NoneType in get_args(kind) else kind
        always = kind if option in library.nulls else always
        entries[option] = (kind | None, None) if default is None or follows else (always, default)
    made = [(name, kind, field(default=default)) for name, (kind, default) in entries.items()]
    own = ("penstock", _Own, field(default_factory=_Own))
    return make_dataclass("ConfigJson", [*made, own], frozen=True, kw_only=True)


def _value(given: Any, option: str, library: Library) -> Any:
    """The value of an option in config.json, or transformers' default."""
    default, value = library.options[option][0], getattr(given, option)
    if value is None and isinstance(default, str):
        return _value(given, default.removeprefix("="), library)
    return value


def _head(given: Any, library: Library, values: Mapping[str, Any]) -> dict[str, Any]:
    """The output of an encoder, from the class in config.json's architectures."""
    name = (given.architectures or [library.architectures["words"]])[0]
    heads = {word: output for output, word in library.architectures.items()} | {"BertForPreTraining": "words"}
    if name not in heads:
        raise ConfigError(f"config.json is of {quoted(name)}; known are {', '.join(heads)}.")
    classes = len(given.id2label or ()) or given.num_labels or 2
    if heads[name] == "classes":
        _require_loss(given.problem_type, classes)
        if wrong := [
            one for one, allowed in library.of_classes.items() if values.get(one, allowed[0]) not in allowed
        ]:
            raise ConfigError(
                [
                    f"config.json has {option} {shown_value(values[option])}, but Penstock's head of classes has "
                    f"{library.of_classes[option][0]!r} only."
                    for option in wrong
                ]
            )
    return {
        "head": heads[name],
        **({} if "decoder_bias" in library.options else {"output_bias": True}),
        **({"classes": classes} if heads[name] == "classes" else {}),
    }


def _require_loss(problem: str | None, classes: int) -> None:
    """Refuse a head that was trained with another loss than ours, which is the squared error for one output, and the
    cross entropy of one class out of several otherwise.
    """
    if problem not in (None, _problem(classes)):
        labels = "1 label" if classes == 1 else f"{classes:,} labels"
        raise ConfigError(
            f"config.json has problem_type {problem!r} with {labels}, but Penstock predicts one class out of several "
            "('single_label_classification'), or one number ('regression' with 1 label). Remove problem_type to train "
            "the weights for one of these."
        )


def _problem(classes: int) -> _Problem:
    """transformers' name for the loss of a head."""
    return "regression" if classes == 1 else "single_label_classification"


def settled(config: TextConfig) -> TextConfig:
    """The same model without values that follow from other fields, so that equal models compare equal."""
    config = with_stacks(config, settled_stack)
    learned = any(stack.positions == "learned" for stack in stacks(config))
    same = config.max_positions in (None, config.sequence)
    return config if learned and not same else replace(config, max_positions=None)


def write_text_config(config: TextConfig) -> dict[str, Any]:
    """The config.json of the model of transformers that computes the same. Raises ConfigError, with what the nearest
    one lacks, if there is none.
    """
    best: list[str] | None = None
    for library in LIBRARIES:
        latent = [getattr(one, "latent", None) is None for one in (library.base, config)]
        if type(library.base) is not type(config) or not library.written or len(set(latent)) > 1:
            continue
        if (kind := getattr(config, "saved_as", None)) not in (None, library.model_type):
            continue
        values = _written(config, library)
        try:
            readable = read_text_config(values)
            wanted: Any = settled(config)
            if isinstance(readable, EncoderConfig) and readable.head != "classes":
                wanted = replace(wanted, pooler=readable.pooler)  # which it does not have
            if isinstance(readable, DecoderConfig) and kind is None:
                wanted = replace(wanted, saved_as=readable.saved_as)
            lacks = list(differences(wanted, readable))
        except ConfigError as error:
            lacks = [str(error)]
        if not lacks:
            return values
        lacks = [f"transformers' {library.model_type} has no {each}." for each in lacks]
        best = lacks if best is None or len(lacks) < len(best) else best
    raise ConfigError([*(best or []), "Save such a model in Penstock's own names with save_pretrained."])


def _written(config: TextConfig, library: Library) -> dict[str, Any]:
    """config.json in a library's words, even if it cannot express every field."""
    head = getattr(config, "head", "words")
    values: dict[str, Any] = {
        "architectures": [library.architectures.get(head, library.architectures["words"])],
        "model_type": library.model_type,
        **{
            option: allowed[0]
            for option, allowed in library.must.items()
            if None not in allowed  # optional entries are left out
        },
    }
    for option, (_, paths) in library.options.items():
        if (value := _at(config, paths[0])) is not None or option in library.nulls:
            values[option] = value
    for option, every in library.mixtures.items():
        values[option] = max(1, values[every] // values[option])
    values |= dict.fromkeys(library.last_token, config.vocabulary - 1)
    stack = stacks(config)[0]
    option, activations = library.activation
    values[option] = next((word for word, mlp in activations.items() if mlp == stack.mlp), library.default)
    values |= written_places(stack, library)
    if isinstance(config, EncoderConfig) and config.head == "classes":
        values |= {option: allowed[0] for option, allowed in library.of_classes.items()}
        values["id2label"] = {str(i): f"LABEL_{i}" for i in range(config.classes)}
        values["label2id"] = {f"LABEL_{i}": i for i in range(config.classes)}
        values["problem_type"] = _problem(config.classes)
    values["penstock"] = {name: getattr(config, name) for name in _stored_fields(library)}
    return values


def _at(config: TextConfig, path: str) -> Any:
    """The value of one of our fields, with defaults that follow from other fields filled in."""
    side, dot, name = path.rpartition(".")
    holder: Any = getattr(config, side) if dot else config
    known: dict[str, Callable[[], Any]] = {
        "kv_heads": lambda: holder.kv_heads or holder.heads,
        "head_features": lambda: holder.layers[0].head_width,
        "attention_dropout": lambda: holder.weights_dropout,
        "mlp_dropout": lambda: holder.hidden_dropout,
        "router_normalised": lambda: holder.mixture.router_normalised,
        "expert_width": lambda: holder.mixture.expert.width,
        "max_positions": lambda: config.max_positions or config.sequence,
    }
    return known[name]() if name in known else getattr(holder, name)
