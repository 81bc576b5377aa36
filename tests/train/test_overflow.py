"""A training run whose fp16 gradients overflow at every loss scale ends, and says where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock.build
from helpers.toy import desk
from penstock.config.model import ViTConfig
from penstock.config.plan import Plan
from penstock.config.run import Augment, Recipe, RunConfig
from penstock.errors import ExitCode, NumericError
from penstock.precision import LossScaler
from penstock.train import loop, train
from penstock.train.advice import naming_overflow, require_scale

MODEL = ViTConfig(
    image_size=8, patch_size=4, channels=1, width=16, depth=2, heads=2, mlp_width=32, classes=10
)
PLAN = Plan.parse("precision=O1 dtype=fp16 optimizer=fused micro_batch=4")


def steep(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Multiplies a gradient by 1e9 in fp16."""
    return output + (output.float() * 1e-9).half().float() * 1e9


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 1, 8, 8), torch.randint(0, 10, (4,))


def built(plan: Plan = PLAN) -> Any:
    return penstock.build.build(MODEL, plan, recipe=Recipe(lr=1e-3))


def test_a_step_that_is_lost_names_its_layer() -> None:
    made = built()
    made.model.encoder.blocks[1].register_forward_hook(steep)
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    batches = [batch(), batch()]
    for number in range(1, 51):
        made.step(batches)
        try:
            require_scale(made.scaler, number)
        except NumericError:
            break
    assert 16 < number <= 24
    with (
        pytest.raises(
            NumericError, match=r"At step \d+ .* begins in the backward pass of encoder\.blocks\.1\."
        ),
        naming_overflow(made.step, batches),
    ):
        require_scale(made.scaler, number)
    after = made.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_a_healthy_batch_and_a_run_without_scale_name_nothing() -> None:
    made = built()
    with pytest.raises(NumericError, match="nothing overflows"), naming_overflow(made.step, [batch()]):
        raise NumericError("It was so.")
    require_scale(made.scaler, 1)
    require_scale(None, 1)
    plain = built(Plan(micro_batch=4))
    with pytest.raises(NumericError, match=r"^It was so\.$"), naming_overflow(plain.step, [batch()]):
        raise NumericError("It was so.")


def test_only_overflows_in_a_row_at_the_floor_end_a_run() -> None:
    scaler = LossScaler(initial=2.0)
    overflow, clean = torch.tensor(1.0), torch.tensor(0.0)
    for found in (overflow, overflow, overflow, overflow, clean, overflow):
        scaler.update(found)
        require_scale(scaler, 1)
    for _ in range(3):
        scaler.update(overflow)
    with pytest.raises(NumericError, match="fallen to 1 "):
        require_scale(scaler, 1)


def test_a_run_ends_with_its_code_and_keeps_what_it_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planted(*arguments: Any, **given: Any) -> Any:
        made = penstock.build.build(*arguments, **given)
        made.model.encoder.blocks[0].register_forward_hook(steep)
        return made

    monkeypatch.setattr(loop, "build", planted)
    config = RunConfig(
        model=MODEL, recipe=Recipe(steps=60, lr=1e-3, augment=Augment(flip=0.0)), plan=PLAN,
        machine=desk(tmp_path), output=str(tmp_path / "run"), device="cpu", checkpoint_every=4,
    )  # fmt: skip
    with pytest.raises(NumericError) as caught:
        train(config)
    assert caught.value.exit_code == ExitCode.NUMERIC
    assert "At step 20 " in str(caught.value)  # logs are read every ten steps
    assert "begins in the backward pass of encoder.blocks.0." in str(caught.value)
    assert (tmp_path / "run" / "checkpoints").exists()
