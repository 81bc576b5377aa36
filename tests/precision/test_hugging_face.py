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


def gpt() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=32,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return transformers.GPT2LMHeadModel(config)


def step(model: Any, optimizer: Any) -> float:
    tokens = torch.randint(2, 32, (2, 8), generator=torch.Generator().manual_seed(0))
    loss = model(input_ids=tokens, labels=tokens).loss
    with penstock.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


@pytest.mark.parametrize(("level", "dtype"), [("O1", "bf16"), ("O2", "bf16"), ("O2", "fp16")])
def test_a_language_model_generates_and_saves_what_its_config_says(
    level: str, dtype: str, tmp_path: Path
) -> None:
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    model, optimizer = penstock.accelerate(model, optimizer, precision=level, dtype=dtype)
    assert step(model, optimizer) > step(model, optimizer)
    tokens = model.generate(torch.tensor([[2, 3]]), max_new_tokens=4, do_sample=False)
    assert tokens.shape[1] <= 6
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    saved = safetensors.load_file(tmp_path / "model.safetensors")
    assert config.get("dtype", config.get("torch_dtype")) == "float32"
    assert {value.dtype for value in saved.values()} == {torch.float32}
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())
    assert model.transformer.wte.weight.dtype == (
        torch.float32 if level == "O1" else getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[dtype])
    )
    assert step(model, optimizer) > 0


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
    loaded = type(foreign.create(name)).from_pretrained(tmp_path)
    with torch.no_grad():
        assert float(foreign.loss(loaded.eval(), batch)) == pytest.approx(
            float(foreign.loss(model.eval(), batch)), rel=3e-2
        )


class Adapted(torch.nn.Module):
    """As PEFT's models: calls the model inside, whose forward pass is not the accelerated one."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model = gpt()

    def forward(self, **inputs: Any) -> Any:
        return self.base_model(**inputs)

    def generate(self, *inputs: Any, **options: Any) -> Any:
        return self.base_model.generate(*inputs, **options)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_wrapper_generates(level: str) -> None:
    model: Any = Adapted()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    model, optimizer = penstock.accelerate(model, optimizer, precision=level, dtype="bf16")
    step(model, optimizer)
    tokens = model.generate(torch.tensor([[2, 3]]), max_new_tokens=4, do_sample=False)
    assert tokens.shape[1] <= 6
