"""What a pair saves: fp32 weights, optimizer and loss scale, exact, for every level and for plain PyTorch."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import CheckpointError, ConfigError
from penstock.optim import contiguous
from penstock.precision import scalers_of

LEVELS = [("O0", "auto"), *((level, dtype) for level in ("O1", "O2", "O3") for dtype in ("bf16", "fp16"))]
backward: Any = Tensor.backward


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 4))


def pair(
    level: str, dtype: str = "auto", form: str = "fused", seed: int = 0, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = net()
    optimizer: torch.optim.Optimizer
    if form == "contiguous":
        optimizer = contiguous(torch.optim.AdamW, model.parameters(), lr=1e-2, eps=1e-4)
    else:
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-2, eps=1e-4, foreach=form == "foreach", fused=form == "fused"
        )
    return penstock.accelerate(model, optimizer, precision=level, dtype=dtype, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 8, generator=generator)
        y = (x[:, 0] > 0).long()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if step == 2:
            loss = loss * float("inf")  # an overflow, so that the scale has a history
        with penstock.scale_loss(loss, optimizer) as scaled:
            backward(scaled)
        optimizer.step()
        losses.append(loss.item())
    return losses


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize(
    ("level", "dtype", "form"),
    [(*one, form) for one, form in zip(LEVELS[1:], ("foreach", "fused", "contiguous") * 2)],
)
def test_a_run_goes_on_bit_for_bit(level: str, dtype: str, form: str) -> None:
    if dtype == "bf16" or level == "O3":
        steps, more = range(3, 6), range(6, 9)
    else:
        steps, more = range(4), range(4, 8)
    model, optimizer = pair(level, dtype, form)
    train(model, optimizer, steps)
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert all(v.dtype == torch.float32 for v in saved["model"].values() if v.is_floating_point())
    expected = train(model, optimizer, more)
    other, resumed = pair(level, dtype, form, seed=7)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert same(dict(other.state_dict()), dict(saved["model"]))
    assert same(resumed.state_dict(), saved["optimizer"])
    assert train(other, resumed, more) == expected
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert same(resumed.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize(
    ("source", "source_dtype", "target", "target_dtype"),
    [(*one, *LEVELS[(number + step) % 7]) for number, one in enumerate(LEVELS) for step in (1, 3)],
)
def test_any_level_loads_any_other(source: str, source_dtype: str, target: str, target_dtype: str) -> None:
    model, optimizer = pair(source, source_dtype)
    train(model, optimizer, range(3, 5))
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other, resumed = pair(target, target_dtype, seed=7)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    if target != "O3":  # O3 has no bits for the rest
        assert same(dict(other.state_dict()), dict(saved["model"]))
    assert train(other, resumed, range(5, 7)) == pytest.approx(train(model, optimizer, range(5, 7)), rel=0.05)


@pytest.mark.parametrize(("level", "dtype"), LEVELS)
def test_plain_pytorch_loads_it_and_is_loaded(level: str, dtype: str) -> None:
    model, optimizer = pair(level, dtype)
    train(model, optimizer, range(3, 5))
    plain = net()
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-4, fused=True)
    plain.load_state_dict(through_a_file(model.state_dict()))
    theirs.load_state_dict(through_a_file(optimizer.state_dict()))
    assert same(dict(plain.state_dict()), dict(model.state_dict()))
    F.cross_entropy(plain(torch.ones(2, 8) * torch.tensor([[1.0], [2.0]])), torch.tensor([0, 1])).backward()  # type: ignore[no-untyped-call]
    theirs.step()
    back, again = pair(level, dtype, seed=7)
    back.load_state_dict(plain.state_dict())
    again.load_state_dict(theirs.state_dict())
    if level != "O3":
        assert same(dict(back.state_dict()), dict(plain.state_dict()))
    train(back, again, range(5, 6))


def test_a_part_of_the_model_saves_and_loads_its_masters() -> None:
    model, optimizer = pair("O2", "bf16")
    other, resumed = pair("O2", "bf16", seed=7)
    head = model.get_submodule("3")
    other.get_submodule("3").load_state_dict(head.state_dict())
    assert same(dict(other.get_submodule("3").state_dict()), dict(head.state_dict()))
    for group in resumed.param_groups:
        group["lr"] = 0.0
    train(other, resumed, range(3, 4))
    assert same(dict(other.get_submodule("3").state_dict()), dict(head.state_dict()))
    assert optimizer is not resumed


def test_inside_a_container_names_get_its_prefix() -> None:
    model, optimizer = pair("O2", "bf16")
    train(model, optimizer, range(3, 5))
    outer = nn.ModuleDict({"inner": model})
    assert same({k.removeprefix("inner."): v for k, v in outer.state_dict().items()}, {**model.state_dict()})


def test_loading_refuses_what_would_lose_masters() -> None:
    model, _ = pair("O2", "bf16")
    with pytest.raises(ConfigError, match="assign=True"):
        model.load_state_dict(model.state_dict(), assign=True)
    wrong = dict(model.state_dict())
    wrong["0.weight"] = torch.zeros(3, 3)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(wrong)
    assert same(dict(model.state_dict()), before)


def test_the_number_of_losses_must_fit() -> None:
    _, two = pair("O1", "fp16", losses=2)
    _, one = pair("O1", "fp16")
    with pytest.raises(CheckpointError, match="losses=2"):
        one.load_state_dict(two.state_dict())


def test_the_scale_is_part_of_the_state() -> None:
    model, optimizer = pair("O1", "fp16")
    train(model, optimizer, range(4))
    stored = optimizer.state_dict()["penstock"]
    assert stored["precision"] == "O1"
    assert stored["scalers"][0]["scale"].item() == 2.0**15
    _, other = pair("O1", "fp16")
    other.load_state_dict(optimizer.state_dict())
    assert scalers_of(other)[0].scale.item() == 2.0**15
    assert scalers_of(other)[0].overflows.item() == 1
