"""Which models and optimizers find each other, when, and what is left alone or refused."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, Optimizer

import penstock
from helpers.watched import ProductDtypes
from penstock.errors import ConfigError
from penstock.script import Interception

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))


@contextmanager
def _run(precision: str = "O1", **options: Any) -> Iterator[list[str]]:
    told: list[str] = []
    with Interception(precision=precision, say=told.append, **options):
        yield told


def _products(model: Any, x: Tensor = X) -> set[torch.dtype]:
    with ProductDtypes() as seen:
        model(x)
    return set(seen.counts)


BF16, FP32 = {torch.bfloat16}, {torch.float32}


def _torchs_own() -> list[Any]:
    return [
        Optimizer.__init__, Optimizer.add_param_group, nn.Module.__call__, nn.Module.zero_grad,
        torch.autograd.backward, torch.amp.GradScaler.__init__, torch.export.export, torch.jit.trace,
    ]  # fmt: skip


def test_all_is_undone() -> None:
    before = _torchs_own()
    with _run():
        model = _net()
        optimizer = SGD(model.parameters(), lr=0.1)
        assert all(now is not was for now, was in zip(_torchs_own(), before))
        model(X).sum().backward()
        assert nn.Module.__call__ is before[2], "modules are watched only while an optimizer waits"
        optimizer.step()
    assert all(now is was for now, was in zip(_torchs_own(), before))
    with pytest.raises(ZeroDivisionError), _run():
        raise ZeroDivisionError
    assert all(now is was for now, was in zip(_torchs_own(), before))


def test_o0_changes_nothing() -> None:
    before = _torchs_own()
    with _run("O0") as told:
        assert all(now is was for now, was in zip(_torchs_own(), before))
    assert told == []


def test_one_at_a_time() -> None:
    with _run(), pytest.raises(ConfigError, match="already runs under"):
        Interception(say=print).install()


def test_evaluation_comes_first_and_stays_plain() -> None:
    model = _net()
    with _run() as told:
        optimizer = SGD(model.parameters(), lr=0.1)
        with torch.no_grad():
            assert _products(model) == FP32
        assert _products(model) == BF16
        with torch.no_grad():
            assert _products(model) == BF16
        model(X).sum().backward()
        assert told == []
        optimizer.step()
        assert len(told) == 1
        optimizer.step()
        assert len(told) == 1
    assert len(told) == 1
    assert told[0].startswith("penstock: O1 in bf16: ")
    assert told[0].splitlines()[1:] == [
        "penstock:   accelerated Sequential (58 weights), trained by SGD (4 tensors): 2 of 2 matrix products in bf16"
    ]


def test_the_outermost_call_is_what_is_accelerated() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = _net(), _net()

        def train_left(self) -> Tensor:
            return self.left(X)  # type: ignore[no-any-return]

    both = Both()
    with _run() as told:
        optimizer = SGD(both.parameters(), lr=0.1)
        both.train_left().sum().backward()
        optimizer.step()
        assert _products(both.right) == BF16
        assert "_penstock_precision" not in both.__dict__
        assert "_penstock_precision" not in both.left[0].__dict__
    assert (
        "accelerated Sequential (58 weights), Sequential (58 weights), trained by SGD (8 tensors): "
        in told[0]
    )


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_half_weights_are_for_one_model_and_one_optimizer(level: str) -> None:
    first, second = _net(), _net()
    for models in ([first, second], [first]):
        with _run(level):
            weights = [p for model in models for p in model.parameters()]
            made = [SGD(weights, lr=0.1), *([Adam(first.parameters())] if len(models) == 1 else [])]
            why = "models .Sequential, Sequential. of one SGD" if len(made) == 1 else "optimizers .Adam, SGD."
            with pytest.raises(ConfigError, match=rf"several {why}.*O1, or write.*penstock.accelerate"):
                first(X)
        assert {p.dtype for p in weights} == FP32
    with _run(level):
        made = [SGD(first.parameters(), lr=0.1), SGD([nn.Parameter(torch.ones(1))], lr=0.1)]
        with pytest.raises(ConfigError, match=r"several optimizers \(SGD, SGD\)"):
            first(X)


def test_models_that_nobody_trains_are_left_alone() -> None:
    teacher, student = _net(), _net()
    with _run() as told:
        optimizer = SGD(student.parameters(), lr=0.1)
        assert _products(teacher) == FP32
        (student(X) - teacher(X)).square().sum().backward()
        optimizer.step()
        assert _products(teacher) == FP32
    assert "left alone Sequential: no optimizer trains it" in told[0]


def test_an_optimizer_of_free_tensors_is_left_alone() -> None:
    image = torch.zeros(3, 4, requires_grad=True)
    net = _net()
    with _run() as told:
        optimizer = Adam([image], lr=0.1)
        net(image).sum().backward()
        optimizer.step()
        assert nn.Module.__call__.__name__ == "_wrapped_call_impl"
    assert any("left alone Adam: it trains no module's weights" in text for text in told)


def test_a_module_that_is_never_called_is_said() -> None:
    model = _net()
    with _run() as told:
        optimizer = SGD(model.parameters(), lr=0.1)
        model[0].weight.square().sum().backward()
        optimizer.step()
    assert "Sequential was trained without being called" in told[0]


def test_models_of_one_optimizer_are_taken_at_the_first_call() -> None:
    """A list of heads is not called itself, and its heads are; a model with two optimizers brings the second."""
    model, heads, wide = _net(), nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)]), nn.Linear(4, 2).double()
    free = nn.Parameter(torch.ones(()))
    original = nn.Module.__call__
    with _run() as told:
        first = SGD([*model.parameters(), *heads.parameters(), *wide.parameters(), free], lr=0.1)
        second = Adam(heads[1].parameters())
        assert nn.Module.__call__ is not original
        loss = model(X).sum()
        assert nn.Module.__call__ is original
        (loss + sum(head(X).sum() for head in heads)).backward()
        first.step()
        second.step()
        assert _products(model) == _products(heads[0]) == _products(heads[1]) == BF16
        assert wide(X.double()).dtype == torch.float64
    assert (
        "accelerated Sequential (58 weights), Linear (10 weights), Linear (10 weights), trained by SGD (11 tensors) "
        "and Adam (2 tensors): 4 of 4 matrix products in bf16" in told[0]
    )
    assert "left alone Linear: its weights are torch.float64" in told[0]


def test_nothing_to_do_is_said() -> None:
    with _run() as told:
        pass
    assert told == [
        "penstock: nothing was accelerated: the script made no optimizer of torch.optim; whether it updates weights by "
        "hand, or trains in processes that it starts, cannot be seen from outside: start ranks with torchrun"
    ]
    with _run() as told:
        optimizer = SGD(_net().parameters(), lr=0.1)
    assert "no model that an optimizer trains was called" in told[0]
    assert optimizer.param_groups


def test_optimizers_that_are_gone_are_not_waited_for() -> None:
    model = _net()
    with _run():
        SGD(model.parameters(), lr=0.1)
        gc.collect()
        assert _products(model) == FP32
        assert nn.Module.__call__.__name__ == "_wrapped_call_impl"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_second_optimizer_for_the_same_model(dtype: str) -> None:
    model = _net()
    with _run(dtype=dtype) as told:
        for lr in (0.1, 0.01):
            optimizer = SGD(model.parameters(), lr=lr)
            before = model[0].weight.detach().clone()
            for _ in range(3):
                optimizer.zero_grad()
                model(X).mean().backward()
                optimizer.step()
            assert not torch.equal(before, model[0].weight)
            assert before.isfinite().all()
    assert len(told) == 1 or dtype == "bf16" or told[1].count("accelerated") == 1


def test_what_master_weights_cannot_follow_is_refused() -> None:
    model = _net()
    with _run("O2"):
        optimizer = SGD(model[0].parameters(), lr=0.1)
        model(X).sum().backward()
        optimizer.step()
        with pytest.raises(ConfigError, match=r"adds parameters.*use --precision O1"):
            optimizer.add_param_group({"params": list(model[2].parameters())})
        second = SGD(model.parameters(), lr=0.1)
        with pytest.raises(ConfigError, match=r"several optimizers .SGD, SGD.*--precision O1"):
            model(X)
    assert second.param_groups


def test_half_weights_for_one_model_after_the_other() -> None:
    """What is left of an earlier model, whose scheduler and optimizer refer to each other, is no second optimizer."""

    def train(model: nn.Module) -> None:
        optimizer = SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        model(X).sum().backward()
        optimizer.step()
        schedule.step()

    gc.disable()
    try:
        with _run("O2"):
            train(_net())
            model = _net()
            train(model)
            assert _products(model) == BF16
            with pytest.raises(
                ConfigError, match=r"a second optimizer of Sequential, SGD\. Use --precision O1"
            ):
                train(model)
    finally:
        gc.enable()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_model_whose_weights_an_optimizer_gets_later(dtype: str) -> None:
    model, extra = _net(), nn.Linear(2, 2)
    with _run(dtype=dtype, **({"loss_scale": 8.0} if dtype == "fp16" else {})) as told:
        optimizer = SGD(model.parameters(), lr=0.1)
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": list(extra.parameters())})
            before = extra.weight.detach().clone()
            out = model(X)
            (extra(out) if step >= 2 else out).sum().backward()
            optimizer.step()
            assert torch.equal(extra.weight, before) == (step < 2)
            optimizer.zero_grad()
        assert _products(extra, torch.ones(3, 2)) == {
            getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[dtype])
        }
    assert "accelerated Linear (6 weights), trained by SGD (6 tensors): " in told[1]
    assert "left alone" not in "".join(told)


def test_lazy_modules_get_their_shapes_first() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.GELU(), nn.LazyLinear(2))
    with _run():
        optimizer = SGD(model.parameters(), lr=0.1)
        model(X).sum().backward()
        optimizer.step()
        assert _products(model) == BF16
    with pytest.raises(ConfigError, match=r"0\.weight has no shape yet; call the model once"):
        penstock.accelerate(nn.Sequential(nn.LazyLinear(8)), precision="O2")


def test_parameters_may_be_added_where_weights_stay() -> None:
    model = _net()
    with _run():
        optimizer = SGD(model[0].parameters(), lr=0.1)
        model(X).sum().backward()
        optimizer.add_param_group({"params": list(model[2].parameters())})
        before = model[2].weight.detach().clone()
        optimizer.step()
    assert not torch.equal(before, model[2].weight)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_distributed_data_parallel(level: str, tmp_path: Any) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1
    )
    try:
        model = DistributedDataParallel(_net())
        with _run(level):
            optimizer = SGD(model.parameters(), lr=0.1)
            if level == "O2":
                with pytest.raises(ConfigError, match=r"DistributedDataParallel holds on.*--precision O1"):
                    model(X)
            else:
                model(X).sum().backward()
                optimizer.step()
                assert _products(model) == BF16
    finally:
        torch.distributed.destroy_process_group()


# -- scripts with mixed precision of their own


def test_own_autocast() -> None:
    model = _net()
    with _run() as told:
        optimizer = SGD(model.parameters(), lr=0.1)
        with torch.autocast("cpu", torch.bfloat16):
            model(X)
        assert "_penstock_precision" not in model.__dict__
    why = "left alone Sequential: it runs under the script's own torch.autocast"
    assert told == [f"penstock: nothing was accelerated: {why}"]
    assert optimizer.param_groups


def test_own_grad_scaler() -> None:
    model = _net()
    with _run(dtype="fp16") as told:
        optimizer = SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(X).sum()).backward()
        scaler.step(optimizer)
    assert "GradScaler of its own" in told[0]
    for weight, theirs in zip(model.parameters(), _net().parameters()):
        assert weight.dtype == theirs.dtype


def test_a_grad_scaler_that_comes_too_late() -> None:
    model = _net()
    with _run(dtype="fp16"):
        optimizer = SGD(model.parameters(), lr=0.1)
        model(X).sum().backward()
        torch.amp.GradScaler("cpu", enabled=False)
        with pytest.raises(ConfigError, match="scaled twice"):
            torch.amp.GradScaler("cpu")
    assert optimizer.param_groups


def test_a_script_that_calls_penstock_itself() -> None:
    model = _net()
    with _run() as told:
        optimizer = SGD(model.parameters(), lr=0.1)
        penstock.accelerate(model, optimizer, precision="O2")
        model(X).sum().backward()
        optimizer.step()
    why = "left alone Sequential: the script accelerates it itself"
    assert told == [f"penstock: {why}", f"penstock: nothing was accelerated: {why}"]


@pytest.mark.parametrize(
    ("dtype", "words"), [(torch.bfloat16, "half weights"), (torch.float64, "torch.float64")]
)
def test_weights_of_other_types(dtype: torch.dtype, words: str) -> None:
    model = _net().to(dtype)
    with _run() as told:
        optimizer = SGD(model.parameters(), lr=0.1)
        model(X.to(dtype)).sum().backward()
        optimizer.step()
    assert words in told[0]
    assert {p.dtype for p in model.parameters()} == {dtype}


def test_engines_with_mixed_precision_of_their_own_are_refused() -> None:
    engine = type("DeepSpeedEngine", (nn.Sequential,), {"__module__": "deepspeed.runtime.engine"})(_net())
    with _run():
        optimizer = SGD(engine.parameters(), lr=0.1)
        with pytest.raises(ConfigError, match="DeepSpeed, which has mixed precision of its own"):
            engine(X)
    assert optimizer.param_groups


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "o1"}, "begins with a small o"),
        ({"dtype": "int8"}, "int8"),
        ({"precision": "O3", "dtype": "fp16", "loss_scale": 8.0}, "use O2"),
        ({"nonsense": 1}, "no property"),
        ({"precision": "O0", "dtype": "bf16"}, "no effect with O0"),
    ],
)
def test_settings_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Interception(say=print, **options)
