"""Dynamic loss scaling."""

from __future__ import annotations

import pytest
import torch

from penstock.errors import CheckpointError, ConfigError
from penstock.precision import LossScaler

CLEAN, OVERFLOW = torch.tensor(0.0), torch.tensor(1.0)


def test_halves_on_overflow_and_doubles_after_clean_steps() -> None:
    scaler = LossScaler(initial=8.0, interval=2)
    seen = []
    for found in (CLEAN, CLEAN, CLEAN, OVERFLOW, CLEAN, CLEAN):
        scaler.update(found)
        seen.append(scaler.scale.item())
    assert seen == [8.0, 16.0, 16.0, 8.0, 8.0, 16.0]  # an overflow starts the count again
    assert scaler.overflows.item() == 1


def test_stays_between_floor_and_ceiling() -> None:
    scaler = LossScaler(initial=4.0, interval=1, floor=2.0, ceiling=8.0)
    for _ in range(4):
        scaler.update(OVERFLOW)
    assert scaler.scale.item() == 2.0
    for _ in range(5):
        scaler.update(CLEAN)
    assert scaler.scale.item() == 8.0


def test_a_half_loss_is_scaled_in_fp32() -> None:
    loss = torch.tensor(2.5, dtype=torch.float16)
    assert LossScaler(initial=2.0**16).scaled(loss).item() == 2.5 * 2**16


def test_state_round_trips() -> None:
    scaler, other = LossScaler(interval=10), LossScaler(interval=10)
    for found in (OVERFLOW, CLEAN, CLEAN):
        scaler.update(found)
    other.load_state_dict(scaler.state_dict())
    assert {k: v.item() for k, v in other.state_dict().items()} == {
        "scale": 2.0**15,
        "clean": 2,
        "overflows": 1.0,
        "spared": 0.0,
        "lost": 0.0,
    }
    scaler.update(OVERFLOW)
    assert other.scale.item() == 2.0**15
    with pytest.raises(CheckpointError, match="lacks clean, lost, overflows, spared"):
        other.load_state_dict({"scale": torch.tensor(1.0)})


def test_contradictions_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        LossScaler(initial=1.0, floor=2.0, growth=0.5, interval=0)
    assert len(caught.value.problems) == 3
