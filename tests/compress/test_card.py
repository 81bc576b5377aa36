"""The card of a compressed model says what it was made of and what that cost, in the hub's form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.compress.page import card
from penstock.config.compress import CompressConfig

ROWS: list[dict[str, Any]] = [
    {"title": "original", "parameters": 31938, "bytes": 129440, "seconds": 0.0012, "words": "top-1 90.00%"},
    {"title": "prune", "parameters": 20000, "bytes": 80000, "seconds": 0.0008, "words": "top-1 80.00%"},
    {"title": "distil", "parameters": 20000, "bytes": 80000, "seconds": 0.0008, "words": "top-1 89.00%"},
]


@pytest.mark.parametrize("source", ["somebody/vit", "runs/mine", "/data/weights"])
def test_the_card_has_every_step(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/mine").mkdir(parents=True)
    text = card(CompressConfig(model=source), "ViT-S/16", ROWS)
    _, head, body = text.split("---\n", 2)
    base = {"base_model": source} if source == "somebody/vit" else {}
    assert yaml.safe_load(head) == {"library_name": "penstock", "tags": ["penstock", "compressed"]} | base
    assert "\n# ViT-S/16, compressed\n" in body
    assert f"Made of {source} with Penstock" in body
    assert "by these steps: prune, distil." in body
    assert "| prune | 20,000 | 0.08 | 0.8 | top-1 80.00% |" in body
    assert "| original | 31,938 | 0.13 | 1.2 | top-1 90.00% |" in body
    assert 'from_pretrained("path of this folder")' in body
