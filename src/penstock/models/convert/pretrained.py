"""Folders with the configuration and the weights of one model, in transformers' layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from penstock.boundary.files import quoted, shown
from penstock.boundary.hub import local_weights
from penstock.config.formats import FORMATS, PRODUCTS, STORED_FORMATS, StoredFormat
from penstock.config.load import to_dict
from penstock.config.model import ModelConfig, TextConfig, ViTConfig
from penstock.config.theirs.backbones import hf_config, require_vit
from penstock.config.theirs.read import OWN, config_of, read_json
from penstock.config.theirs.text import read_text_config, write_text_config
from penstock.errors import CheckpointError, ConfigError
from penstock.leftovers import replace_file
from penstock.models.convert.compressed_tensors import compressed_tensors
from penstock.models.convert.files import described, read_state_dict, settings_in
from penstock.models.convert.load import load_weights, require_as_large
from penstock.models.convert.names import text_pending
from penstock.models.convert.upcycle import gated, read_gated
from penstock.models.convert.vit import to_hf
from penstock.models.lora import is_adapted
from penstock.models.model import Model
from penstock.models.rounded import RoundedWeight, plain_state, rounded_by_clips, rounded_in, without_clips
from penstock.tensorfile import SHARD_BYTES, Pending, pending, write_model

GIVE = "Give a run's folder, one that transformers or save_pretrained wrote, or a name on the hub."
_CARRIED = {
    "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "bad_words_ids", "suppress_tokens",
    "id2label", "label2id", "labels", "labels_in_prompts", "languages", "image_range",
}  # fmt: skip
"""Entries of config.json that say how a model is used; they are copied to any format."""
_POOLING = "1_Pooling/config.json"
_BESIDE = (".json", ".txt", ".spm", ".model", ".jinja")
"""Suffixes of the files that are copied together with a model's weights."""


def save_pretrained(
    model: nn.Module, folder: str | Path, *, weights: Mapping[str, Tensor] | None = None,
    beside: Path | None = None, shard_bytes: int = SHARD_BYTES,
) -> None:  # fmt: skip
    """Write config.json and the weights for transformers' `from_pretrained` if it has such a model, else in Penstock's
    own names (`model_type` penstock_vit and so on). Our `from_pretrained` reads both.

    Weights are written to `model.safetensors`, or, if larger than `shard_bytes`, to numbered files with an index.
    Besides the state dict only one converted weight at a time is in memory. Each file appears whole or not at all;
    existing files are replaced only when all new weights are on the disk (see `penstock.tensorfile.write_model`, and
    what it raises). `weights` replace the model's state dict, if the model holds only a part of it. `beside` is a
    folder whose other files, such as a tokenizer's, are copied; entries of its config.json, such as the ids of special
    tokens, are added to the model's. Linears with learned clips are written in int8, as they compute.
    """
    config = cast(Any, model).config
    if weights is None and any(map(is_adapted, model.modules())):
        raise ConfigError(
            "The model has adapters, which config.json cannot describe; give `weights`, the model's state dict as "
            "penstock.models.lora.merged returns it."
        )
    others = [*beside.iterdir()] if beside is not None and beside.is_dir() else []
    more: dict[str, Any] = {}
    for file in (file for file in others if file.name == "config.json"):
        more |= read_json(file)
    state = model.state_dict() if weights is None else weights
    rounded = rounded_by_clips(state)
    if rounded:
        formats: dict[str, tuple[StoredFormat, RoundedWeight]] = {
            n: ("int8", one) for n, one in rounded.items()
        }
        values, tensors = _in_few_bits(config, without_clips(state)[0], formats, more)
    else:
        values, tensors = _in_their_form(config, state, more)
    files = {file.name: file for file in others if file.name != "config.json"}
    _write_folder(Path(folder), values, tensors, files, shard_bytes)


def _write_folder(
    folder: Path, values: dict[str, Any], tensors: list[Pending], files: Mapping[str, Path],
    shard_bytes: int = SHARD_BYTES,
) -> None:  # fmt: skip
    """Write weights, a config.json with `values`, and copies of `files` under their names."""
    text = json.dumps(values, indent=2) + "\n"

    def what_goes_with_them() -> None:
        for name, file in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            replace_file(folder / name, partial(shutil.copyfile, file))
        replace_file(folder / "config.json", lambda path: path.write_text(text))

    write_model(folder, tensors, shard_bytes=shard_bytes, before_read=what_goes_with_them)


def save_rounded(
    model: nn.Module, folder: str | Path, rounded: Mapping[str, tuple[StoredFormat, RoundedWeight]], *,
    source: Path, extra: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Write a model in Penstock's own names with some linears quantised: `rounded` maps the name of each to the format
    in which it multiplies, and its weight. config.json lists the formats (`quantised`), and the entries of `extra`.
    Special tokens, labels, classes and the tokenizer are copied from the folder `source`.
    """
    config, more = cast(Any, model).config, _carried(source)
    values, tensors = _in_few_bits(config, model.state_dict(), rounded, more, extra)
    _write_folder(Path(folder), values, tensors, files_beside(source))


def _in_few_bits(
    config: ModelConfig, weights: Mapping[str, Tensor],
    rounded: Mapping[str, tuple[StoredFormat, RoundedWeight]], more: Mapping[str, Any],
    extra: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], list[Pending]]:  # fmt: skip
    """The config.json, with the entries of `more`, and the tensors of a model with some weights quantised."""
    state = {name: tensor for name, tensor in weights.items() if name not in config.graph.tied}
    for name, (_, weight) in rounded.items():
        state |= {key: part.contiguous() for key, part in weight.stored(name).items()}
    formats = {name: form for name, (form, _) in rounded.items()}
    values = {**_own_form(config), **more, "quantised": {"formats": formats, **(extra or {})}}
    return values, pending(state)


def save_values(model: nn.Module, folder: str | Path, *, source: Path) -> None:
    """Write a model as `save_pretrained` does, and copy the rest of the folder `source`, which holds the model in
    another form, as `save_rounded` does."""
    values, tensors = _in_their_form(cast(Any, model).config, model.state_dict(), _carried(source))
    values |= {"dtype": str(next(model.parameters()).dtype).removeprefix("torch.")}
    _write_folder(Path(folder), values, tensors, files_beside(source))


def save_compressed(
    model: nn.Module, folder: str | Path, rounded: Mapping[str, tuple[StoredFormat, RoundedWeight]], *,
    source: Path,
) -> None:  # fmt: skip
    """Write a model with some linears quantised, as `save_rounded` does, but in the layout that transformers reads with
    the package compressed-tensors. Raises ConfigError for a model that transformers does not have or the layout cannot
    hold.
    """
    config = cast(Any, model).config
    if isinstance(config, ViTConfig):
        require_vit(config)
    require_theirs(config)
    quantisation, tensors = compressed_tensors(config, rounded)
    plain = {
        name: value
        for name, value in model.state_dict().items()
        if name.removesuffix(".weight") not in rounded
    }
    values, others = _in_their_form(config, plain, _carried(source))
    values |= {"dtype": "float32", "quantization_config": quantisation}
    _write_folder(Path(folder), values, [*others, *pending(tensors)], files_beside(source))


def _carried(source: Path) -> dict[str, Any]:
    return {key: value for key, value in settings_in(source).items() if key in _CARRIED}


def files_beside(folder: Path) -> dict[str, Path]:
    """The files of a model's folder that are neither weights nor config.json, by their names in it: a tokenizer's, and
    how texts are pooled."""
    if not folder.is_dir():
        return {}
    every = [*folder.iterdir(), folder / _POOLING]
    return {
        file.relative_to(folder).as_posix(): file
        for file in every
        if file.is_file() and file.name.endswith(_BESIDE) and file != folder / "config.json"
        and not file.name.endswith(".safetensors.index.json")
    }  # fmt: skip


def rounded_weights(folder: str | Path) -> dict[str, tuple[StoredFormat, RoundedWeight]]:
    """The quantised linears in a folder: for each name the format in which it multiplies, and its weight; empty for a
    model that was not quantised. Raises CheckpointError if config.json and the weights contradict each other.
    """
    folder = local_weights(folder)
    file = folder / "config.json"
    values = read_json(file).get("quantised") if file.is_file() else None
    if values is None:
        return {}
    formats = values.get("formats") if isinstance(values, dict) else None
    weights = rounded_in(read_state_dict(folder))
    if not isinstance(formats, dict) or formats.keys() != weights.keys():
        raise CheckpointError(
            f"{file} names other linear layers under quantised.formats than the weights beside it have in few bits. "
            "Fetch or write the folder again."
        )
    for name, form in formats.items():
        bits = 8 if weights[name].offsets is None else 4
        stored = PRODUCTS[form].weights if form in STORED_FORMATS else None
        if stored is None or FORMATS[stored].bits != bits:
            raise CheckpointError(
                f"{file} says that {name} multiplies in {quoted(str(form))}, but its weight has {bits} bits. "
                "Fetch or write the folder again."
            )
    return {name: (formats[name], weight) for name, weight in weights.items()}


def _in_their_form(
    config: ModelConfig, state: Mapping[str, Tensor], more: dict[str, Any]
) -> tuple[dict[str, Any], list[Pending]]:
    """The config.json, with the entries of `more`, and the weights: in transformers' form if it has one, else in
    ours."""
    if isinstance(config, ViTConfig):
        with suppress(ConfigError):
            return hf_config(config) | more, pending(to_hf(state, config))
    elif isinstance(config, TextConfig):
        with suppress(ConfigError):
            values = write_text_config(config) | more
            read_text_config(values)  # a number of the padding may be another than theirs must be
            return values, text_pending(state, config)
    state = {name: tensor for name, tensor in state.items() if name not in config.graph.tied}
    return _own_form(config) | more, pending(state)


def _own_form(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a model in our own names."""
    own = f"{OWN}{config.family}"
    return {"model_type": own, "architectures": [own], "penstock": to_dict(config)}


def require_theirs(config: ModelConfig) -> None:
    """Raise ConfigError if no model of transformers computes the same; the message says what they lack."""
    if isinstance(config, ViTConfig):
        hf_config(config)
    elif isinstance(config, TextConfig):
        write_text_config(config)
    else:
        raise ConfigError(f"transformers has no model of the family {config.family}.")


def from_pretrained(
    folder: str | Path, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    labels: Sequence[int] = (),
) -> Model:  # fmt: skip
    """The model in a folder that `save_pretrained`, or transformers' for a ViT classifier or a text model of
    `penstock.config.theirs.library`, wrote. With `labels`, the numbers of labels that select experts, other labels'
    experts are not read: see `penstock.models.convert.upcycle`.

    Raises ConfigError for another family, CheckpointError for broken files.
    """
    folder = local_weights(folder)
    config = read_config(folder)
    held = sum(tensor.numel() for tensor in plain_state(described(folder)).values())
    require_as_large(config, held, str(folder / "config.json"))
    if labels:
        model = Model(gated(config, labels), device=device, dtype=dtype)
        load_weights(model, read_gated(folder, config, labels))
        return model
    model = Model(config, device=device, dtype=dtype)
    load_weights(model, folder)
    return model


def model_in(source: str | Path) -> ModelConfig | None:
    """The model that a folder, or a name on the hub, describes; None for weights without a config.json, and for timm's.

    Raises ConfigError for a model of another family, and as `local_weights`.
    """
    if not str(source):
        return None  # no name at all, which the configuration refuses
    folder = local_weights(source)
    if not folder.is_file() and not any(folder.glob("*.safetensors")):
        return read_config(folder)  # which says what is missing
    if not (folder / "config.json").is_file() or "model_type" not in read_json(folder / "config.json"):
        return None
    return read_config(folder)


def read_config(folder: Path) -> ModelConfig:
    """The model that the config.json of a folder describes. Raises as `from_pretrained`."""
    if not folder.exists():
        raise ConfigError(f"There is no folder {shown(folder)}. {GIVE}")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{shown(folder)} has no config.json, nor has an export in it. {GIVE}")
    return config_of(read_json(folder / "config.json"), shown(folder / "config.json"))
