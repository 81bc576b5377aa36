"""Smaller tokenizers cut the data as before, and smaller models say of them what they said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.trained_tokenizers import LINES, trained_tokenizer
from penstock.compress import measure, run
from penstock.compress.vocabulary import smaller_tokenizer
from penstock.config.compress import load_compression
from penstock.config.model import PRESETS
from penstock.data.text.tokenizers import LibraryTokenizer
from penstock.errors import ConfigError
from penstock.models import create
from penstock.models.convert import from_pretrained, save_pretrained

tokenizers = pytest.importorskip("tokenizers")


@pytest.mark.parametrize("kind", ["WordPiece", "BPE", "Unigram", "WordLevel"])
def test_texts_of_the_data_are_cut_as_before(kind: str) -> None:
    text = trained_tokenizer(kind)
    whole = LibraryTokenizer(text, "whole")
    used = {int(number) for row in whole.encode(LINES) for number in row}
    smaller, kept = smaller_tokenizer(text, used)
    small = LibraryTokenizer(smaller, "small")
    assert small.size == len(kept) < whole.size
    assert small.pieces(LINES) == whole.pieces(LINES)
    for ours, theirs in zip(small.encode(LINES), whole.encode(LINES), strict=True):
        assert [kept[number] for number in ours] == theirs.tolist()
    assert [kept[number] for number in small.frame(2).between] == list(whole.frame(2).between)
    assert (small.pad, small.mask) == (kept.index(whole.pad), kept.index(whole.mask or 0))
    if kind != "WordLevel":  # other texts are cut smaller, and none of their letters is lost
        other = "Zebras juxtapose"
        assert len(small.encode([other])[0]) >= len(whole.encode([other])[0])
        assert small.unknown not in small.encode([other])[0]


def test_other_vocabularies_are_refused() -> None:
    with pytest.raises(ConfigError, match="not of Mine"):
        smaller_tokenizer(json.dumps({"model": {"type": "Mine", "vocab": {}}}), set())


@pytest.mark.usefixtures("known_machine")
def test_the_last_step_leaves_a_model_that_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "ROUNDS", 1)
    monkeypatch.setattr(measure, "ROUND_SECONDS", 0.001)
    text = trained_tokenizer("BPE")
    whole = LibraryTokenizer(text, "whole")
    sizes: dict[str, Any] = {"width": 16, "depth": 2, "heads": 2, "mlp_width": 32, "sequence": 32}
    torch.manual_seed(0)
    model = create(replace(PRESETS["gpt-tiny"], vocabulary=whole.size, **sizes))
    whole.save(tmp_path / "tokenizer", whole.size)
    (tmp_path / "tokenizer" / "config.json").write_text(json.dumps({"pad_token_id": whole.pad}))
    save_pretrained(model, tmp_path / "model", beside=tmp_path / "tokenizer")
    (tmp_path / "lines.txt").write_text("\n".join(LINES))
    settings = {
        "model": str(tmp_path / "model"), "trim": "true", "prune.hidden": "0.5", "prune.samples": "8", "rounds": "2",
        "data": f"text:{tmp_path / 'lines.txt'}", "output": str(tmp_path / "out"), "device": "cpu",
        "plan": "micro_batch=8",
    }  # fmt: skip
    config = load_compression(overrides=settings)
    report = run.compress(config)
    assert [row["title"] for row in report["rows"]] == ["original", "prune", "prune", "trim"]
    before, after = (from_pretrained(row["folder"]).eval() for row in report["rows"][2:])
    small = LibraryTokenizer((tmp_path / "out" / "export" / "tokenizer.json").read_text(), "small")
    assert after.config.vocabulary == small.size == report["rows"][3]["notes"]["words"] < whole.size
    wide, narrow = (torch.from_numpy(one.encode(LINES[:1])[0]).long()[None] for one in (whole, small))
    words = small.words()
    numbers = torch.tensor([whole.words().index(word) for word in words])
    with torch.no_grad():
        torch.testing.assert_close(after(narrow), before(wide)[..., numbers])
    stored = json.loads((tmp_path / "out" / "export" / "config.json").read_text())
    assert stored["pad_token_id"] == small.pad
    # What comes behind reads the data by the tokenizer that is left, whatever the settings name.
    more = {"quantise": "int8", "quantise.inputs": "static", "quantise.drop": "1e6", "rounds": "1"}
    more |= {"data.source": settings.pop("data"), "data.tokenizer": str(tmp_path / "tokenizer")}
    asked = load_compression(overrides=settings | more | {"output": str(tmp_path / "few bits")})
    titles = [row["title"] for row in run.compress(asked)["rows"]]
    assert titles == ["original", "prune", "trim", "quantise"]
    with pytest.raises(ConfigError, match="put it last"):
        replace(config, steps=("trim", "prune"))
