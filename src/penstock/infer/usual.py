"""Generation settings of a model's folder as fields of `Decoding`: from generation_config.json, or else config.json, as
transformers would apply them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from penstock.boundary.files import quoted
from penstock.boundary.hub import local_weights
from penstock.config.decoding import USUAL_TOKENS, Decoding
from penstock.config.load import from_dict
from penstock.config.model import vocabulary_of
from penstock.config.theirs.read import read_json
from penstock.errors import ConfigError
from penstock.models.convert.files import settings_in
from penstock.models.convert.pretrained import read_config

_log = logging.getLogger(__name__)
RULES = ("forced_first", "forced_last", "not_first")
"""Fields that, like biases, belong to the model and its vocabulary: they apply whatever else is set."""
SEARCH = ("beams", "length_penalty", "early_stopping", "best")
"""Fields that do not apply to texts generated token by token."""
_STOPPING = {True: "full", False: "heuristic", "never": "never"}
_FIELDS: dict[str, str] = {
    "max_new_tokens": "max_tokens", "max_length": "max_length", "min_new_tokens": "min_tokens",
    "no_repeat_ngram_size": "no_repeat_ngram", "forced_bos_token_id": "forced_first", "stop_strings": "stop",
    "forced_eos_token_id": "forced_last", "begin_suppress_tokens": "not_first",
    **{name: name for name in ("min_length", "repetition_penalty", "temperature", "top_k", "top_p", "min_p")},
    "num_beams": "beams", "length_penalty": "length_penalty", "early_stopping": "early_stopping",
    "num_return_sequences": "best",
}  # fmt: skip
"""Fields of `Decoding` by transformers' names. If two contradict each other, the first is used."""
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("guidance_scale", "encoder_repetition_penalty", "num_beam_groups"), (1,)),
    **dict.fromkeys(("penalty_alpha", "diversity_penalty", "encoder_no_repeat_ngram_size"), (0,)),
    **dict.fromkeys((
        "exponential_decay_length_penalty", "watermarking_config", "dola_layers", "constraints", "force_words_ids",
        "forced_decoder_ids", "max_time", "token_healing", "renormalize_logits", "remove_invalid_values",
    ), (False, [], {})),
}  # fmt: skip
"""Names of unsupported settings, and the values with which they have no effect."""
_DRAWING = {"typical_p": (1,), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "top_h": ()}
"""The same, for settings that transformers applies only if tokens are drawn."""


class Usual(NamedTuple):
    """The generation settings of a folder."""

    fields: dict[str, Any]
    """Fields of `Decoding`."""
    met: tuple[str, ...]
    """Transformers' names of the settings in `fields`."""
    unmet: tuple[str, ...]
    """Settings that are not applied, by transformers' names, with the reason."""


def usual_of(model: str | Path) -> Usual:
    """Read the settings of a model's folder, or of a model on the hub."""
    folder = local_weights(model)
    return usual_in(folder, vocabulary_of(read_config(folder)))


def usual_in(folder: Path, size: int) -> Usual:
    """Read the settings in the folder of a model of `size` tokens."""
    files = [folder / name for name in ("generation_config.json", "config.json")]
    settings = next((read_json(file) for file in files if file.is_file()), {})
    settings = {name: value for name, value in settings.items() if value is not None}
    draws, ends = settings.get("do_sample") is True, settings_in(folder).get("eos_token_id")
    unmet = [
        f"{name}={value} (not supported)"
        for name, idle in {**_UNSUPPORTED, **(_DRAWING if draws else {})}.items()
        if (value := settings.get(name)) is not None and value not in idle
    ]
    if draws:
        settings = {"temperature": 1.0, "top_k": 50} | settings  # transformers' defaults
    else:
        settings.pop("temperature", None)
    fields, met = dict[str, Any](), list[str]()
    for name, field, value in (
        *_biases(settings, ends if isinstance(ends, list) else [ends]),
        *_named(settings),
    ):
        before = fields.get("bias", ()) if field == "bias" else ()
        try:
            checked = from_dict(Decoding, {**fields, field: value})
            if max(checked.named_tokens, default=0) >= size:
                raise ConfigError(f"In it: the model has {size:,} tokens")
            fields[field] = (*before, *checked.bias) if before else getattr(checked, field)
            met.append(name)
        except ConfigError as problem:
            unmet.append(f"{name}={quoted(value)} ({problem.problems[0].partition(': ')[2].rstrip('.')})")
    return Usual(fields, tuple(dict.fromkeys(met)), tuple(unmet))


def _named(settings: Mapping[str, Any]) -> Iterable[tuple[str, str, Any]]:
    for name, field in _FIELDS.items():
        value = settings.get(name)
        if field in ("forced_last", "stop") and isinstance(value, int | str):
            value = [value]
        if field == "early_stopping" and isinstance(value, bool | str):
            value = _STOPPING.get(value, value)
        if value is not None and value != getattr(Decoding(), field):
            yield name, field, value


def _biases(settings: Mapping[str, Any], ends: list[Any]) -> Iterable[tuple[str, str, list[str]]]:
    for name in ("sequence_bias", "bad_words_ids", "suppress_tokens"):
        listed = settings.get(name)
        for each in listed if isinstance(listed, list) else () if listed is None else (listed,):
            match name, each:
                case "sequence_bias", [[*numbers], int() | float() as amount]:
                    words = f"{amount:.9f}"
                case "bad_words_ids", [*numbers]:
                    words = "-inf"
                    if len(numbers) == 1 and numbers[0] in ends:
                        continue
                case _:
                    numbers, words = [each], "-inf"
            yield name, "bias", [f"{' '.join(map(str, numbers))}={words}"]


def chosen(usual: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The given fields of `Decoding`, with the usual fields that do not contradict them, except `max_tokens`; and the
    names of the usual fields that contradict them."""
    fields, dropped = dict(given), list[str]()
    for name, value in usual.items():
        if name == "bias":
            fields[name] = [*given.get(name, ()), *value]
        elif name not in (*given, "max_tokens"):
            if name == "min_tokens" and given.get("max_tokens"):
                value = min(value, given["max_tokens"])
            try:
                from_dict(Decoding, {**fields, name: value})
                fields[name] = value
            except ConfigError:
                dropped.append(name)
    return fields, dropped


def lengths(usual: Mapping[str, Any], decoding: Mapping[str, Any], prompt: int, room: int) -> dict[str, int]:
    """`max_tokens` for a call that does not set it, for a prompt of `prompt` tokens and at most `room` tokens in all;
    and `min_tokens`, which is lowered to fit if the folder set it."""
    least, length = decoding.get("min_tokens", 0), decoding.get("max_length", 0)
    most = usual.get("max_tokens", 0) if length == usual.get("max_length", 0) else 0
    tokens = length - prompt if length and not most else max(most or USUAL_TOKENS, least)
    tokens = max(1, min(tokens, room - prompt))
    least = min(least, tokens) if least == usual.get("min_tokens") else least
    return {"max_tokens": tokens, "min_tokens": least}


def with_rules(usual: Mapping[str, Any], decoding: Decoding) -> Decoding:
    """A complete `Decoding` with the folder's `RULES`, for rules that it does not set itself."""
    rules = {name: usual[name] for name in RULES if name in usual and getattr(decoding, name) in (None, ())}
    more = tuple(word for word in usual.get("bias", ()) if word not in decoding.bias)
    return replace(decoding, **rules, bias=(*decoding.bias, *more))


def report_dropped(names: Iterable[str], reported: set[str]) -> None:
    """Warn that a call's settings contradict some of the folder's, once per name; `reported` holds the names so far."""
    if more := sorted({*names} - reported):
        reported.update(more)
        _log.warning(
            "Settings of the model's folder that do not fit this call are ignored: %s.", ", ".join(more)
        )
