"""One training step: what it computes, and that it never waits for the device."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers import forked
from helpers.watched import Waits, host_counters
from penstock.build import build
from penstock.config.model import ViTConfig
from penstock.config.plan import Plan
from penstock.config.run import Recipe
from penstock.errors import ConfigError
from penstock.step import TrainStep
from penstock.tasks import Loss, classification_loss

TINY = ViTConfig(
    image_size=8, patch_size=4, channels=1, width=16, depth=2, heads=2, mlp_width=32, classes=4, drop_path=0.1
)
FP16 = ["precision=O1 dtype=fp16 optimizer=fused", "precision=O3 dtype=fp16 optimizer=contiguous"]
PLANS = [
    "baseline",
    "optimizer=foreach matmul=medium",
    "precision=O1 optimizer=fused",
    "precision=O1 optimizer=contiguous token_order=batch_second attention=plain",
    "precision=O3 optimizer=contiguous accumulate=2",
    *FP16,
]


@dataclass
class Batch:
    images: Tensor
    targets: Tensor


def batches(count: int = 1, *, device: str = "cpu", soft: bool = False) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    out = []
    for _ in range(count):
        targets = torch.randint(0, 4, (4,), generator=generator)
        images = torch.randn(4, 1, 8, 8, generator=generator)
        out.append(Batch(images.to(device), (F.one_hot(targets, 4).float() if soft else targets).to(device)))
    return out


def counting(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The summed loss, and a number of targets that only the device knows."""
    loss = F.cross_entropy(model(batch.images).float(), batch.targets, reduction="sum")
    return loss, batch.targets.sum().long()


LOSSES = pytest.mark.parametrize("loss", [classification_loss, counting], ids=["task", "function"])


@LOSSES
@pytest.mark.parametrize("line", PLANS)
def test_never_waits_for_the_device(line: str, loss: Loss) -> None:
    plan = Plan.parse(line)
    built = build(TINY, plan, recipe=Recipe(ema_decay=0.9, clip_norm=0.5), loss=loss)
    data = batches(plan.accumulate, soft=loss is counting)
    built.step(data)  # creates the optimizer's state
    with Waits(partial(host_counters, built.optimizer)) as waits:
        results = [built.step(data) for _ in range(3)]
    assert not waits.counts
    with Waits() as waits:  # the count can fail
        assert results[-1].loss.item() > 0
        assert results[-1].loss.cpu().nonzero().numel() == 0
    assert waits.counts == dict.fromkeys(("_local_scalar_dense", "cpu", "nonzero"), 1)


@pytest.mark.gpu
@LOSSES
@pytest.mark.parametrize("line", PLANS)
def test_never_waits_for_the_gpu(line: str, loss: Loss) -> None:
    plan = Plan.parse(line)
    built = build(TINY, plan, device="cuda", recipe=Recipe(ema_decay=0.9, clip_norm=0.5), loss=loss)
    data = batches(plan.accumulate, device="cuda", soft=loss is counting)
    for _ in range(3):
        built.step(data)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [built.step(data) for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(result.loss.isfinite() for result in results)


@pytest.mark.parametrize("line", PLANS)
def test_learns_under_every_plan(line: str) -> None:
    plan = Plan.parse(line)
    # fp16 throughout needs a larger eps: see build.
    built = build(TINY, plan, recipe=Recipe(lr=3e-3, eps=1e-4 if line == FP16[1] else 1e-8))
    data = batches(plan.accumulate)
    first = built.step(data)
    assert first.loss.ndim == 0
    assert not first.loss.requires_grad
    assert first.grad_norm is not None
    for _ in range(40):
        last = built.step(data)
    assert last.loss < 0.5 * first.loss


def test_accumulation_averages() -> None:
    torch.manual_seed(0)
    whole, parts = nn.Linear(3, 2), nn.Linear(3, 2)
    parts.load_state_dict(whole.state_dict())
    x, y = torch.randn(8, 3), torch.randint(0, 2, (8,))
    results = []
    for model, micro in ((whole, [(x, y)]), (parts, [(x[:4], y[:4]), (x[4:], y[4:])])):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        results.append(TrainStep(model, optimizer, plan=Plan(), device="cpu", clip_norm=0.01)(micro))
    torch.testing.assert_close(results[0].loss, results[1].loss)
    torch.testing.assert_close(results[0].grad_norm, results[1].grad_norm)
    torch.testing.assert_close(whole.weight, parts.weight)


def test_equals_the_loop_a_user_would_write() -> None:
    built = build(TINY, Plan(), recipe=Recipe(lr=1e-3, clip_norm=0.1, weight_decay=0.05))
    twin = copy.deepcopy(built.model)
    groups = [
        {
            "params": [p for n, p in twin.named_parameters() if p.ndim > 1 and n != "encoder.places.weight"],
            "weight_decay": 0.05,
        },
        {
            "params": [p for n, p in twin.named_parameters() if p.ndim == 1 or n == "encoder.places.weight"],
            "weight_decay": 0.0,
        },
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, foreach=False)
    (data,) = batches()
    for step in range(5):
        torch.manual_seed(step)
        result = built.step([data])
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(twin(data.images), data.targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        optimizer.step()
        torch.testing.assert_close(result.loss, loss.detach())
        torch.testing.assert_close(result.grad_norm, norm)
    for mine, theirs in zip(built.model.parameters(), twin.parameters()):
        torch.testing.assert_close(mine, theirs)


def test_an_overflow_is_skipped_and_heals() -> None:
    built = build(TINY, Plan.parse(FP16[0]))
    assert built.scaler is not None
    (data,) = batches()
    built.scaler.scale.fill_(2.0**24)  # far beyond what fp16 gradients can hold
    before = copy.deepcopy(built.model.state_dict())
    result = built.step([data])
    assert result.grad_norm is not None
    assert not result.grad_norm.isfinite()
    assert built.scaler.scale.item() == 2.0**23
    assert all(torch.equal(before[name], value) for name, value in built.model.state_dict().items())
    for _ in range(12):
        result = built.step([data])
    assert result.grad_norm is not None
    assert result.grad_norm.isfinite()
    assert not torch.equal(before["head.weight"], built.model.state_dict()["head.weight"])


def test_switches_are_on_inside_and_off_outside() -> None:
    seen: list[tuple[str, bool]] = []

    def look(*_: object) -> None:
        seen.append((torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")))

    built = build(TINY, Plan(precision="O1", matmul="medium"))
    built.model.encoder.blocks[0].register_forward_hook(look)  # type: ignore[index, union-attr]
    before = torch.get_float32_matmul_precision()
    built.step(batches())
    assert seen == [("medium", True)]
    built.model.encoder.blocks[0].eval()  # type: ignore[index, union-attr]
    with built.inference():
        built.loss(built.model, batches()[0])
        assert not built.model.training
        assert not torch.is_grad_enabled()
    assert seen[1] == ("medium", True)
    assert torch.get_float32_matmul_precision() == before
    assert built.model.training
    assert not built.model.encoder.blocks[0].training  # type: ignore[index, union-attr]


def test_mistakes_are_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ConfigError, match="no micro-batch"):
        TrainStep(model, optimizer, plan=Plan(), device="cpu")([])
    with pytest.raises(ConfigError, match="clip_norm"):
        TrainStep(model, optimizer, plan=Plan(), device="cpu", clip_norm=0.0)


def test_counting_memory_logs_nothing_of_what_was_there_before(tmp_path: Path) -> None:
    """torch's profiler warns of blocks that it did not see allocated, once in a process."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\n"
        "from torch.profiler import ProfilerActivity, profile\n"
        "from penstock.step.memory import _errors_only\n"
        "from contextlib import nullcontext\n"
        "there = torch.randn(1000, 1000)\n"
        "with _errors_only() if sys.argv[1:] else nullcontext():\n"
        "    with profile(activities=[ProfilerActivity.CPU], profile_memory=True):\n"
        "        del there\n"
    )
    warning = "Memory block of unknown size"
    assert warning in forked.run_python([str(script)], tmp_path)[2], (
        "torch no longer warns: `_errors_only` can go"
    )
    assert warning not in forked.run_python([str(script), "quiet"], tmp_path)[2]
