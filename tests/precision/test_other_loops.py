"""Loops that zero, skip, hook, write and share in ways of their own train as they do in fp32."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import penstock
from penstock.errors import ConfigError
from penstock.precision import scalers_of
from penstock.script.interception import Interception

LEVELS = [
    ("O1", {"dtype": "bf16"}),
    ("O1", {"dtype": "fp16", "loss_scale": 1024.0}),
    ("O2", {"dtype": "bf16"}),
    ("O2", {"dtype": "fp16", "loss_scale": 1024.0}),
]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
    return x, x[:, :4] * 0.5


def loss_of(model: nn.Module) -> Tensor:
    x, y = data()
    loss: Tensor = (model(x) - y).square().mean()
    return loss


def train(
    level: str,
    options: dict[str, Any],
    *,
    zero: Callable[[nn.Module, Optimizer], None] = lambda model, optimizer: optimizer.zero_grad(),
    before: Callable[[nn.Module], None] = lambda model: None,
    after: Callable[[nn.Module], None] = lambda model: None,
    steps: int = 12,
) -> tuple[float, nn.Module]:
    model = net()
    before(model)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.5)
    model, optimizer = penstock.accelerate(model, optimizer, precision=level, **options)
    loss = torch.zeros(())
    for _ in range(steps):
        zero(model, optimizer)
        loss = loss_of(model)
        with penstock.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        after(model)
    return float(loss.detach()), model


def _none(model: nn.Module, _: Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = None


ZEROING: dict[str, Callable[[nn.Module, Optimizer], None]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "model to zero": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "container": lambda model, optimizer: nn.ModuleList([model]).zero_grad(),
    "by hand": _none,
}


@pytest.mark.parametrize("how", ZEROING)
@pytest.mark.parametrize(("level", "options"), LEVELS[1:3])
def test_gradients_are_zeroed_however_a_loop_does_it(level: str, options: dict[str, Any], how: str) -> None:
    exact, _ = train("O0", {}, zero=ZEROING[how])
    loss, _ = train(level, options, zero=ZEROING[how])
    assert loss == pytest.approx(exact, rel=0.01)


def test_a_weight_without_a_gradient_keeps_no_old_one() -> None:
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    optimizer = SGD(model.parameters(), lr=0.1)
    model, optimizer = penstock.accelerate(model, optimizer, precision="O2", dtype="bf16")
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    for turn in range(4):
        model.zero_grad()
        before = model.state_dict()[f"{1 - turn % 2}.weight"].clone()
        loss = model[turn % 2](x).square().mean()
        with penstock.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        assert torch.equal(model.state_dict()[f"{1 - turn % 2}.weight"], before)


@pytest.mark.parametrize(("level", "options"), LEVELS)
def test_hooks_that_were_there_before_go_on(level: str, options: dict[str, Any]) -> None:
    seen: list[torch.dtype] = []
    handles: list[Any] = []

    def hooked(model: nn.Module) -> None:
        last = model[2].weight  # type: ignore[index]
        handles.append(last.register_hook(lambda gradient: gradient * 0))
        last.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.dtype))

    exact, _ = train("O0", {}, before=hooked)
    plain, _ = train("O0", {})
    seen.clear()
    loss, model = train(level, options, before=hooked)
    assert loss == pytest.approx(exact, rel=0.01)
    assert abs(exact - plain) > 0.1 * plain
    assert len(seen) == 12
    handles[-1].remove()
    model.zero_grad()
    loss_of(model).backward()
    assert model[2].weight.grad.abs().max() > 0  # type: ignore[index]


WRITES: dict[str, Callable[[nn.Module], None]] = {
    "data clamped": lambda model: [p.data.clamp_(-0.05, 0.05) for p in model.parameters()] and None,
    "data replaced": lambda model: [setattr(p, "data", p.data * 0.9) for p in model.parameters()] and None,
    "in place": torch.no_grad()(lambda model: [p.mul_(0.9) for p in model.parameters()] and None),
    "as a vector": lambda model: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(model.parameters()) * 0.9, model.parameters()
    ),
}


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize(("level", "options"), LEVELS[1:3])
def test_weights_that_are_written_between_steps_stay_written(
    level: str, options: dict[str, Any], how: str
) -> None:
    exact, wide = train("O0", {}, after=WRITES[how])
    loss, model = train(level, options, after=WRITES[how])
    assert loss == pytest.approx(exact, rel=0.03)
    for name, value in model.state_dict().items():
        assert torch.allclose(value, wide.state_dict()[name], atol=0.01)


def test_what_is_written_leaves_the_other_bits_alone() -> None:
    _, model = train("O2", {"dtype": "bf16"})
    before = model.state_dict()["0.weight"].clone()
    with torch.no_grad():
        model[0].weight[0].zero_()  # type: ignore[index]
    after = model.state_dict()["0.weight"]
    assert torch.equal(after[1:], before[1:])
    assert after[0].abs().max() == 0
    assert not torch.equal(before[1:], before[1:].bfloat16().float())


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_models_that_share_a_module_train_it(level: str) -> None:
    def moved(level: str) -> float:
        torch.manual_seed(0)
        shared = nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8))
        models = [nn.Sequential(shared, nn.Linear(8, 4)) for _ in range(2)]
        optimizer = SGD({id(p): p for m in models for p in m.parameters()}.values(), lr=0.1)
        start = shared[0].weight.detach().clone()
        options = {} if level == "O0" else {"dtype": "bf16"}
        models, optimizer = penstock.accelerate(models, optimizer, precision=level, **options)
        for _ in range(5):
            optimizer.zero_grad()
            loss = loss_of(models[0]) + loss_of(models[1])
            with penstock.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        assert models[0][0][0].weight is models[1][0][0].weight
        return float((models[1].state_dict()["0.0.weight"] - start).abs().max())

    assert moved(level) == pytest.approx(moved("O0"), rel=0.1)


def test_weights_that_join_later_get_masters() -> None:
    def moved(level: str, **options: Any) -> tuple[float, Tensor]:
        model = net()
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
        optimizer = SGD(model[2].parameters(), lr=1e-4)
        start = model[0].weight.detach().clone()
        model, optimizer = penstock.accelerate(model, optimizer, precision=level, **options)
        for parameter in model[0].parameters():
            parameter.requires_grad_(True)
        optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 1e-4})
        first = model.state_dict()["0.weight"].clone()
        for _ in range(20):
            optimizer.zero_grad()
            with penstock.scale_loss(loss_of(model), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        last = model.state_dict()["0.weight"]
        again = copy.deepcopy(model.state_dict())
        model.load_state_dict(again)
        assert torch.equal(model.state_dict()["0.weight"], last)
        assert (first - start).abs().max() < 2e-3
        return float((last - first).abs().max()), last

    exact, _ = moved("O0")
    half, weight = moved("O2", dtype="bf16")
    assert half == pytest.approx(exact, rel=0.05)
    assert not torch.equal(weight, weight.bfloat16().float())  # smaller than bf16 can tell


def test_two_optimizers_of_the_same_weights_are_refused_where_one_has_the_masters() -> None:
    model = net()
    optimizers = [SGD(model.parameters(), lr=0.1), AdamW(model.parameters())]
    with pytest.raises(ConfigError, match=r"0.weight is trained by a SGD and by a AdamW"):
        penstock.accelerate(model, optimizers, precision="O2", dtype="bf16")
    penstock.accelerate(model, optimizers, precision="O1", dtype="bf16")


def test_a_loss_is_scaled_once() -> None:
    made = net()
    model, optimizer = penstock.accelerate(
        made, (o := SGD(made.parameters(), lr=0.1)), precision="O1", dtype="fp16"
    )
    assert optimizer is o
    with penstock.scale_loss(loss_of(model), optimizer) as scaled:
        with pytest.raises(ConfigError, match="scaled already"), penstock.scale_loss(scaled, optimizer):
            pass
        # Two losses at once are two losses.
        with penstock.scale_loss(loss_of(model), optimizer) as other:
            (scaled + other).backward()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("script", [False, True])
def test_a_loop_that_skips_what_is_not_finite_gets_on(level: str, script: bool) -> None:
    skipped = 0
    with contextlib.ExitStack() as stack:
        if script:
            stack.enter_context(Interception(precision=level, dtype="fp16", say=lambda *_: None))
        model = net()
        optimizer: Optimizer = AdamW(model.parameters(), lr=0.01)
        if not script:
            model, optimizer = penstock.accelerate(model, optimizer, precision=level, dtype="fp16")
        for _ in range(30):
            optimizer.zero_grad()
            loss = 100 * loss_of(model)
            if script:
                loss.backward()
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            else:
                with penstock.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
                norm = penstock.clip_grad_norm_(optimizer, 1.0)
            if not math.isfinite(norm):
                skipped += 1
                continue
            optimizer.step()
    assert 0 < skipped < 15
    assert float(loss.detach()) < 10.0


def test_gradients_thrown_away_count_as_overflows_and_not_as_clean_steps() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    model, optimizer = penstock.accelerate(
        model, optimizer, precision="O1", dtype="fp16", scaler={"initial": 256.0, "interval": 3}
    )
    for factor, scale, clean in ((1.0, 256.0, 0), (1.0, 256.0, 0), (1e9, 128.0, 0), (1.0, 128.0, 0)):
        with penstock.scale_loss(factor * loss_of(model), optimizer) as scaled:
            scaled.backward()
        optimizer.zero_grad()
        (scaler,) = scalers_of(optimizer)
        assert (float(scaler.scale), int(scaler.clean)) == (scale, clean)


def test_what_is_loaded_knows_no_overflow_of_before() -> None:
    model = net()
    optimizer = AdamW(model.parameters(), lr=0.01)
    model, optimizer = penstock.accelerate(
        model, optimizer, precision="O1", dtype="fp16", scaler={"initial": 1024.0}
    )

    def step(factor: float) -> None:
        optimizer.zero_grad()
        with penstock.scale_loss(factor * loss_of(model), optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    step(1.0)
    stored = copy.deepcopy(optimizer.state_dict())
    step(math.inf)
    optimizer.load_state_dict(stored)
    (scaler,) = scalers_of(optimizer)
    assert (float(scaler.scale), int(scaler.clean), float(scaler.overflows)) == (1024.0, 1, 0.0)


def test_a_script_may_hold_weights_from_before_and_use_them_in_its_loss() -> None:
    def trained(level: str) -> float:
        with Interception(precision=level, dtype="auto" if level == "O0" else "bf16", say=lambda *_: None):
            model = net()
            held = list(model.parameters())
            optimizer = SGD(held, lr=0.1)
            for _ in range(20):
                optimizer.zero_grad()
                loss = loss_of(model) + 0.1 * sum((p**2).sum() for p in held)
                loss.backward()
                optimizer.step()
        return float(loss.detach())

    assert trained("O2") == pytest.approx(trained("O0"), rel=0.01)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scaler": {"intial": 8.0}}, "no option 'intial'.*initial"),
        ({"scaler": 8.0}, "must be a dict"),
        ({"agree": "yes"}, "must be 'auto', None"),
        ({"losses": "2"}, "whole number"),
        ({"losses": 0}, "whole number"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], words: str) -> None:
    model = net()
    with pytest.raises(ConfigError, match=words):
        penstock.accelerate(
            model, SGD(model.parameters(), lr=0.1), **{"precision": "O1", "dtype": "fp16"} | options
        )
    assert type(model).forward is nn.Sequential.forward
