"""Where an overflow begins, and how a run ends that overflows at every loss scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import penstock
from helpers.spawn import spawn
from penstock.errors import ExitCode, NumericError
from penstock.precision import OverflowTrace
from penstock.precision.lists import OpLists, default_lists

STEPS = 50


class Steep(nn.Module):
    """Its forward pass is finite; its gradient is multiplied by 1e9 in fp16, and overflows at every scale."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * 1e-9).half().float() * 1e9


class Huge(nn.Module):
    """Overflows going forward."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() + 1e6).half().to(x.dtype)


def net(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(*middle), nn.Linear(8, 4))


def ends_within(model: nn.Module, optimizer: Any, step: Any) -> tuple[int, NumericError]:
    """Take steps until one raises NumericError."""
    x, target = torch.randn(6, 8), torch.randint(0, 4, (6,))
    for number in range(1, STEPS + 1):
        try:
            step(model, optimizer, x, target)
        except NumericError as error:
            return number, error
    raise AssertionError(f"{STEPS} steps did not end the run")


def plain_step(model: nn.Module, optimizer: Any, x: Tensor, target: Tensor) -> None:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), target)
    with penstock.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("middle", "where"),
    [
        ((nn.Identity(), Steep(), nn.GELU()), "the backward pass of 1.1"),
        ((nn.Identity(), Huge(), nn.GELU()), "the output of 1.1"),
    ],
)
def test_the_layer_where_it_begins(middle: tuple[nn.Module, ...], where: str) -> None:
    model = net(*middle)
    with OverflowTrace([model]) as trace:
        model(torch.randn(6, 8)).sum().backward()
    assert str(trace.first()) == where


class Attention(nn.Module):
    """Its products of queries and keys overflow in fp16, between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.proj = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = (self.q(x) * 300) @ (self.k(x) * 300).T / 1e5
        return self.proj((scores if mask is None else scores + mask).softmax(-1) @ x)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attn = Attention()
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.out(self.attn(x, mask=mask))


def test_what_happens_between_layers_is_blamed_on_the_module_around_them() -> None:
    torch.manual_seed(0)
    x, target = torch.randn(16, 8), torch.randint(0, 8, (16,))

    def train(lists: OpLists | None) -> None:
        model = Attending()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        model, optimizer = penstock.accelerate(model, optimizer, dtype="fp16", lists=lists)
        for _ in range(STEPS):
            plain_step(model, optimizer, x, target)

    with pytest.raises(NumericError, match=r"begins in the computation of attn itself, before attn\.proj\."):
        train(None)
    train(default_lists(torch.float16, "cpu").with_(fp32_modules=["attn"]))


def test_masks_are_no_overflow_and_inputs_are_not_blamed_on_layers() -> None:
    model = Attending()
    mask = torch.zeros(16, 16).masked_fill(torch.ones(16, 16).triu(1).bool(), float("-inf"))
    with OverflowTrace([model]) as trace:
        model(torch.randn(16, 8), mask).sum().backward()
    assert trace.first() is None
    with OverflowTrace([model]) as trace:
        model(torch.full((16, 8), float("inf"))).sum().backward()
    assert str(trace.first()) == "the input of Attending"


def test_what_the_loss_sends_back_is_not_blamed_on_a_layer() -> None:
    model = net(nn.GELU())
    with OverflowTrace([model]) as trace:
        (model(torch.randn(6, 8)).sum() * float("inf")).backward()
    assert str(trace.first()) == "the gradient of the output of 2"


def test_a_weight_gradient_alone_may_overflow() -> None:
    model = net(nn.GELU()).half()
    with OverflowTrace([model]) as trace:
        # Each product is finite and so is the gradient of the input; their sum over the batch is not.
        model[2](torch.full((64, 8), 2e3).half()).sum().backward()
        assert model[2].weight.grad is not None
    assert not model[2].weight.grad.isfinite().all()
    assert str(trace.first()) == "the backward pass of 2"


def test_compiled_parts_are_seen_through() -> None:
    model = net(nn.Identity(), Steep(), nn.GELU())
    model[1].compile(backend="aot_eager")
    model(torch.randn(6, 8)).sum().backward()
    with OverflowTrace([model]) as trace:
        model(torch.randn(6, 8)).sum().backward()
    assert str(trace.first()) == "the backward pass of 1.1"
    with OverflowTrace([torch.compile(model, backend="aot_eager")]) as trace:
        model(torch.randn(6, 8)).sum().backward()
    assert str(trace.first()) == "the backward pass of _orig_mod.1.1"


def test_finite_passes_name_nothing_and_leave_nothing() -> None:
    model = net(nn.GELU())
    trace = OverflowTrace([model])
    with trace:
        model(torch.randn(6, 8)).sum().backward()
    assert trace.first((name, p.grad) for name, p in model.named_parameters()) is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with trace:  # forgets what it saw
        pass
    gradients = [("a", torch.tensor(1.0)), ("b", torch.tensor(float("nan"))), ("c", None)]
    assert str(trace.first(gradients)) == "the gradient of b"


@pytest.mark.parametrize("precision", ["O1", "O2"])
@pytest.mark.parametrize("middle", [Steep, Huge])
def test_a_lost_run_ends_and_names_the_layer(precision: str, middle: type[nn.Module]) -> None:
    model = net(nn.Identity(), middle(), nn.GELU())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model, optimizer = penstock.accelerate(model, optimizer, precision=precision, dtype="fp16")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    number, error = ends_within(model, optimizer, plain_step)
    assert error.exit_code == ExitCode.NUMERIC
    assert number > 16  # the scale has 16 halvings to try first
    assert "of 1.1." in str(error)
    assert "fallen to 1 " in str(error)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_constant_scale_ends_too() -> None:
    model = net(Steep())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model, optimizer = penstock.accelerate(model, optimizer, dtype="fp16", loss_scale=128.0)
    number, error = ends_within(model, optimizer, plain_step)
    assert number <= 8
    assert "fallen to 128 " in str(error)


class Sometimes(nn.Module):
    """Steep while asked."""

    def __init__(self) -> None:
        super().__init__()
        self.steep = True

    def forward(self, x: Tensor) -> Tensor:
        return Steep()(x) if self.steep else x


def test_a_run_that_recovers_goes_on() -> None:
    model = net(Sometimes())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model, optimizer = penstock.accelerate(model, optimizer, dtype="fp16")
    x, target = torch.randn(6, 8), torch.randint(0, 4, (6,))
    for number in range(60):
        model[1][0].steep = number < 21  # lost, and under search
        plain_step(model, optimizer, x, target)
    assert not any(m._forward_hooks for m in model.modules())


def _lost_on_rank_one() -> list[tuple[int, int, str]]:
    """With and without DistributedDataParallel: steps, exit code and message."""
    rank = distributed.get_rank()
    found = []
    for ddp in (False, True):
        model = net(nn.Identity(), Steep() if rank == 1 else nn.Identity(), nn.GELU())
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model, optimizer = penstock.accelerate(model, optimizer, dtype="fp16")
        torch.manual_seed(rank)
        wrapped = nn.parallel.DistributedDataParallel(model) if ddp else model
        number, error = ends_within(wrapped, optimizer, plain_step)
        found.append((number, int(error.exit_code), str(error)))
    return found


def test_all_ranks_end_together_and_the_one_that_overflows_names_its_layer() -> None:
    for (steps, code, other), (steps_one, code_one, own) in zip(*spawn(_lost_on_rank_one, 2), strict=True):
        assert steps == steps_one
        assert code == code_one == ExitCode.NUMERIC
        assert "the backward pass of 1.1." in own
        assert "it begins on another rank" in other
