"""Text models to transformers' config.json and weights and back, by the tables of `libraries`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.config.model import EncoderConfig, Seq2SeqConfig, stacks
from penstock.config.stack import Rotary
from penstock.errors import ConfigError
from penstock.models.convert.libraries import FREE, LIBRARIES, Library
from penstock.models.convert.names import from_theirs, left_over, to_theirs
from penstock.models.positions import Sinusoidal
from penstock.models.stack import TextConfig, TextModel

_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
_WINDOW = ("use_sliding_window", "sliding_window", "layer_types")
_OWN = ("init", "sequence", "decoder_sequence")
"""Fields that config.json keeps under `penstock`, because transformers has none for them."""


def library_of(model_type: Any) -> Library:
    """The entry of a config.json's model_type. Raises ConfigError for one that is not known."""
    for library in LIBRARIES:
        if library.model_type == model_type:
            return library
    known = ", ".join(repr(library.model_type) for library in LIBRARIES)
    raise ConfigError(f"config.json is of model_type {model_type!r}; known are 'vit', {known}.")


def read_text_config(values: Mapping[str, Any]) -> TextConfig:
    """The model that a config.json of transformers describes; what is absent has transformers' default.

    Raises ConfigError with every option that our models cannot honour.
    """
    library = library_of(values.get("model_type"))
    problems = list(_refused(values, library))
    found: dict[str, Any] = {}
    told: dict[str, str] = {}
    for option in library.options:
        for ours in library.options[option][1]:
            value = _value(values, option, library)
            if option == "n_inner" and value is None:
                value = 4 * _value(values, "n_embd", library)
            if ours in found and found[ours] != value:
                problems.append(
                    f"config.json has {option} {value!r} and {told[ours]} {found[ours]!r}, but Penstock's model has "
                    f"one {ours.rpartition('.')[2]} for both."
                )
            found[ours], told[ours] = value, option
    option, known = library.activation
    activation = values.get(option, library.default)
    if activation not in known:
        problems.append(f"config.json has {option} {activation!r}; known are {', '.join(known)}.")
    if library.rotary:
        found["rotary"] = _rotary(values, problems)
        if "sliding_attention" in (values.get("layer_types") or ()) and not values.get("use_sliding_window"):
            problems.append(
                "config.json has sliding_attention among layer_types, but no use_sliding_window true, without which "
                "transformers has no window; set it to true, or remove layer_types."
            )
    if problems:
        raise ConfigError(problems)
    both = isinstance(library.base, Seq2SeqConfig)
    found |= {f"{side}mlp": known[activation] for side in (("encoder.", "decoder.") if both else ("",))}
    if library.rotary and values.get("use_sliding_window"):
        found["window"] = _window(values)
    if isinstance(library.base, EncoderConfig):
        found |= _head(values, library)
    own = values.get("penstock", {})
    found |= {name: own[name] for name in _OWN if name in own}
    found.setdefault("sequence", found.get("max_positions", 512))
    if both:
        found.setdefault("decoder_sequence", found["sequence"])
    return settled(_with(library.base, found))


def _value(values: Mapping[str, Any], option: str, library: Library) -> Any:
    """What config.json says of an option, or its default there."""
    default = library.options[option][0]
    found = values.get(option)
    if found is None and isinstance(default, str) and default.startswith("="):
        return _value(values, default[1:], library)
    return values.get(option, default)


def _refused(values: Mapping[str, Any], library: Library) -> Iterator[str]:
    """Each option that has no place in our models, or another value than they have."""
    known = {*library.options, library.activation[0], *FREE, *((*_ROPE, *_WINDOW) if library.rotary else ())}
    for option, value in values.items():
        if option in library.must:
            allowed = library.must[option]
            if value not in allowed:
                yield f"config.json has {option} {value!r}, but Penstock's model has {allowed[0]!r} only."
        elif option not in known and option[0] != "_":
            yield (
                f"config.json has {option} {value!r}, of which Penstock does not know what it changes; remove it "
                "if it changes nothing that the model computes."
            )


def _rotary(values: Mapping[str, Any], problems: list[str]) -> Rotary:
    """What version 4 of transformers writes as rope_theta and rope_scaling, and version 5 as rope_parameters."""
    given = values.get("rope_parameters") or values.get("rope_scaling") or {}
    base = float(given.get("rope_theta", values.get("rope_theta", 10000.0)))
    kind = given.get("rope_type", given.get("type", "default"))
    same: dict[str, tuple[Any, ...]] = {
        "attention_factor": (None,), "mscale": (None,), "mscale_all_dim": (None,), "truncate": (None, True),
        "partial_rotary_factor": (None, 1.0),
    }  # fmt: skip
    problems += [
        f"config.json has {name} {given[name]!r} for its rotary positions, which Penstock's do not have."
        for name, allowed in same.items()
        if given.get(name) not in allowed
    ]
    if kind == "default":
        return Rotary(base=base)
    if kind not in ("linear", "llama3", "yarn"):
        problems.append(
            f"config.json has rope_type {kind!r}; Penstock's rotary positions have default, linear, llama3 and yarn."
        )
        return Rotary(base=base)
    low, high = ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ("beta_slow", "beta_fast")
    trained = given.get("original_max_position_embeddings") or values.get("max_position_embeddings", 8192)
    return Rotary(
        base=base,
        scaling=kind,
        factor=float(given["factor"]),
        trained=trained if kind != "linear" else Rotary.trained,
        low=float(given.get(low) or 1.0) if kind != "linear" else Rotary.low,
        high=float(given.get(high) or (32.0 if kind == "yarn" else 4.0)) if kind != "linear" else Rotary.high,
    )


def _window(values: Mapping[str, Any]) -> int | None:
    """The window that all blocks have. Raises ConfigError where only some have it."""
    depth = values["num_hidden_layers"]
    first = values.get("max_window_layers", depth)
    kinds = values.get("layer_types") or [
        "full_attention" if i < first else "sliding_attention" for i in range(depth)
    ]
    if set(kinds) == {"full_attention"} or values.get("sliding_window") is None:
        return None
    if set(kinds) == {"sliding_attention"}:
        return int(values["sliding_window"])
    raise ConfigError(
        "config.json has use_sliding_window with layer_types of both kinds, but Penstock reads models that have the "
        "window in all blocks, or in none."
    )


def _head(values: Mapping[str, Any], library: Library) -> dict[str, Any]:
    """What an encoder gives, by the class in config.json's architectures."""
    name = (values.get("architectures") or ["BertForMaskedLM"])[0]
    heads = {theirs: ours for ours, theirs in library.architectures.items()} | {"BertForPreTraining": "words"}
    if name not in heads:
        raise ConfigError(f"config.json is of {name}; known are {', '.join(heads)}.")
    classes = len(values["id2label"]) if values.get("id2label") else values.get("num_labels", 2)
    return {
        "head": heads[name],
        "output_bias": True,
        **({"classes": classes} if heads[name] == "classes" else {}),
    }


def _with(config: Any, found: Mapping[str, Any]) -> Any:
    """A configuration with other values at dotted paths."""
    changes: dict[str, Any] = {}
    for path, value in found.items():
        name, dot, rest = path.partition(".")
        if dot:
            changes[name] = _with(changes.get(name, getattr(config, name)), {rest: value})
        else:
            changes[name] = value
    return replace(config, **changes)


def settled(config: TextConfig) -> TextConfig:
    """The same model with nothing stated that follows from other fields, so that equal models are equal."""
    sides = {stack: _settled(stack) for stack in stacks(config)}
    if isinstance(config, Seq2SeqConfig):
        config = replace(config, encoder=sides[config.encoder], decoder=sides[config.decoder])
    else:
        config = sides[config]
    learned = any(stack.positions == "learned" for stack in stacks(config))
    same = config.max_positions in (None, config.sequence)
    return config if learned and not same else replace(config, max_positions=None)


def _settled(stack: Any) -> Any:
    changes: dict[str, Any] = {}
    if stack.kv == stack.heads:
        changes["kv_heads"] = None
    if stack.head_width * stack.heads == stack.width:
        changes["head_features"] = None
    if stack.weights_dropout == stack.dropout:
        changes["attention_dropout"] = None
    if stack.hidden_dropout in (0.0, stack.dropout):
        changes["mlp_dropout"] = None if stack.hidden_dropout else 0.0
    return replace(stack, **changes)


def write_text_config(config: TextConfig) -> dict[str, Any]:
    """The config.json of the model of transformers that computes the same. Raises ConfigError, with what the nearest
    one lacks, if there is none.
    """
    best: list[str] | None = None
    for library in LIBRARIES:
        if type(library.base) is not type(config):
            continue
        values = _written(config, library)
        try:
            lacks = list(_differences(settled(config), read_text_config(values), "model"))
        except ConfigError as error:
            lacks = [str(error)]
        if not lacks:
            return values
        lacks = [f"transformers' {library.model_type} has no {each}." for each in lacks]
        best = lacks if best is None or len(lacks) < len(best) else best
    raise ConfigError([*(best or []), "Save such a model in Penstock's own names with save_pretrained."])


def _differences(ours: Any, theirs: Any, path: str) -> Iterator[str]:
    for one in fields(ours):
        mine, other = getattr(ours, one.name), getattr(theirs, one.name)
        if is_dataclass(mine):
            yield from _differences(mine, other, f"{path}.{one.name}")
        elif mine != other:
            yield f"{path}.{one.name}={mine}"


def _written(config: TextConfig, library: Library) -> dict[str, Any]:
    """config.json as a library has it, whether it can say all that the configuration says or not."""
    head = getattr(config, "head", "words")
    values: dict[str, Any] = {
        "architectures": [library.architectures.get(head, library.architectures["words"])],
        "model_type": library.model_type,
        **{
            option: allowed[0]
            for option, allowed in library.must.items()
            if option != "partial_rotary_factor"
        },
    }
    for option, (_, ours) in library.options.items():
        values[option] = _at(config, ours[0])
    values |= dict.fromkeys(library.last_token, config.vocabulary - 1)
    stack = stacks(config)[0]
    option, known = library.activation
    values[option] = next((theirs for theirs, ours in known.items() if ours == stack.mlp), library.default)
    if library.rotary:
        values |= _written_rotary(stack.rotary)
        if stack.window is not None and library.model_type != "llama":
            kinds = ["sliding_attention"] * stack.depth
            values |= {"use_sliding_window": True, "sliding_window": stack.window, "layer_types": kinds}
            values["max_window_layers"] = 0
    if isinstance(config, EncoderConfig) and config.head == "classes":
        values["id2label"] = {str(i): f"LABEL_{i}" for i in range(config.classes)}
        values["label2id"] = {f"LABEL_{i}": i for i in range(config.classes)}
    values["penstock"] = {name: getattr(config, name) for name in _OWN if hasattr(config, name)}
    return values


def _at(config: TextConfig, path: str) -> Any:
    """A value of ours, with what follows from other fields put in."""
    side, dot, name = path.rpartition(".")
    holder: Any = getattr(config, side) if dot else config
    known: dict[str, Callable[[], Any]] = {
        "kv_heads": lambda: holder.kv,
        "head_features": lambda: holder.head_width,
        "attention_dropout": lambda: holder.weights_dropout,
        "mlp_dropout": lambda: holder.hidden_dropout,
        "max_positions": lambda: config.max_positions or config.sequence,
    }
    return known[name]() if name in known else getattr(holder, name)


def _written_rotary(rotary: Rotary) -> dict[str, Any]:
    values: dict[str, Any] = {"rope_theta": rotary.base}
    if rotary.scaling == "none":
        return values
    scaling: dict[str, Any] = {"rope_type": rotary.scaling, "factor": rotary.factor}
    if rotary.scaling != "linear":
        low, high = (
            ("low_freq_factor", "high_freq_factor")
            if rotary.scaling == "llama3"
            else ("beta_slow", "beta_fast")
        )
        scaling |= {"original_max_position_embeddings": rotary.trained, low: rotary.low, high: rotary.high}
    return {**values, "rope_scaling": scaling}


def text_to_hf(state: Mapping[str, Tensor], config: TextConfig) -> dict[str, Tensor]:
    """Our state dict as transformers' model of this configuration is stored. Raises ConfigError if there is none."""
    library = library_of(write_text_config(config)["model_type"])
    found = to_theirs(state, config, library.names(config))
    if isinstance(config, EncoderConfig) and config.head == "none":
        return {name.removeprefix(library.prefix): tensor for name, tensor in found.items()}
    return found


def text_from_hf(
    state: Mapping[str, Tensor], model: TextModel
) -> tuple[dict[str, Tensor], list[str], list[str]]:
    """transformers' state dict in our names and shapes, those of theirs that were left out because the model does not
    need them, and those that have no place. With or without the prefix of the base model.
    """
    library = library_of(write_text_config(model.config)["model_type"])
    heads = "|".join(map(re.escape, (library.prefix or "\0", *library.heads)))
    if library.prefix:
        state = {re.sub(rf"^(?!{heads})", library.prefix, name): tensor for name, tensor in state.items()}
    found, left = from_theirs(state, model.config, library.names(model.config), model.state_dict())
    # transformers' state dicts hold what is tied under each of its names.
    copies = [
        name for name in left if "tokens.weight" in found and _equal(state[name], found["tokens.weight"])
    ]
    free, others = left_over([name for name in left if name not in copies], library.ignored)
    if "final_logits_bias" in free and bool((state["final_logits_bias"] != 0).any()):
        raise ConfigError(
            "The weights have a final_logits_bias that is not zero, but the model has no bias of its outputs; set "
            "model.output_bias to true."
        )
    for name in (name for name in free if name.endswith("embed_positions.weight")):
        _require_sinusoids(name, state[name])
    return found, free, others


def _require_sinusoids(name: str, table: Tensor) -> None:
    expected = Sinusoidal(table.shape[1]).forward(torch.arange(table.shape[0]))
    if not torch.allclose(table.float(), expected, atol=1e-2 if table.dtype != torch.float32 else 1e-4):
        raise ConfigError(
            f"{name} holds no sines and cosines, but the model computes its positions; retrain, or set "
            "model.encoder.positions and model.decoder.positions to learned."
        )


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)
