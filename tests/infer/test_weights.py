"""Forms of weights: each against the plain layer, and whole models against themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.generation import tiny
from penstock.config.model import PRESETS
from penstock.config.plan import Plan
from penstock.errors import ConfigError
from penstock.infer.generator import Generator
from penstock.infer.weights import _FORMS, Packed, pack
from penstock.models import create
from penstock.models.convert import save_pretrained

ERROR = {"packed": 1e-6, "int8": 0.02, "int8_weights": 0.02, "int4": 0.12}
"""Of outputs, relative to their deviation; measured 4e-7, 0.012, 0.010 and 0.09."""


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("form", _FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_form_multiplies_as_the_plain_layer_does(form: str, bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 48, bias=bias).to(dtype).requires_grad_(False)
    packed = _FORMS[form](linear)
    for shape in ((1, 1, 64), (3, 64), (2, 20, 64), (2, 0, 64)):
        x = torch.randn(shape).to(dtype)
        expected = linear(x)
        found = packed(x)
        assert found.shape == expected.shape
        assert found.dtype == dtype
        if x.numel():
            error = float((found.float() - expected.float()).std() / expected.float().std())
            assert error < max(ERROR[form], 0.01 if dtype == torch.bfloat16 else 0)


@pytest.mark.parametrize("name", ["gpt", "llama", "marian-tiny", "t5-tiny"])
def test_packed_models_generate_the_same_and_small_ones_nearly(name: str, tmp_path: Path) -> None:
    model = tiny(name, dtype=torch.float32)
    save_pretrained(model, tmp_path)
    rows = [[1, 2, 3], [4, 5, 6, 7]]
    expected = [each.ids for each in Generator(model, start=0, ends=()).generate(rows, max_tokens=8)]
    packed = Generator(tmp_path, start=0, ends=())
    assert any(isinstance(module, Packed) for module in packed.model.modules())
    assert not any(isinstance(module, nn.Linear) for module in packed.model.modules())
    assert [each.ids for each in packed.generate(rows, max_tokens=8)] == expected
    assert [each.ids for each in packed.generate(rows, max_tokens=8, beams=3)]
    for weights in ("int8", "int8_weights", "int4"):
        small = Generator(tmp_path, start=0, ends=(), weights=weights)  # type: ignore[arg-type]
        first = [each.ids[0] for each in small.generate(rows, max_tokens=1)]
        assert len(first) == 2
    half = Generator(tmp_path, Plan(precision="O3"), start=0, ends=())
    assert next(half.model.parameters()).dtype == torch.bfloat16
    assert len(half.generate(rows, max_tokens=8)[0].ids) == 8


def test_a_model_that_is_given_stays_as_it_is() -> None:
    model = tiny("gpt", dtype=torch.float32)
    Generator(model, ends=())
    assert not any(isinstance(module, Packed) for module in model.modules())


def test_layers_that_do_not_fit_four_bits_are_packed() -> None:
    config = replace(PRESETS["gpt-tiny"], width=32, heads=4, mlp_width=64, depth=1, vocabulary=60)
    model = pack(create(config), "int4")
    kinds = {
        name: type(module).__name__ for name, module in model.named_modules() if isinstance(module, Packed)
    }
    assert kinds["decoder.blocks.0.mlp.up"] == "Int4"
    assert kinds["head"] == "OneDnn", "60 words are no multiple of 16"
    with pytest.raises(ConfigError, match="for a CPU"):
        pack(create(config, device="meta"), "int8")
