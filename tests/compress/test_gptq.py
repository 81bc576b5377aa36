"""GPTQ: outputs change less than by rounding to the nearest number, in the memory of a model and two blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.families import ENROLLED, batches
from helpers.sweeps import sweep
from penstock.compress.calibrate import record
from penstock.compress.data import QuantiseData
from penstock.compress.gptq import DAMPING, gptq, norm_readers, round_by_blocks, smooth
from penstock.compress.quantise import candidates, quantise_folder
from penstock.config.formats import StoredFormat
from penstock.config.model import PRESETS
from penstock.config.quantise import QuantiseOptions
from penstock.errors import ConfigError
from penstock.ladder.trace import TensorMemory
from penstock.models import create
from penstock.models.convert import save_pretrained
from penstock.models.rounded import RoundedWeight, nearest, round_groups, round_rows
from penstock.models.sublayers import ZeroCentredNorm


def _reference(weight: Tensor, hessian: Tensor, grid: RoundedWeight) -> Tensor:
    """Optimal Brain Quantisation in the order of the columns, each with the inverse of what is left (equations 2 and 3
    of the paper), in fp64."""
    left, values = weight.double().clone(), torch.empty_like(weight)
    wide = hessian.double()
    inverse = torch.linalg.inv(wide + DAMPING * wide.diagonal().mean() * torch.eye(len(wide)))
    for column in range(weight.shape[1]):
        one = nearest(left[:, :1].float(), grid.scales).values()
        values[:, column] = one[:, 0]
        error = (left[:, :1] - one.double()) / inverse[0, 0]
        left = (left - error * inverse[:1])[:, 1:]
        inverse = (inverse - inverse[:, :1] @ inverse[:1] / inverse[0, 0])[1:, 1:]
    return values


def test_columns_make_up_for_each_other_as_the_paper_says() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(24, 160), torch.randn(400, 160) @ torch.randn(160, 160)
    x[:, 7] = 0.0
    hessian = x.t() @ x
    found = gptq(weight, hessian.clone(), "int8")
    kept = hessian.clone()
    kept[7, 7] = 1.0  # an input that is always zero
    bare = weight.clone()
    bare[:, 7] = 0.0
    expected = _reference(bare, kept, round_rows(bare))
    assert float((found.values() != expected).float().mean()) < 0.01, "but for rounding in fp32"

    def change(one: RoundedWeight) -> float:
        return float(((one.values() - weight) @ x.t()).square().mean())

    assert change(found) < 0.6 * change(round_rows(weight))
    assert change(gptq(weight, hessian.clone(), "int4")) < 0.6 * change(round_groups(weight))


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("name", ["gpt", "t5"])
def test_a_model_is_rounded_block_by_block(name: str, form: StoredFormat) -> None:
    sizes: dict[str, Any] = {"width": 32, "mlp_width": 64}
    config: Any = ENROLLED[name].config
    if name == "gpt":
        config = replace(config, **sizes)
    else:
        sides = {side: replace(getattr(config, side), **sizes) for side in ("encoder", "decoder")}
        config = replace(config, **sides)
    torch.manual_seed(0)
    model = create(config).eval()
    given = [batches(config, step, 16)[:-1] for step in range(4)]
    with torch.no_grad():
        expected = model(*given[0])
        names = dict.fromkeys(candidates(model, form)[0], form)
        state = {key: value.clone() for key, value in model.state_dict().items()}
        rounded = round_by_blocks(model, lambda: given, names)
        found = model(*given[0])
        assert rounded.keys() == names.keys()
        for linear, one in rounded.items():
            assert torch.equal(model.get_submodule(linear).weight, one.values())
        model.load_state_dict(state)
        for linear in names:
            weight: Any = model.get_submodule(linear).weight
            weight.copy_((round_groups if form == "int4" else round_rows)(weight).values())
        plain = model(*given[0])
    assert float((found - expected).square().mean()) < float((plain - expected).square().mean())


@pytest.mark.parametrize("form", sweep(["int8", "int4"], (), slow=["int4"]))
def test_the_peak_of_memory_is_the_model_and_two_blocks(
    form: StoredFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(
        PRESETS["llama-tiny"], width=128, depth=4, heads=4, kv_heads=None, mlp_width=352, vocabulary=64
    )
    torch.manual_seed(0)
    model = create(config).eval()
    given = [(torch.randint(0, 64, (2, 16)),) for _ in range(3)]
    names = dict.fromkeys(candidates(model, form)[0], form)
    block = sum(tensor.numel() * 4 for tensor in model.decoder.blocks[0].parameters())
    tensors = [tensor for one in given for tensor in one]
    counter = TensorMemory([*model.parameters(), *model.buffers()], tensors)
    whole = counter.bytes
    with counter:
        rounded = round_by_blocks(model, lambda: given, names)
    stored = sum(
        part.numel() * part.element_size()
        for one in rounded.values()
        for part in (one.numbers, one.scales, one.offsets)
        if part is not None
    )
    assert counter.peak <= whole + stored + 2 * block + 100_000, "the rounded weights are the result"
    # Of a folder as well, once it is read: what is there twice are weights in few bits, by which layers multiply.
    model = create(config)
    save_pretrained(model, tmp_path / "whole")
    monkeypatch.setattr("penstock.compress.quantise.from_pretrained", lambda folder: model)
    options = QuantiseOptions(format=form, weights="gptq")
    with TensorMemory([*model.parameters(), *model.buffers()], tensors) as counter:
        quantise_folder(tmp_path / "whole", tmp_path / "small", options, QuantiseData(lambda: given))
    assert counter.peak <= whole + 2 * stored + 2 * block + 100_000
    assert counter.peak > whole + stored


# Smoothing changes no output, whatever family a model is of, and takes outliers out of inputs.


LAST = {
    "bert", "bert of classes", "marian", "bart", "marian moe", "diffusion moe", "experts of blocks", "olmo",
}  # fmt: skip
"""Families whose norms come last, or have no weights."""


@pytest.mark.parametrize("name", ENROLLED)
def test_outputs_stay_the_same_and_outliers_go(name: str) -> None:
    config: Any = ENROLLED[name].config
    torch.manual_seed(0)
    model = create(config).eval()
    arguments = batches(config, 0, 4)[:-1]
    readers = norm_readers(model)
    assert (not readers) == (name in LAST)
    with torch.no_grad():
        for norm, names in readers.items():
            offset = float(isinstance(model.get_submodule(norm), ZeroCentredNorm))
            for parameter in model.get_submodule(norm).parameters():
                parameter[:2] = (parameter[:2] + offset) * 50 - offset
            for reader in names:
                weight: Any = model.get_submodule(reader).weight
                weight[..., :2] /= 50
        expected = model(*arguments)
        linears = dict.fromkeys(
            [*candidates(model, "int8")[0], *(name for names in readers.values() for name in names)]
        )
        gains = smooth(model, record(model, [arguments], linears), 0.5)
        found = model(*arguments)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert gains.keys() == readers.keys()
    assert all(gain > 3 for gain in gains.values()), gains
    again = record(model, [arguments], linears)
    for norm, names in readers.items():
        largest = torch.stack([again[reader].largest for reader in names]).amax(0)
        assert float(largest.max() / largest.median()) < 30, norm


def test_every_reader_of_a_norm_is_known_by_its_role() -> None:
    readers = norm_readers(create(ENROLLED["qwen moe"].config))
    block = "decoder.blocks.0"
    assert readers[f"{block}.norm1"] == [f"{block}.attention.qkv"]
    assert set(readers[f"{block}.norm2"]) == {f"{block}.mlp.up", f"{block}.mlp.router"}
    crossing = norm_readers(create(ENROLLED["t5"].config))
    assert crossing["decoder.blocks.0.cross_norm"] == ["decoder.blocks.0.cross.q"], "keys read the memory"
    with pytest.raises(ConfigError, match="does not say whether its norms come first"):
        norm_readers(nn.Linear(2, 2))
