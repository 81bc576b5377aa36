"""Models of folders, as `penstock plan` and `deploy` take them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli._app import load_or_described
from penstock.cli.plan_config import PlanConfig


def test_a_folder_is_taken_with_hf_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 100, "n_positions": 32}
    (tmp_path / "mine" / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    plain, marked = (
        load_or_described(PlanConfig, file=None, overrides={"model": name}) for name in ("mine", "hf:mine")
    )
    assert plain == marked
    assert marked.called == "mine"
