"""Flat buffers keep every habit of the optimizer they wrap."""

from __future__ import annotations

import copy
import gc
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.optim import contiguous

KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "SGD loop": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "fused": False, "foreach": False}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}), "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}), "Adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5}), "ASGD": (torch.optim.ASGD, {"lr": 0.05, "t0": 2}),
}  # fmt: skip


class Net(nn.Module):
    """Two branches, so that one can be left without gradients; a 0-d parameter; a channels-last convolution."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.left = nn.Linear(5, 7)
        self.right = nn.Linear(5, 7)
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor, branch: str = "both") -> Tensor:
        x = self.conv(x).mean((2, 3))
        y = x.new_zeros(len(x), 7)
        if branch in ("both", "left"):
            y = y + self.left(x)
        if branch in ("both", "right"):
            y = y + self.right(x)
        return self.head(torch.tanh(y * self.temperature))


def backward(net: nn.Module, step: int, **how: Any) -> Tensor:
    x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(step))
    loss = (net(x, **how) - 1).square().mean()
    loss.backward()
    return loss


def same_weights(a: nn.Module, b: nn.Module, tolerance: float = 1e-6) -> None:
    for (name, mine), theirs in zip(a.named_parameters(), b.parameters()):
        torch.testing.assert_close(
            mine, theirs, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_optimizer_it_wraps(kind: str) -> None:
    cls, options = KINDS[kind]
    plain, flat = Net(), Net()
    one, two = cls(plain.parameters(), **options), contiguous(cls, flat.parameters(), **options)
    for step in range(12):
        # Steps 4 to 6 leave a branch out: its weights, momenta and counters must rest, then go on.
        branch = "left" if 4 <= step < 7 else "both"
        for net, optimizer in ((plain, one), (flat, two)):
            optimizer.zero_grad()
            backward(net, step, branch=branch)
            optimizer.step()
    same_weights(flat, plain, 1e-5)
    mine, theirs = two.state_dict(), one.state_dict()
    assert mine["state"].keys() == theirs["state"].keys()
    for index, expected in theirs["state"].items():
        assert mine["state"][index].keys() == expected.keys()
        for key, value in expected.items():
            got = mine["state"][index][key]
            assert type(got) is type(value), key
            if isinstance(value, Tensor):
                assert got.shape == value.shape
                torch.testing.assert_close(got, value, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_goes_on_exactly_from_its_own_state(kind: str) -> None:
    cls, options = KINDS[kind]
    net = Net()
    optimizer = contiguous(cls, net.parameters(), **options)
    for step in range(6):
        optimizer.zero_grad()
        backward(net, step, branch="right" if step == 3 else "both")
        optimizer.step()
    twin = copy.deepcopy(net)
    resumed = contiguous(cls, twin.parameters(), **options)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(6, 10):
        for n, o in ((net, optimizer), (twin, resumed)):
            o.zero_grad()
            backward(n, step)
            o.step()
    for mine, theirs in zip(twin.parameters(), net.parameters()):
        assert torch.equal(mine, theirs)


def test_views_stay_valid() -> None:
    net = Net()
    optimizer = contiguous(torch.optim.AdamW, net.parameters(), lr=0.01)
    (bucket,) = optimizer.buckets()
    values = bucket.values
    storages = {p.untyped_storage().data_ptr() for p in net.parameters()}
    assert storages == {values.untyped_storage().data_ptr()}
    assert net.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert all(p.data_ptr() % 64 == 0 for p in net.parameters())
    for step in range(3):
        optimizer.zero_grad(set_to_none=True)
        assert all(p.grad is None for p in net.parameters())
        backward(net, step)
        for p in net.parameters():
            assert p.grad is not None
            assert p.grad.untyped_storage().data_ptr() == bucket.gradients.untyped_storage().data_ptr()
            assert p.grad.stride() == p.stride()
        once = bucket.gradients.clone()
        backward(net, step)
        torch.testing.assert_close(bucket.gradients, 2 * once)  # accumulates in place
        optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert not bucket.gradients.any()
    assert all(p.grad is not None for p in net.parameters())


def test_stray_gradients_are_copied_in() -> None:
    plain, flat = Net(), Net()
    one = torch.optim.AdamW(plain.parameters(), lr=0.01)
    two = contiguous(torch.optim.AdamW, flat.parameters(), lr=0.01)
    for net, optimizer in ((plain, one), (flat, two)):
        for step in range(4):
            net.zero_grad(set_to_none=True)  # the module's, not the optimizer's
            backward(net, step)
            for parameter in net.parameters():
                assert parameter.grad is not None
                parameter.grad = parameter.grad.clone() * 2  # as a hand-written clipping would
            net.head.bias.grad = None  # and this one sits out
            optimizer.step()
    same_weights(flat, plain)
    assert not two.state_dict()["state"].keys() - one.state_dict()["state"].keys()


def test_frozen_then_thawed() -> None:
    plain, flat = Net(), Net()
    for net in (plain, flat):
        net.left.requires_grad_(False)
    one = torch.optim.AdamW(plain.parameters(), lr=0.01)
    two = contiguous(torch.optim.AdamW, flat.parameters(), lr=0.01)
    for net, optimizer in ((plain, one), (flat, two)):
        for step in range(6):
            if step == 3:
                net.left.requires_grad_(True)
            optimizer.zero_grad()
            backward(net, step)
            optimizer.step()
    same_weights(flat, plain)


def test_groups_schedulers_closures_and_new_groups() -> None:
    plain, flat = Net(), Net()

    def groups(net: Net) -> list[dict[str, Any]]:
        return [
            {"params": net.conv.parameters(), "lr": 0.02},
            {"params": [net.left.weight, net.right.weight], "weight_decay": 0.3},
            {"params": [net.left.bias, net.right.bias, net.temperature], "weight_decay": 0.0},
        ]

    one = torch.optim.AdamW(groups(plain), lr=0.01)
    two = contiguous(torch.optim.AdamW, groups(flat), lr=0.01)
    for net, optimizer in ((plain, one), (flat, two)):
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
        for step in range(8):
            if step == 4:
                optimizer.add_param_group({"params": list(net.head.parameters()), "lr": 0.1})
                scheduler.base_lrs.append(0.1)
                optimizer.param_groups[-1]["initial_lr"] = 0.1

            def closure(net: Net = net, optimizer: Any = optimizer, step: int = step) -> Tensor:
                optimizer.zero_grad()
                net.head.zero_grad()
                return backward(net, step)

            loss = optimizer.step(closure)
            assert loss.requires_grad
            scheduler.step()
    same_weights(flat, plain)
    assert [g["lr"] for g in one.param_groups] == [g["lr"] for g in two.param_groups]
    assert len(two.buckets()) == 4


def test_named_parameters_and_two_dtypes_in_one_group() -> None:
    plain, flat = Net(), Net()
    for net in (plain, flat):
        net.head.bfloat16()
        net.head.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
    one = torch.optim.AdamW(plain.named_parameters(), lr=0.01, fused=True)
    two = contiguous(torch.optim.AdamW, flat.named_parameters(), lr=0.01)
    assert [bucket.values.dtype for bucket in two.buckets()] == [torch.float32, torch.bfloat16]
    for net, optimizer in ((plain, one), (flat, two)):
        for step in range(5):
            optimizer.zero_grad()
            backward(net, step)
            optimizer.step()
    same_weights(flat, plain)
    assert two.state_dict()["param_groups"] == one.state_dict()["param_groups"]
    again = contiguous(torch.optim.AdamW, flat.named_parameters(), lr=0.01)
    again.load_state_dict(two.state_dict())


def test_loading_weights_keeps_the_views() -> None:
    net, other = Net(), Net()
    with torch.no_grad():
        other.head.weight.mul_(2)
    optimizer = contiguous(torch.optim.AdamW, net.parameters(), lr=0.01)
    generation = optimizer.generation
    net.load_state_dict(other.state_dict())
    net.to("cpu")
    backward(net, 0)
    optimizer.step()
    assert optimizer.generation == generation
    assert not torch.equal(net.head.weight, other.head.weight)


def test_moved_parameters_are_noticed_and_followed(caplog: pytest.LogCaptureFixture) -> None:
    plain, flat = Net(), Net()
    one = torch.optim.AdamW(plain.parameters(), lr=0.01, fused=True)
    two = contiguous(torch.optim.AdamW, flat.parameters(), lr=0.01)
    for step in range(6):
        for net, optimizer in ((plain, one), (flat, two)):
            if step == 3:
                net.head.weight.data = net.head.weight.detach() * 2
            optimizer.zero_grad()
            backward(net, step)
            if step == 3 and optimizer is two:
                with caplog.at_level(logging.WARNING):
                    optimizer.step()
                assert "1 parameters are no longer in the flat buffers" in caplog.text
            else:
                optimizer.step()
    same_weights(flat, plain)
    assert not two.buckets()[0].strayed()


def test_casting_the_model_casts_the_state(caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    optimizer = contiguous(torch.optim.AdamW, net.parameters(), lr=0.01)
    backward(net, 0)
    optimizer.step()
    average = optimizer.state[net.head.weight]["exp_avg"].clone()
    net.double()
    optimizer.zero_grad()
    (net(torch.randn(4, 3, 6, 6, dtype=torch.float64)) - 1).square().mean().backward()
    with caplog.at_level(logging.WARNING):
        optimizer.step()
    assert "10 parameters" in caplog.text or "9 parameters" in caplog.text
    state = optimizer.state[net.head.weight]
    assert state["exp_avg"].dtype == torch.float64
    assert state["step"].item() == 2
    assert net.head.weight.grad is not None
    torch.testing.assert_close(state["exp_avg"], 0.9 * average.double() + 0.1 * net.head.weight.grad)


def test_works_with_torchs_grad_scaler() -> None:
    plain, flat = Net(), Net()
    one = torch.optim.AdamW(plain.parameters(), lr=0.01, fused=True)
    two = contiguous(torch.optim.AdamW, flat.parameters(), lr=0.01)
    for net, optimizer in ((plain, one), (flat, two)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
        for step in range(8):
            optimizer.zero_grad()
            x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(step))
            if step == 5:
                x[0] = float("inf")
            scaler.scale((net(x) - 1).square().mean()).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
    assert all(p.isfinite().all() for p in flat.parameters())
    same_weights(flat, plain)


def test_a_dead_optimizer_lets_go() -> None:
    net = Net()
    optimizer = contiguous(torch.optim.AdamW, net.parameters(), lr=0.01)
    backward(net, 0)
    optimizer.zero_grad()
    del optimizer
    gc.collect()
    backward(net, 0)
    grads = {p.grad.untyped_storage().data_ptr() for p in net.parameters() if p.grad is not None}
    assert len(grads) == len(list(net.parameters()))
    fresh = contiguous(torch.optim.AdamW, net.parameters(), lr=0.01)
    fresh.step()


def test_refuses_what_is_not_elementwise_and_strangers_but_takes_their_word() -> None:
    reasons = {
        "LBFGS": "along a line",
        "SparseAdam": "sparse",
        "Adafactor": "factors",
        "Muon": "orthogonalises",
    }
    for name, reason in reasons.items():
        with pytest.raises(ConfigError, match=reason):
            contiguous(getattr(torch.optim, name), Net().parameters())

    class Mine(torch.optim.SGD):
        pass

    net = Net()
    with pytest.raises(ConfigError, match="elementwise=True"):
        contiguous(Mine, net.parameters(), lr=0.1)
    optimizer = contiguous(Mine, net.parameters(), elementwise=True, lr=0.1)
    backward(net, 0)
    optimizer.step()


def test_cannot_be_copied_by_mistake() -> None:
    optimizer = contiguous(torch.optim.AdamW, Net().parameters(), lr=0.1)
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(optimizer)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    plain, flat = Net().cuda(), Net().cuda()
    one = torch.optim.AdamW(plain.parameters(), lr=0.01, fused=True)
    two = contiguous(torch.optim.AdamW, flat.parameters(), lr=0.01)
    x = torch.randn(4, 3, 6, 6, device="cuda")
    for net, optimizer in ((plain, one), (flat, two)):
        for _ in range(20):
            optimizer.zero_grad()
            (net(x) - 1).square().mean().backward()
            optimizer.step()
    same_weights(flat, plain, 1e-5)
    resumed = contiguous(torch.optim.AdamW, flat.parameters(), lr=0.01)
    resumed.load_state_dict(one.state_dict())
