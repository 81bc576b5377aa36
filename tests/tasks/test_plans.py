"""The loss in chunks under every Plan: the same training as with the whole loss, on one rank and on two."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.equality import Trained, alone, trained
from helpers.spawn import spawn
from helpers.sweeps import in_turn
from penstock.config.model import DecoderConfig, EncoderConfig, ModelConfig, Seq2SeqConfig
from penstock.config.plan import Plan
from penstock.config.run import Recipe
from penstock.config.stack import Stack
from penstock.kernels import choices

SIZES: dict[str, Any] = {"width": 16, "depth": 2, "heads": 2, "mlp_width": 32, "qkv_bias": False}
WORDS = 64
MODELS: dict[str, ModelConfig] = {
    "tied": DecoderConfig(vocabulary=WORDS, sequence=12, **SIZES),
    "untied": DecoderConfig(vocabulary=WORDS, sequence=12, tied=False, **SIZES),
    "encoder": EncoderConfig(vocabulary=WORDS, sequence=12, **SIZES),
    "seq2seq": Seq2SeqConfig(
        vocabulary=WORDS, sequence=12, decoder_sequence=12, encoder=Stack(**SIZES), decoder=Stack(**SIZES),
        scale_outputs=True,
    ),
}  # fmt: skip


def _batch(step: int, samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens, targets = (torch.randint(0, WORDS, (samples, 12), generator=generator) for _ in range(2))
    return tokens, targets


def _loss(model: nn.Module, batch: Any) -> Tensor:
    tokens, targets = batch
    inputs = (tokens, tokens) if isinstance(getattr(model, "config", None), Seq2SeqConfig) else (tokens,)
    total: Tensor = model(*inputs, targets=targets)
    return total / targets.numel()


def train(name: str, line: str, steps: int = 3) -> Trained:
    choices.LOSS_BUDGET = {"cpu": 10 * WORDS * 10}  # ten rows
    # What rounding decides is not divided by its own size; fp16 rounds roots of second moments to steps of 2.4e-4.
    recipe = Recipe(lr=1e-3, eps=1e-2 if "O3 dtype=fp16" in line else 1e-4)
    return trained(MODELS[name], Plan.parse(line), steps=steps, batches=_batch, loss=_loss, recipe=recipe)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Between the weights of two models, as vectors."""
    return math.hypot(*(float((one[key].double() - value.double()).norm()) for key, value in other.items()))


@pytest.fixture(autouse=True)
def _budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "LOSS_BUDGET", choices.LOSS_BUDGET)  # to be put back


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("line", "tolerance"),
    [
        ("micro_batch=4", 1e-5),
        ("micro_batch=2 accumulate=2 recompute=full token_order=batch_second", 1e-5),
        ("micro_batch=4 precision=O1", 3e-2),
        ("micro_batch=4 precision=O2 optimizer=fused", 3e-2),
        ("micro_batch=4 precision=O3", 4e-2),
        ("micro_batch=4 precision=O1 dtype=fp16 optimizer=fused", 4e-3),
        ("micro_batch=2 accumulate=2 precision=O2 dtype=fp16 optimizer=contiguous", 5e-3),
        ("micro_batch=4 precision=O3 dtype=fp16 optimizer=fused", 1e-2),
    ],
)
def test_chunks_train_as_the_whole_loss_does(name: str, line: str, tolerance: float) -> None:
    """Measured: the way of the weights in three steps differs by 1e-6, 0.012, 0.01, 0.019, 0.0014, 0.0022, 0.004."""
    found, expected, start = (
        train(name, f"{line} loss=chunked"),
        train(name, line),
        train(name, line, steps=0),
    )
    torch.testing.assert_close(found.losses, expected.losses, rtol=tolerance, atol=0.0)
    torch.testing.assert_close(found.norms, expected.norms, rtol=2 * tolerance, atol=0.0)
    way = distance(expected.weights, start.weights)
    assert distance(found.weights, expected.weights) < tolerance * way


@pytest.mark.parametrize(("sharding", "precision"), in_turn(["ddp", "zero2", "fsdp"], ["O0", "O2"]))
def test_ranks_train_as_one_process_does(sharding: str, precision: str) -> None:
    plan = Plan.parse(f"micro_batch=2 dp=2 precision={precision} sharding={sharding} loss=chunked")
    found = spawn(train, 2, "tied", plan.line())
    expected = train("tied", replace(alone(plan), loss="whole").line())
    tolerance = 1e-4 if precision == "O0" else 2e-2
    for rank in found:
        torch.testing.assert_close(rank.losses, expected.losses, rtol=tolerance, atol=0.0)
        for key, value in expected.weights.items():
            torch.testing.assert_close(rank.weights[key], value, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inductor imports torch.jit
@pytest.mark.parametrize(("region", "precision"), in_turn(["blocks", "whole"], ["O0", "O1"]))
def test_compiled_models_train_as_eager_ones_do(region: str, precision: str) -> None:
    line = f"micro_batch=4 precision={precision}"
    found, expected = train("tied", f"{line} compile={region} loss=chunked"), train("tied", line)
    tolerance = 1e-4 if precision == "O0" else 2e-2
    torch.testing.assert_close(found.losses, expected.losses, rtol=tolerance, atol=0.0)
