"""Quantised models in the layout of compressed-tensors, unpacked by hand, and as transformers opens them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor

import penstock
from helpers.families import ENROLLED
from helpers.small_folders import folder, quantised
from penstock.compress.pad import write_transformers
from penstock.compress.quantise import quantise_folder
from penstock.config.quantise import QuantiseOptions
from penstock.errors import CheckpointError, ConfigError
from penstock.export.export import export, inputs_of
from penstock.models.convert.pretrained import rounded_weights, save_rounded
from penstock.models.rounded import rounded_in
from penstock.products.rounded import store_rounded

FORM = "compressed-tensors"
CASES: dict[str, dict[str, Any]] = {
    "bert-tiny": {"format": "int8"},
    "vit-s16": {"format": "int8", "inputs": "static"},
    "llama-tiny": {"format": "int8_weights"},
    "marian-tiny": {"format": "int4"},
}
"""A format for a model of each kind."""


def by_hand(tensors: dict[str, Any], name: str) -> Any:
    """The values of a linear, one number after the other as the layout says."""
    scales = tensors[f"{name}.weight_scale"]
    if f"{name}.weight" in tensors:
        return tensors[f"{name}.weight"].astype(np.float32) * scales
    outputs, inputs = tensors[f"{name}.weight_shape"].tolist()
    words, zeros = tensors[f"{name}.weight_packed"], tensors.get(f"{name}.weight_zero_point")
    bits = 8 if zeros is None else 4
    each, group = 32 // bits, inputs // scales.shape[1]
    values = np.empty((outputs, inputs), np.float32)
    for row in range(outputs):
        for column in range(inputs):
            number = int(words[row, column // each]) >> bits * (column % each) & (1 << bits) - 1
            zero = 128 if zeros is None else int(zeros[row // 8, column // group]) >> 4 * (row % 8) & 15
            values[row, column] = (number - zero) * scales[row, column // group]
    return values


@pytest.mark.parametrize("name", CASES)
def test_the_layout_holds_the_values_of_the_weights(name: str, tmp_path: Path) -> None:
    where = quantised(name, tmp_path, **CASES[name])
    target, difference = export(where, tmp_path / "out", FORM)
    assert difference < 1e-6
    tensors = load_file(target / "model.safetensors")
    plain = load_file(write_transformers(where, tmp_path / "values")[0] / "model.safetensors")
    few = {key.removesuffix(".weight_scale") for key in tensors if key.endswith(".weight_scale")}
    assert plain.keys() - tensors.keys() == {
        f"{each}.weight" for each in few if f"{each}.weight" not in tensors
    }
    bits = 4 if CASES[name]["format"] == "int4" else 8
    for each in few:
        expected = plain[f"{each}.weight"]
        np.testing.assert_allclose(by_hand(tensors, each), expected, rtol=1e-6, atol=1e-8)
        numbers = tensors.get(f"{each}.weight", tensors.get(f"{each}.weight_packed"))
        assert numbers.nbytes == expected.size * bits // 8
        assert (f"{each}.input_scale" in tensors) == (CASES[name].get("inputs") == "static")
    for key in plain.keys() - {f"{each}.weight" for each in few}:
        np.testing.assert_array_equal(tensors[key], plain[key])
    quantisation = json.loads((target / "config.json").read_text())["quantization_config"]
    patterns = [
        pattern.removeprefix("re:")
        for group in quantisation["config_groups"].values()
        for pattern in group["targets"]
    ]
    for key in {key.rpartition(".")[0] for key in tensors}:
        assert sum(re.match(pattern, key) is not None for pattern in patterns) == (key in few), key
    assert len(few) == {"bert-tiny": 12, "vit-s16": 12, "llama-tiny": 14, "marian-tiny": 32}[name]
    # The folder opens here, too: its weights are those of a model like any other.
    again = penstock.create(penstock.from_pretrained(target).config)
    assert penstock.load_weights(again, target).names == "hf"


@pytest.mark.parametrize("name", CASES)
def test_transformers_computes_what_the_quantised_model_does(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    where = quantised(name, tmp_path, **CASES[name])
    export(where, tmp_path / "out", FORM)
    heads = {
        "bert-tiny": "MaskedLM", "vit-s16": "ImageClassification", "llama-tiny": "CausalLM", "marian-tiny": "Seq2SeqLM",
    }  # fmt: skip
    opened = getattr(transformers, f"AutoModelFor{heads[name]}")
    theirs, info = opened.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    model = penstock.from_pretrained(where).eval()
    given = inputs_of(model, 3, 11, 9)
    if "lengths" in given:
        given["lengths"].fill_(11)
    names = {
        "tokens": "input_ids", "images": "pixel_values", "source": "input_ids", "target": "decoder_input_ids",
    }  # fmt: skip
    with torch.inference_mode():
        outputs = theirs.eval()(**{names[key]: value for key, value in given.items() if key in names}).logits
        values = model(*given.values())
        if CASES[name]["format"] == "int8":
            store_rounded(model, rounded_weights(where))
        expected = model(*given.values()) if CASES[name]["format"] == "int8" else values

    def apart(one: Tensor, other: Tensor) -> float:
        return float((one - other).abs().max() / values.abs().max())

    # Of a token's inputs the largest is 127.5 there and 127 here; with one scale for all both round alike.
    alike = name != "bert-tiny"
    assert apart(outputs, expected) < (1e-5 if alike else 2e-3)
    if name == "vit-s16":
        assert apart(expected, values) > 1e-4, "inputs are rounded there, too"


def test_models_that_the_layout_cannot_hold_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no weights in few bits"):
        export(folder("bert-tiny", tmp_path), tmp_path / "out", FORM)
    with pytest.raises(ConfigError, match="gpt2 stores linears transposed"):
        export(quantised("gpt-tiny", tmp_path / "gpt"), tmp_path / "out", FORM)
    penstock.save_pretrained(penstock.create(ENROLLED["mixtral"].config), tmp_path / "mixtral")
    quantise_folder(tmp_path / "mixtral", tmp_path / "experts", QuantiseOptions(format="int8"))
    with pytest.raises(ConfigError, match="mixtures of experts"):
        export(tmp_path / "experts", tmp_path / "out", FORM)
    where = quantised("llama-tiny", tmp_path / "llama", format="int4")
    moved = {}
    for name, (form, weight) in rounded_weights(where).items():
        assert weight.offsets is not None
        moved[name] = (form, replace(weight, offsets=weight.offsets + 0.3 * weight.scales))
    save_rounded(penstock.from_pretrained(where), tmp_path / "older", moved, source=where)
    with pytest.raises(ConfigError, match=r"without a number for zero.*quantise the original"):
        export(tmp_path / "older", tmp_path / "out", FORM)
    assert not (tmp_path / "out").exists()


def test_folders_of_other_layouts_are_refused(tmp_path: Path) -> None:
    target, _ = export(quantised("marian-tiny", tmp_path, format="int4"), tmp_path / "out", FORM)
    file = target / "config.json"
    values = json.loads(file.read_text())
    quantisation = values["quantization_config"]
    group = quantisation["config_groups"]["group_0"]
    for broken in (
        {"quant_method": "gptq", "bits": 4},
        quantisation | {"config_groups": {"a": group | {"weights": group["weights"] | {"symmetric": True}}}},
        quantisation | {"config_groups": {"a": group | {"weights": group["weights"] | {"type": "float"}}}},
        quantisation | {"config_groups": None},
        "int4",
    ):
        file.write_text(json.dumps(values | {"quantization_config": broken}))
        with pytest.raises(ConfigError, match="of another kind than Penstock reads"):
            penstock.from_pretrained(target)
    state = {key: torch.from_numpy(value) for key, value in load_file(target / "model.safetensors").items()}
    name = next(key for key in state if key.endswith(".weight_packed")).removesuffix(".weight_packed")
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "packed": lambda words: words.long(),
        "zero_point": lambda words: words[:, :-1],
        "scale": lambda scales: scales[1:],
        "shape": lambda shape: shape * 2,
    }
    for end, change in changes.items():
        with pytest.raises(
            CheckpointError, match=f"{name}.weight_packed (does not go|holds 32 × 32 numbers of 4)"
        ):
            rounded_in(state | {f"{name}.weight_{end}": change(state[f"{name}.weight_{end}"])})
