"""The optimizer that a CPU's `fused` form is: torch's AdamW, with averages and half copies in its one pass."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from penstock.build import build
from penstock.config.model import PRESETS
from penstock.config.plan import Plan
from penstock.config.run import Recipe
from penstock.errors import ConfigError
from penstock.kernels import adamw
from penstock.optim import EMA, clipped_step, make_optimizer
from penstock.optim.one_pass import OnePassAdamW, takes_one_pass
from penstock.precision import MasterWeights

pytestmark = pytest.mark.skipif(not adamw.has_adamw(), reason="there is no C++ compiler")


def net() -> nn.Module:
    torch.manual_seed(0)
    # A weight in another order of memory, and a norm.
    parts = nn.Conv2d(3, 8, 2), nn.Flatten(), nn.Linear(72, 8), nn.LayerNorm(8), nn.Linear(8, 72)
    return nn.Sequential(*parts).to(memory_format=torch.channels_last)


def give_gradients(models: list[nn.Module], step: int) -> None:
    """The same gradients for each model: contiguous for the first, as some backward kernels leave them; for others in
    the weights' order of memory, which torch's kernel takes for granted."""
    for each in models:
        generator = torch.Generator().manual_seed(step)
        for parameter in each.parameters():
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            gradient = gradient if each is models[0] else torch.empty_like(parameter).copy_(gradient)
            parameter.grad = None if step == 3 and parameter.dim() == 1 else gradient


def test_only_what_the_kernel_takes_is_given_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for taken, parameters in (
        (True, [Parameter(torch.ones(3))]),
        (True, [{"params": [Parameter(torch.ones(2, 3).t())]}]),
        (False, [Parameter(torch.ones(3)), Parameter(torch.ones(3, dtype=torch.float64))]),
        (False, [Parameter(torch.ones(3, dtype=torch.bfloat16))]),
        (False, [Parameter(torch.ones(6)[::2])]),
        (False, [Parameter(torch.ones(3, device="meta"))]),
    ):
        assert takes_one_pass(parameters) == taken
    weight = Parameter(torch.ones(3))
    stored = torch.optim.AdamW([weight], amsgrad=True).state_dict()
    optimizer = make_optimizer([weight], "fused", lr=0.1)
    with pytest.raises(ConfigError, match="AdamW in one pass has no amsgrad"):
        optimizer.load_state_dict(stored)
    monkeypatch.setattr(adamw, "has_adamw", lambda: False)
    assert type(make_optimizer([Parameter(torch.ones(3))], "fused", lr=0.1)) is torch.optim.AdamW


def test_without_averages_and_copies_steps_are_torchs_to_the_bit() -> None:
    mine, theirs = net(), net()
    ours = make_optimizer(mine.parameters(), "fused", lr=0.01)
    reference = torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=0.0, fused=True)
    for step in range(3):
        for model, optimizer in ((mine, ours), (theirs, reference)):
            give_gradients([nn.Module(), model], step)  # in the weights' order of memory
            clipped_step(optimizer, max_norm=0.5)
    assert all(map(torch.equal, mine.parameters(), theirs.parameters()))


def test_steps_averages_and_states_are_torchs() -> None:
    """32 steps with clipping, of which one is refused, groups, a schedule, missing gradients, and a change midway."""
    mine, theirs = net(), net()

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        return [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() == 1], "lr_scale": 0.5},
        ]

    ours: torch.optim.Optimizer = make_optimizer(groups(mine), "fused", lr=0.01)
    assert isinstance(ours, OnePassAdamW)
    reference = torch.optim.AdamW(groups(theirs), lr=0.01, weight_decay=0.0, fused=True)
    reference.param_groups[1]["lr"] = 0.005
    schedules = [torch.optim.lr_scheduler.StepLR(each, 10, 0.5) for each in (ours, reference)]
    folded, plain = EMA(mine, 0.9, ours, every_step=True), EMA(theirs, 0.9)
    for step in range(32):
        give_gradients([mine, theirs], step)
        refused = torch.tensor(float(step == 5))
        before = {name: average.clone() for name, average in folded.state_dict().items()}
        for optimizer in (ours, reference):
            clipped_step(optimizer, max_norm=0.5, refuse=lambda _, refused=refused: refused)
        moved = [not torch.equal(before[name], average) for name, average in folded.state_dict().items()]
        missing = sum(parameter.grad is None for parameter in mine.parameters())
        assert sum(moved) == (0 if step == 5 else len(moved) - missing), "in the update, where there is one"
        folded.update()
        plain.update()
        for schedule in schedules:
            schedule.step()
        if step == 16:  # states go over to torch and back
            stored = copy.deepcopy(ours.state_dict())
            other = torch.optim.AdamW(groups(net()), lr=0.01, fused=True)
            other.load_state_dict(stored)
            ours.load_state_dict(other.state_dict())
    pairs = [*zip(mine.parameters(), theirs.parameters())]
    pairs += zip(folded.state_dict().values(), plain.state_dict().values())
    for a, b in pairs:
        torch.testing.assert_close(a, b)
    for a, b in zip(mine.parameters(), theirs.parameters()):
        assert ours.state[a].keys() == reference.state[b].keys()
        for key, value in reference.state[b].items():
            torch.testing.assert_close(ours.state[a][key], value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_copies_are_those_of_the_masters(dtype: torch.dtype) -> None:
    """After each step; also of weights that were written from outside, and where a step is refused."""
    model = net()
    optimizer = make_optimizer(model.parameters(), "fused", lr=0.01)
    masters = MasterWeights([model], [optimizer], dtype)
    for step in range(5):
        give_gradients([model], step)
        masters.collect()
        clipped_step(optimizer, max_norm=1.0, refuse=lambda _, step=step: torch.tensor(float(step == 2)))
        assert isinstance(optimizer, OnePassAdamW)
        assert bool(optimizer.copies and optimizer.copies.written) == (dtype == torch.bfloat16)
        masters.publish()
        for parameter in model.parameters():
            master = masters.master_of(parameter)
            assert torch.equal(parameter, master.to(parameter.dtype))
        if step == 1:
            with torch.no_grad():
                model[2].weight[0] = 2.0
        optimizer.zero_grad()
    assert (masters.master_of(model[2].weight)[0] > 1.9).all(), "what was written was taken over"


def test_autograd_sees_that_weights_were_updated() -> None:
    model = net()
    optimizer = make_optimizer(model.parameters(), "fused", lr=0.01)
    EMA(model, 0.9, optimizer, every_step=True)
    out = model(torch.randn(2, 3, 4, 4)).square().sum()
    give_gradients([model], 0)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@pytest.mark.parametrize("line", ["", "precision=O2"])
def test_a_run_trains_as_with_torchs_kernel(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    losses: list[list[float]] = []
    plan, recipe = Plan.parse(f"optimizer=fused {line}"), Recipe(lr=1e-3, ema_decay=0.9, clip_norm=0.5)
    images, targets = torch.randn(4, 1, 8, 8), torch.arange(4)
    for there in (True, False):
        monkeypatch.setattr(adamw, "has_adamw", lambda there=there: there)
        built = build(PRESETS["vit-digits"], plan, recipe=recipe)
        assert isinstance(built.optimizer, OnePassAdamW) == there
        losses.append([built.step([(images, targets)]).loss.item() for _ in range(4)])
    torch.testing.assert_close(*losses, rtol=1e-2 if line else 1e-5, atol=0.0)
    assert losses[0][-1] < losses[0][0]
