"""GGUF, the file format of llama.cpp and programs built on it: a decoder's weights, settings and tokenizer in one file.

Names, and the order of rotary features in Llama's queries and keys, follow llama.cpp's own converter. The file is
read back with the package gguf, and must contain the model's weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.boundary.packages import package
from penstock.config.layer import unscaled
from penstock.config.stack import Stack
from penstock.config.theirs.read import read_json
from penstock.config.theirs.text import write_text_config
from penstock.errors import ConfigError, NumericError
from penstock.export import ExportType
from penstock.infer.load import found_in
from penstock.models.convert.files import settings_in
from penstock.models.convert.names import text_pending
from penstock.models.embeddings import frequencies
from penstock.models.model import Model

FILE = "model.gguf"
ARCHITECTURES = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3", "gpt2": "GPT2"}
"""llama.cpp's name of each model type of transformers."""
_TYPES: dict[ExportType, tuple[str, str]] = {
    "fp32": ("F32", "ALL_F32"), "fp16": ("F16", "MOSTLY_F16"), "bf16": ("BF16", "MOSTLY_BF16"),
    "int8": ("Q8_0", "MOSTLY_Q8_0"),
}  # fmt: skip
"""gguf's type of matrices, and its name for a file with such matrices."""
_GPT2_SETTINGS = {
    "block_count": "n_layer", "context_length": "n_positions", "embedding_length": "n_embd", "head_count": "n_head",
    "layer_norm_eps": "layer_norm_epsilon",
}  # fmt: skip
_LLAMA_SETTINGS = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "head_count": "num_attention_heads",
    "head_count_kv": "num_key_value_heads", "layer_norm_rms_eps": "rms_norm_eps", "vocab_size": "vocab_size",
}  # fmt: skip
"""Settings by their names in gguf, and in transformers."""
_CUTS = {
    "gpt-2": ("'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+",),
    "llama-bpe": ("\\p{N}{1,3}", "(?i:'s|'t"),
    "qwen2": ("|\\p{N}| ?[^\\s\\p{L}\\p{N}]+", "(?i:'s|'t"),
}
"""llama.cpp's names of the ways in which a byte-level BPE splits texts into words, and parts of their regular
expressions."""


def write_gguf(folder: Path, model: Model, target: Path, kind: ExportType) -> tuple[Path, float]:
    """Write the decoder of a folder with matrices in a type; returns the file, and the difference of the weights read
    back from the model's, relative to the largest of each tensor.

    Raises ConfigError for a model or a tokenizer that llama.cpp computes differently.
    """
    gguf = package("gguf", "GGUF needs the package gguf", "export")
    config: Any = model.config
    values = _settings(config)
    arch = getattr(gguf.MODEL_ARCH, ARCHITECTURES[values["model_type"]])
    name = gguf.MODEL_ARCH_NAMES[arch]
    target.mkdir(parents=True, exist_ok=True)
    path = target / FILE
    writer = gguf.GGUFWriter(str(path), name)
    writer.add_name(folder.parent.name if folder.name == "export" else folder.name)
    writer.add_file_type(getattr(gguf.LlamaFileType, _TYPES[kind][1]))
    _add_settings(writer, gguf, values)
    _add_tokenizer(writer, gguf, folder, config.vocabulary)
    names = gguf.get_tensor_name_map(arch, values.get("num_hidden_layers", values.get("n_layer")))
    weights = _weights(names, model, values)
    large, small = (getattr(gguf.GGMLQuantizationType, one) for one in (_TYPES[kind][0], "F32"))
    for key, tensor in weights.items():
        form = large if tensor.ndim > 1 and not (kind == "int8" and tensor.shape[-1] % 32) else small
        writer.add_tensor(key, gguf.quants.quantize(tensor.numpy(), form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, _checked(gguf, path, weights, kind)


def _settings(config: Any) -> dict[str, Any]:
    """The config.json of the model in transformers. Raises ConfigError for settings that GGUF cannot hold."""
    values = write_text_config(config)
    kind = values["model_type"]
    if kind not in ARCHITECTURES:
        raise ConfigError(
            f"--to gguf writes {', '.join(ARCHITECTURES)}, and this model is {kind}; choose --to transformers, and "
            "llama.cpp's own converter."
        )
    act = values.get("activation_function", values.get("hidden_act"))
    rope = {**(values.get("rope_scaling") or {}), **(values.get("rope_parameters") or {})}
    windows = values.get("sliding_window") is not None and values.get("use_sliding_window", kind == "mistral")
    known = rope.get("rope_type", rope.get("type", "default")) in ("default", "linear", "llama3")
    problems = [
        words
        for wrong, words in (
            (act not in ("silu", "gelu_new"), f"the activation {act}"),
            (windows, "a sliding window"),
            (not known or rope.get("partial_rotary_factor", 1) != 1, f"rotary positions of the kind {rope}"),
        )
        if wrong
    ]
    if problems:
        raise ConfigError(
            f"llama.cpp has no {ARCHITECTURES[kind].lower()} with {' and '.join(problems)}; choose --to transformers."
        )
    return {**values, "rope": {"rope_theta": values.get("rope_theta", 10_000.0), **rope}}


def _add_settings(writer: Any, gguf: Any, values: Mapping[str, Any]) -> None:
    gpt2, rope = values["model_type"] == "gpt2", values["rope"]
    for setting, key in (_GPT2_SETTINGS if gpt2 else _LLAMA_SETTINGS).items():
        getattr(writer, f"add_{setting}")(values[key])
    if gpt2:
        writer.add_feed_forward_length(values.get("n_inner") or 4 * values["n_embd"])
        return
    head = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    for setting in ("key_length", "value_length", "rope_dimension_count"):
        getattr(writer, f"add_{setting}")(head)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    if rope.get("rope_type", rope.get("type")) == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def _add_tokenizer(writer: Any, gguf: Any, folder: Path, rows: int) -> None:
    """Add tokens, merges and special tokens in llama.cpp's form."""
    tokenizer = found_in(folder)
    if tokenizer is None or not (folder / "tokenizer.json").is_file():
        writer.add_tokenizer_model("no_vocab")
        return
    table = read_json(folder / "tokenizer.json")
    model, kinds = table["model"], gguf.TokenType
    if model["type"] != "BPE":
        raise ConfigError(f"llama.cpp has no tokenizer of the kind {model['type']} for decoders, only BPE.")
    words, types = [f"[PAD{number}]" for number in range(rows)], [kinds.UNUSED] * rows
    for word, number in model["vocab"].items():
        words[number], types[number] = word, kinds.NORMAL
        if model.get("byte_fallback") and len(word) == 6 and word.startswith("<0x"):
            types[number] = kinds.BYTE
    for added in table.get("added_tokens") or ():
        words[added["id"]] = added["content"]
        types[added["id"]] = kinds.CONTROL if added["special"] else kinds.USER_DEFINED
    if model.get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores([-float(number) for number in range(rows)])  # earlier tokens are merged first
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_cut_of(table))
        merges = [one if isinstance(one, str) else " ".join(one) for one in model.get("merges") or ()]
        if merges:
            writer.add_token_merges(merges)
    writer.add_token_list(words)
    writer.add_token_types(types)
    ends = settings_in(folder).get("eos_token_id")
    ends = [*ends] if isinstance(ends, list) else [tokenizer.end if ends is None else ends]
    for add, special in (
        (writer.add_bos_token_id, tokenizer.begin), (writer.add_eos_token_id, ends[0]),
        (writer.add_eot_token_id, ends[1] if len(ends) > 1 else None),
        (writer.add_unk_token_id, tokenizer.unknown), (writer.add_pad_token_id, tokenizer.pad),
    ):  # fmt: skip
        if special is not None:
            add(special)
    writer.add_add_bos_token(tokenizer.begin is not None and tokenizer.opening()[:1] == (tokenizer.begin,))
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)


def _cut_of(table: Mapping[str, Any]) -> str:
    """llama.cpp's name for a byte-level BPE's way of splitting texts into words. Raises ConfigError if it has none."""
    part = table.get("pre_tokenizer") or {}
    parts = part.get("pretokenizers") or [part]
    if not table["model"].get("merges"):
        return "gpt-2"  # nothing is joined, wherever it is cut
    patterns = [one["pattern"].get("Regex", "") for one in parts if one.get("type") == "Split"]
    if not patterns and any(one.get("type") == "ByteLevel" and one.get("use_regex", True) for one in parts):
        return "gpt-2"
    for name, marks in _CUTS.items():
        if len(patterns) == 1 and all(mark in patterns[0] for mark in marks):
            return name
    raise ConfigError(
        "The tokenizer cuts texts into words in a way that this export does not know; choose --to transformers, and "
        "llama.cpp's own converter."
    )


def _weights(names: Any, model: Model, values: Mapping[str, Any]) -> dict[str, Tensor]:
    """All weights by llama.cpp's names, in fp32."""
    config: Any = model.config
    llama, gpt2 = values["model_type"] in ("llama", "mistral"), values["model_type"] == "gpt2"
    weights: dict[str, Tensor] = {}
    for one in text_pending({**model.state_dict()}, config):
        tied = one.name == "lm_head.weight" and values.get("tie_word_embeddings", gpt2)
        if tied or one.name.endswith((".attn.bias", ".masked_bias")):
            continue
        key = names.get_name(one.name, try_suffixes=(".weight", ".bias"))
        tensor = one.fetch().float().contiguous()
        if key is None:
            raise ConfigError(f"llama.cpp has no place for the weight {one.name}; choose --to transformers.")
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if llama and f".{part}." in one.name:
                tensor = _interleaved(tensor, values[heads])
        if gpt2 and tensor.ndim == 2 and ".h." in f".{one.name}":
            tensor = tensor.T.contiguous()
        weights[key] = tensor
    if values["rope"].get("rope_type") == "llama3":
        weights["rope_freqs.weight"] = _factors(model.graph.written[0].stack)
    return weights


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys with the features of rotary pairs adjacent; transformers stores them as two halves."""
    pairs = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape).contiguous()


def _factors(stack: Stack) -> Tensor:
    """Divisors of the frequency of each rotary pair in Llama 3, as llama.cpp reads them."""
    rotary, features, cpu = stack.rotary, stack.layers[0].head_width, torch.device("cpu")
    return frequencies(unscaled(rotary, rotary.base), features, cpu) / frequencies(rotary, features, cpu)


def _checked(gguf: Any, path: Path, weights: Mapping[str, Tensor], kind: ExportType) -> float:
    """The largest difference of weights that are read back. Raises NumericError if it is too large."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(str(path)).tensors}
    worst = math.inf if tensors.keys() != weights.keys() else 0.0
    for name, weight in weights.items() if worst == 0.0 else ():
        read = gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type)
        same = np.shape(read) == tuple(weight.shape)
        largest = max(float(weight.abs().max()), 1e-30)
        worst = max(worst, float(np.abs(read - weight.numpy()).max()) / largest if same else math.inf)
    if not worst <= {"fp32": 0.0, "fp16": 1e-3, "bf16": 1e-2, "int8": 1e-2}[kind]:
        raise NumericError(
            f"{path} is read back with other weights than were written, by {worst:.2g} of the largest."
        )
    return worst
