"""The backward pass of a script that knows of no loss scale: true gradients before and after, whatever it does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.errors import ConfigError
from penstock.precision import scalers_of
from penstock.script import Interception

SCALE = 1024.0


def _model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))


@contextmanager
def _fp16(level: str = "O1", **overrides: Any) -> Iterator[None]:
    with Interception(precision=level, dtype="fp16", say=lambda _: None, **overrides):
        yield


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer, micro: int) -> None:
    torch.manual_seed(2)
    for _ in range(4):
        optimizer.zero_grad()
        for _ in range(micro):
            F.mse_loss(model(torch.randn(3, 4)), torch.ones(3, 2)).backward()
        optimizer.step()


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_same_bits_as_three_lines(level: str, micro: int) -> None:
    by_hand = _model()
    optimizer = three = torch.optim.SGD(by_hand.parameters(), lr=0.1, momentum=0.9)
    penstock.accelerate(by_hand, optimizer, precision=level, dtype="fp16")
    torch.manual_seed(2)
    for _ in range(4):
        optimizer.zero_grad()
        for _ in range(micro):
            loss = F.mse_loss(by_hand(torch.randn(3, 4)), torch.ones(3, 2))
            with penstock.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        optimizer.step()

    model = _model()
    with _fp16(level):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        _loop(model, optimizer, micro)
    assert scalers_of(optimizer)[0].state_dict() == scalers_of(three)[0].state_dict()
    for name, value in by_hand.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def _reference_gradients(use: Callable[[nn.Module], Any]) -> list[Tensor]:
    model = _model()
    use(model)
    return [p.grad for p in model.parameters() if p.grad is not None]


def _gradients(use: Callable[[nn.Module], Any], level: str = "O1") -> list[Tensor]:
    model = _model()
    with _fp16(level, loss_scale=SCALE):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        use(model)
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        for mine, theirs in zip(model.parameters(), trained, strict=True):
            assert mine.grad is theirs.grad  # what is done to one is done to the other
    return [p.grad for p in model.parameters() if p.grad is not None]


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def _summed(model: nn.Module) -> None:
    model(X).sum().backward()


def _given(model: nn.Module) -> None:
    model(X).backward(torch.full((3, 2), 0.5))


def _several_roots(model: nn.Module) -> None:
    out = model(X)
    torch.autograd.backward([out.sum(), out.square().mean()], [torch.tensor(2.0), None], retain_graph=True)


def _twice(model: nn.Module) -> None:
    loss = model(X).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def _some_inputs(model: nn.Module) -> None:
    assert isinstance(model, nn.Sequential)
    model(X).sum().backward(inputs=list(model[2].parameters()))


def _penalty(model: nn.Module) -> None:
    x = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (slope.square().mean() + sum(p.abs().sum() for p in model.parameters())).backward()


def _reentrant(model: nn.Module) -> None:
    assert isinstance(model, nn.Sequential)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=True)  # type: ignore[no-any-return]

    Checkpointed()(X.clone().requires_grad_()).sum().backward()


def _changed_by_hand(model: nn.Module) -> None:
    model(X).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.5, 0.5)
    model(X).sum().backward()


def _thrown_away(model: nn.Module) -> None:
    model(X).square().sum().backward()
    for parameter in model.parameters():
        parameter.grad = None
    model(X).sum().backward()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    "use",
    [
        _summed, _given, _several_roots, _twice, _some_inputs, _penalty, _reentrant, _changed_by_hand,
        _thrown_away,
    ],
    ids=lambda use: use.__name__.strip("_"),
)  # fmt: skip
def test_gradients_are_true(use: Callable[[nn.Module], Any], level: str) -> None:
    expected = _reference_gradients(use)
    found = _gradients(use, level)
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, theirs, rtol=4e-3, atol=2e-3)  # of fp16, measured 1e-3


def test_gradients_of_what_no_optimizer_trains_are_true() -> None:
    model = _model()
    x = X.clone().requires_grad_()
    x.grad = torch.ones_like(x)
    with _fp16(loss_scale=SCALE):
        torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(x).sum().backward()
    reference = X.clone().requires_grad_()
    _model()(reference).sum().backward()
    assert x.grad is not None
    assert reference.grad is not None
    torch.testing.assert_close(x.grad, reference.grad + 1, rtol=4e-3, atol=2e-3)
    assert optimizer.param_groups[0]["params"][0].grad is not None


def test_two_optimizers_of_the_same_weights_unscale_once() -> None:
    model = _model()
    with _fp16(loss_scale=SCALE):
        first = torch.optim.SGD(model.parameters(), lr=0.1)
        second = torch.optim.SGD(model.parameters(), lr=0.1)
        _summed(model)
    for mine, theirs in zip(model.parameters(), _reference_gradients(_summed)):
        torch.testing.assert_close(mine.grad, theirs, rtol=4e-3, atol=2e-3)
    assert first.param_groups[0]["params"] == second.param_groups[0]["params"]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_skips_the_step_though_clipping_hides_it(level: str) -> None:
    model = _model()
    before = copy.deepcopy(model.state_dict())
    with _fp16(level):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        # 65,536 times 1000 is beyond fp16.
        (1000.0 * model(X).sum()).backward()
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name
        optimizer.zero_grad()
        for _ in range(12):
            (1000.0 * model(X).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
    (scaler,) = scalers_of(optimizer)
    assert scaler.scale.item() < 2.0**16
    assert 0 < scaler.overflows.item() < 13
    assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])


@pytest.mark.parametrize("set_to_none", [True, False])
def test_an_overflow_whose_gradients_are_thrown_away_skips_no_later_step(set_to_none: bool) -> None:
    """As for a discriminator, through which the generator's loss runs and whose gradients are then thrown away. The
    scale falls all the same: a loop that never steps on what is not finite would else never get on."""
    model = _model()
    with _fp16():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        (1000.0 * model(X).sum()).backward()
        model.zero_grad(set_to_none=set_to_none)
        before = model[0].weight.detach().clone()
        (1e-3 * model(X).sum()).backward()
        optimizer.step()
    assert not torch.equal(model[0].weight, before)
    (scaler,) = scalers_of(optimizer)
    assert scaler.overflows.item() == 1
    assert scaler.scale.item() == 2.0**15


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_master_weights_follow_a_model_that_clears_its_own_gradients(dtype: str, set_to_none: bool) -> None:
    trained = []
    for level in ("O0", "O2"):
        model = _model()
        half: dict[str, Any] = (
            {} if level == "O0" else {"dtype": dtype, "loss_scale": 1.0 if dtype == "bf16" else SCALE}
        )
        with Interception(precision=level, say=lambda _: None, **half):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            for _ in range(5):
                model.zero_grad(set_to_none=set_to_none)
                F.mse_loss(model(X), torch.ones(3, 2)).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
        trained.append(model.state_dict())
    for name, value in trained[0].items():
        torch.testing.assert_close(trained[1][name], value, rtol=0.05, atol=5e-3)  # bf16's three digits


def test_a_backward_pass_that_fails_leaves_gradients_as_they_were() -> None:
    model = _model()

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise MemoryError("full")

    with _fp16(loss_scale=SCALE):
        torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(X).sum().backward()
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        with pytest.raises(MemoryError):
            Fails.apply(model(X)).sum().backward()  # type: ignore[no-untyped-call]
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.ones(()).backward()
        with pytest.raises(RuntimeError, match="scalar outputs"):
            model(X).backward()
    for parameter, gradient in zip(model.parameters(), before):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)
    assert optimizer.param_groups


def test_gradients_of_gradients_are_refused() -> None:
    model = _model()
    with _fp16():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ConfigError, match="create_graph=True"):
            model(X).sum().backward(create_graph=True)
    assert optimizer.param_groups


def test_losses_of_half_type_are_scaled_in_fp32() -> None:
    model = _model()
    with _fp16(outputs="keep"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = model[0].weight.detach().clone()
        for _ in range(3):  # 65,536 is no number of fp16, so that the first step is skipped
            loss = 0.01 * model(X).sum()
            assert loss.dtype == torch.float16
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert scalers_of(optimizer)[0].overflows.item() < 3
    assert not torch.equal(model[0].weight, before)


def test_sparse_gradients_are_true() -> None:
    def train(model: nn.Module) -> Tensor:
        model(torch.tensor([[0, 1], [1, 2]])).sum().backward()
        gradient = model.get_parameter("0.weight").grad
        assert gradient is not None
        return gradient.to_dense()

    def made() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2))

    reference = train(made())
    for level in ("O1", "O2"):
        model = made()
        with _fp16(level, loss_scale=SCALE):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            torch.testing.assert_close(train(model), reference, rtol=4e-3, atol=2e-3)
            before = model.state_dict()["0.weight"].clone()
            optimizer.step()
            assert not torch.equal(model.state_dict()["0.weight"], before)
