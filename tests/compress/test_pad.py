"""Padded models give what the unequal ones give, and transformers reads them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.families import ENROLLED, batches, small
from helpers.sweeps import sweep
from penstock.cli import main
from penstock.compress.pad import padded, write_transformers
from penstock.compress.prune import keep_heads, keep_hidden, keep_layers
from penstock.errors import ConfigError
from penstock.models import create
from penstock.models.convert import from_pretrained, save_pretrained
from penstock.models.model import Model

FORMS = {
    **{
        name: ENROLLED[name].config
        for name in (
            "vit", "gpt", "llama", "bert", "bert of classes", "modernbert", "mixtral", "t5", "marian", "bart",
        )
    },
    "grouped": small("llama-tiny", heads=6, kv_heads=3, head_features=4),
    "shared": small("qwen3-moe-tiny", head_features=8, expert_width=16, shared_experts=2),
}  # fmt: skip
ALIKE = ("shared",)
"""Forms that transformers does not have."""


def _unequal(form: str) -> Model:
    """A model whose blocks have lost different parts."""
    generator, config = random.Random(form), FORMS[form]
    torch.manual_seed(4)
    model = create(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    for run in model.graph.runs:
        name, stack = run.name, run.stack
        if not stack.biased:
            kept = [sorted(generator.sample(range(layer.kv_heads), max(1, layer.kv_heads - i % 2))) for i, layer in
                    enumerate(stack.layers)]  # fmt: skip
            model = keep_heads(model, name, kept, kept if run.memories else None)
        columns: list[Any] = []
        for i, layer in enumerate(stack.layers):
            row = torch.arange(layer.perceptron.width - 3 * (i % 2))
            columns.append(row.expand(stack.experts, -1) if layer.mixture else row)
        shared = [torch.arange(stack.shared_experts * one.shape[-1]) for one in columns]
        model = keep_hidden(model, name, columns, shared if stack.shared_experts else None)
    return model


@pytest.mark.parametrize("form", sweep(FORMS, ["bert of classes", "t5", "mixtral", "grouped"]))
def test_zeros_up_to_the_widest_change_no_output(form: str, tmp_path: Path) -> None:
    model = _unequal(form)
    assert any(run.stack.unequal for run in model.graph.runs)
    wide = padded(model)
    for run in wide.graph.runs:
        assert not run.stack.unequal
    *arguments, _ = batches(FORMS[form], 5, 3)
    with torch.no_grad():
        expected = model(*arguments)
        torch.testing.assert_close(wide(*arguments), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(padded(model, whole=True)(*arguments), expected, rtol=1e-5, atol=1e-5)
    if form in ALIKE:
        return
    save_pretrained(model, tmp_path / "own")
    folder, difference = write_transformers(tmp_path / "own", tmp_path / "theirs")
    assert difference <= 1e-5
    read = from_pretrained(folder)
    assert not any(run.stack.unequal for run in read.graph.runs)


def test_transformers_computes_what_the_pruned_model_does(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = keep_layers(_unequal("bert of classes"), "encoder", [1])
    save_pretrained(model, tmp_path / "own")
    (tmp_path / "own" / "words.txt").write_text("a tokenizer's file")
    assert main(["export", str(tmp_path / "own"), str(tmp_path / "theirs"), "--to", "transformers"]) == 0
    assert (tmp_path / "theirs" / "words.txt").exists()
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "theirs").eval()
    tokens = torch.randint(0, 13, (2, 6))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=1e-5, atol=1e-5)


def test_what_transformers_lacks_is_said(tmp_path: Path) -> None:
    config: Any = replace(FORMS["vit"], qk_norm=True)
    save_pretrained(create(config), tmp_path / "own")
    with pytest.raises(ConfigError, match="qk_norm"):
        write_transformers(tmp_path / "own", tmp_path / "theirs")
    assert (
        main(["export", str(tmp_path / "own"), str(tmp_path / "x"), "--to", "transformers", "--type", "int8"])
        == 2
    )
