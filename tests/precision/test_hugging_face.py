"""Accelerated models of transformers: what they are entered by, and what they save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from helpers import foreign
from helpers.sweeps import in_turn

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")


@pytest.mark.parametrize(
    ("name", "line"), in_turn(foreign.FOREIGN, ["O0", "O1 bf16", "O2 bf16", "O2 fp16", "O3 bf16"])
)
def test_every_model_learns_at_every_level_and_is_saved(name: str, line: str, tmp_path: Path) -> None:
    level, *dtype = line.split()
    model = foreign.create(name)
    batch = foreign.batches(name, 0, 4)
    exact = float(foreign.loss(model, batch).detach())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    options: dict[str, Any] = dict(zip(["dtype"], dtype))
    model, optimizer = penstock.accelerate(model, optimizer, precision=level, **options)
    losses = []
    for _ in range(6):
        loss = foreign.loss(model, batch)
        with penstock.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(exact, rel=3e-2)
    assert losses[-1] < losses[0] - 0.05
    halves = {value.dtype for value in model.parameters()} - {torch.float32}
    assert bool(halves) == (level in ("O2", "O3"))
    model.save_pretrained(tmp_path)
    saved = safetensors.load_file(tmp_path / "model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.float32}
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config.get("dtype", config.get("torch_dtype")) == "float32"
    loaded = type(foreign.create(name)).from_pretrained(tmp_path)
    for key, value in model.state_dict().items():  # sines and cosines are computed again
        assert "embed_positions" in key or torch.equal(loaded.state_dict()[key], value), key
    with torch.no_grad():
        assert float(foreign.loss(loaded.eval(), batch)) == pytest.approx(
            float(foreign.loss(model.eval(), batch)), rel=3e-2
        )


class Adapted(torch.nn.Module):
    """As PEFT's models: calls the model inside, whose forward pass is not the accelerated one."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model = foreign.create("gpt2")

    def forward(self, **inputs: Any) -> Any:
        return self.base_model(**inputs)

    def generate(self, *inputs: Any, **options: Any) -> Any:
        return self.base_model.generate(*inputs, **options)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_wrapper_generates(level: str) -> None:
    model: Any = Adapted()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    model, optimizer = penstock.accelerate(model, optimizer, precision=level, dtype="bf16")
    tokens, due = foreign.batches("gpt2", 0, 2)
    with penstock.scale_loss(model(input_ids=tokens, labels=due).loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    tokens = model.generate(torch.tensor([[2, 3]]), max_new_tokens=4, do_sample=False)
    assert tokens.shape[1] <= 6
