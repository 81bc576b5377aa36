"""`accelerate` and `scale_loss` on all kinds of models, optimizers and loops."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from helpers.watched import ProductDtypes
from penstock.errors import ConfigError
from penstock.optim import contiguous
from penstock.precision import master_parameters, plain, restore, scalers_of, unscale_
from penstock.precision.stepping import gradients_beside

backward: Any = Tensor.backward

LEVELS = [("O0", "auto"), *((level, dtype) for level in ("O1", "O2", "O3") for dtype in ("bf16", "fp16"))]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "loop": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, fused=True),
    "contiguous": lambda p: contiguous(torch.optim.AdamW, p, lr=1e-2, eps=1e-4),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "contiguous sgd": lambda p: contiguous(torch.optim.SGD, p, lr=0.1, momentum=0.9, dampening=0.5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-4),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-4),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2, eps=1e-4),
}


class Net(nn.Module):
    """A perceptron with what mixed precision treats each in its own way: linear, norm, buffer, tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.back = nn.Linear(16, 16, bias=False)
        self.tied = nn.Linear(16, 16, bias=False)
        self.tied.weight = self.back.weight
        self.head = nn.Linear(16, 4)
        self.register_buffer("shift", torch.full((16,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x) + self.shift)
        out: Tensor = self.head(x + self.tied(F.gelu(self.back(x))))
        return out


def made(
    level: str, dtype: str = "auto", optimizer: str = "fused", seed: int = 0, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: nn.Module = Net()
    return penstock.accelerate(
        model, OPTIMIZERS[optimizer](model.parameters()), precision=level, dtype=dtype, **options
    )


def loss_of(model: nn.Module, seed: int = 1) -> Tensor:
    x, y = batch(seed)
    return F.cross_entropy(model(x), y)


def descend(loss: Tensor, optimizer: Any, *, retain_graph: bool = False, **options: Any) -> None:
    """Add the gradients of a loss, which is scaled as its optimizer needs."""
    with penstock.scale_loss(loss, optimizer, **options) as scaled:
        backward(scaled, retain_graph=retain_graph)


def stepped(optimizer: Any, closure: Callable[..., Tensor]) -> Tensor:
    loss: Tensor = optimizer.step(closure)
    return loss


def batch(seed: int = 1, size: int = 32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 8, generator=generator)
    return x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 10, clip: float | None = None, start: int = 0,
) -> list[float]:  # fmt: skip
    losses = []
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        descend(loss, optimizer)
        if clip is not None:
            penstock.clip_grad_norm_(optimizer, clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


# -- learning


# Every level with a fifth of the optimizers.
@pytest.mark.parametrize(
    ("level", "dtype", "optimizer"),
    [
        (*level, optimizer)
        for i, level in enumerate(LEVELS)
        for j, optimizer in enumerate(OPTIMIZERS)
        if (3 * i + j) % 5 == 0
    ],
)
def test_every_level_learns_like_fp32(level: str, dtype: str, optimizer: str) -> None:
    torch.manual_seed(0)
    plain = Net()
    theirs = OPTIMIZERS[optimizer](plain.parameters())
    expected = []
    for step in range(10):
        theirs.zero_grad()
        loss = loss_of(plain, step)
        backward(loss)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        theirs.step()
        expected.append(loss.item())
    losses = train(*made(level, dtype, optimizer), clip=1.0)
    tolerance = {"O0": 1e-6, "O1": 0.02, "O2": 0.02, "O3": 0.15}[level]
    assert losses == pytest.approx(expected, rel=tolerance)
    assert losses[-1] < losses[0]


def test_o0_is_bit_for_bit_the_bare_loop() -> None:
    torch.manual_seed(0)
    plain = Net()
    optimizer = OPTIMIZERS["fused"](plain.parameters())
    for step in range(5):
        x, y = batch(step)
        optimizer.zero_grad()
        backward(F.cross_entropy(plain(x), y))
        optimizer.step()
    model, ours = made("O0")
    train(model, ours, 5)
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), model.state_dict().values()))


@pytest.mark.parametrize(
    ("level", "weight", "norm", "hidden"),
    [
        ("O0", torch.float32, torch.float32, torch.float32),
        ("O1", torch.float32, torch.float32, torch.bfloat16),
        ("O2", torch.bfloat16, torch.float32, torch.bfloat16),
        ("O3", torch.bfloat16, torch.bfloat16, torch.bfloat16),
    ],
)
def test_types_of_weights_norms_activations_and_outputs(
    level: str, weight: torch.dtype, norm: torch.dtype, hidden: torch.dtype
) -> None:
    model, _ = made(level)
    seen: dict[str, torch.dtype] = {}
    model.get_submodule("back").register_forward_hook(lambda m, a, out: seen.update(out=out.dtype))
    out = model(batch()[0])
    assert model.get_parameter("first.weight").dtype == weight
    assert model.get_parameter("norm.weight").dtype == norm
    assert seen["out"] == hidden
    assert out.dtype == torch.float32
    assert model.get_buffer("shift").dtype == (torch.bfloat16 if level == "O3" else torch.float32)
    assert not torch.is_autocast_enabled("cpu")


def test_outputs_can_be_kept_half_and_nests_are_cast() -> None:
    model, _ = made("O1", outputs="keep")
    assert model(batch()[0]).dtype == torch.bfloat16

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> dict[str, Any]:
            y = self.inner(x)
            return {"pair": (y, [y, None]), "index": y.argmax(-1), "wide": y.double(), "word": "x"}

    nested: nn.Module = penstock.accelerate(Nested(), precision="O2")
    out = nested(torch.randn(2, 8))
    assert out["pair"][0].dtype == out["pair"][1][0].dtype == torch.float32
    assert (out["index"].dtype, out["wide"].dtype, out["word"]) == (torch.int64, torch.float64, "x")


# -- the loss scale


@pytest.mark.parametrize(
    ("level", "optimizer"), [("O1", "loop"), ("O2", "foreach"), ("O1", "fused"), ("O2", "contiguous")]
)
def test_an_overflow_skips_the_step_and_halves_the_scale(level: str, optimizer: str) -> None:
    model, opt = made(level, "fp16", optimizer)
    train(model, opt, 3)
    before = copy.deepcopy(model.state_dict())
    state = copy.deepcopy(opt.state_dict()["state"])
    loss = loss_of(model, 9)
    descend(loss * float("inf"), opt)
    opt.step()
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values()))
    after = opt.state_dict()
    for key, entries in state.items():
        for name, value in entries.items():
            assert torch.equal(value, after["state"][key][name]), name
    (scaler,) = scalers_of(opt)
    assert scaler.scale.item() == 2.0**15
    assert scaler.overflows.item() == 1
    opt.zero_grad()
    train(model, opt, 1)
    assert not torch.equal(before["first.weight"], model.state_dict()["first.weight"])


@pytest.mark.parametrize("form", ["foreach", "fused sgd", "contiguous sgd"])
def test_a_first_step_that_overflows_leaves_fresh_state(form: str, uninitialised_memory_is_nan: None) -> None:
    model, opt = made("O1", "fp16", form)
    descend(loss_of(model) * float("nan"), opt)
    opt.step()
    opt.zero_grad()
    assert train(model, opt, 5) == train(*made("O1", "fp16", form, scaler={"initial": 2.0**15}), 5)


@pytest.fixture
def uninitialised_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # under which torch fills what `empty` gives
    yield
    torch.use_deterministic_algorithms(False)


def test_the_scale_brings_back_gradients_that_fp16_loses() -> None:
    def gradient(scale: float) -> Tensor:
        torch.manual_seed(0)
        layer: nn.Module = nn.Linear(8, 8)
        layer, opt = penstock.accelerate(
            layer, torch.optim.SGD(layer.parameters(), lr=0.1), precision="O2", dtype="fp16", loss_scale=scale
        )
        loss = (layer(torch.ones(1, 8)) * 2.0**-26).sum()
        descend(loss, opt)
        unscale_(opt)
        found: Tensor | None = opt.param_groups[0]["params"][1].grad
        assert found is not None
        return found

    assert (gradient(1.0) == 0).all()
    assert (gradient(2.0**16) == 2.0**-26).all()


def test_clipping_unscales_once_and_equals_torchs() -> None:
    model, opt = made("O1", "fp16")
    plain = Net()
    plain.load_state_dict(model.state_dict())
    x, y = batch()
    with torch.autocast("cpu", dtype=torch.float16):
        out = plain(x)
    backward(F.cross_entropy(out.float(), y))
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
    descend(F.cross_entropy(model(x), y), opt)
    norm = penstock.clip_grad_norm_(opt, 0.05)
    assert norm.item() == pytest.approx(expected.item(), rel=2e-3)
    again = penstock.clip_grad_norm_(opt, 0.05)
    assert again.item() == pytest.approx(0.05, rel=1e-4)
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters()):
        assert mine.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0.02, atol=1e-5, msg=name)


@pytest.mark.parametrize(("level", "dtype"), [("O1", "fp16"), ("O2", "fp16"), ("O2", "bf16"), ("O3", "bf16")])
def test_clipping_takes_what_torchs_takes(level: str, dtype: str) -> None:
    """The optimizer, the model, its parameters or an iterator over them: the same norm and the same step."""
    runs = []
    for target in (
        lambda model, opt: opt,
        lambda model, opt: model,
        lambda model, opt: model.parameters(),
        lambda model, opt: [p for p in model.parameters() if p.grad is not None or level == "O2"],
    ):
        model, opt = made(level, dtype)
        norms = []
        for step in range(2):
            descend(loss_of(model, step), opt)
            norms.append(penstock.clip_grad_norm_(target(model, opt), 0.1).item())
            opt.step()
            opt.zero_grad()
        runs.append((norms, dict(model.named_parameters())))
    for norms, weights in runs[1:]:
        assert norms == runs[0][0]
        for name, weight in weights.items():
            assert torch.equal(weight, runs[0][1][name]), name


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_clipping_some_parameters_leaves_the_others(level: str) -> None:
    model, opt = made(level, "fp16")
    descend(loss_of(model), opt)
    unscale_(opt)
    weights = master_parameters(model, opt)
    before = {name: weight.grad.clone() for name, weight in weights.items() if weight.grad is not None}
    name, some = next(iter(model.named_parameters()))
    norm = penstock.clip_grad_norm_(some, 1e-4)
    assert norm.item() == pytest.approx(before[name].norm().item(), rel=1e-4)
    for other, weight in weights.items():
        if weight.grad is not None:
            share = 1e-4 / (norm.item() + 1e-6) if other == name else 1.0
            torch.testing.assert_close(weight.grad, before[other] * share)


def test_clipping_parameters_of_no_optimizer_is_torchs() -> None:
    layer, other = nn.Linear(3, 3), nn.Linear(3, 3)
    other.load_state_dict(layer.state_dict())
    for one in (layer, other):
        one(torch.ones(2, 3)).sum().backward()
    norm = penstock.clip_grad_norm_(layer.parameters(), 0.5)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(other.parameters(), 0.5))
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, other.weight.grad)
    with pytest.raises(
        ConfigError, match=r"was given str; give it the optimizer, the model, or model.parameters"
    ):
        penstock.clip_grad_norm_(["weight"], 1.0)  # type: ignore[list-item]


def test_forgetting_scale_loss_is_said() -> None:
    model, opt = made("O1", "fp16")
    x, y = batch()
    backward(F.cross_entropy(model(x), y))
    with pytest.raises(ConfigError, match=r"penstock\.scale_loss"):
        opt.step()
    model, opt = made("O1", "bf16")  # no loss scale, nothing to forget
    backward(F.cross_entropy(model(x), y))
    opt.step()


def test_an_optimizer_that_was_not_accelerated_is_said() -> None:
    layer = nn.Linear(2, 2)
    plain = torch.optim.SGD(layer.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="was not accelerated"), penstock.scale_loss(torch.zeros(()), plain):
        pass
    with pytest.raises(ConfigError, match="was not accelerated"):
        penstock.clip_grad_norm_(plain, 1.0)


# -- loops of all kinds


def test_two_losses_with_scales_of_their_own() -> None:
    """As a third loss of their sum, though one of them is scaled 2^12 times as much."""
    together_model, together = made("O1", "fp16", "sgd")
    model, opt = made("O1", "fp16", "sgd", losses=2)
    for scaler, scale in zip(scalers_of(opt), (2.0**16, 2.0**4)):
        scaler.scale.fill_(scale)
    for step in range(4):
        x, y = batch(step)
        together.zero_grad()
        out = together_model(x)
        descend(F.cross_entropy(out, y) + out.square().mean(), together)
        together.step()
        opt.zero_grad()
        out = model(x)
        descend(F.cross_entropy(out, y), opt, loss_id=0, retain_graph=True)
        descend(out.square().mean(), opt, loss_id=1)
        opt.step()
    for a, b in zip(together_model.state_dict().values(), model.state_dict().values()):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3)
    assert [s.scale.item() for s in scalers_of(opt)] == [2.0**16, 2.0**4]
    with pytest.raises(ConfigError, match=r"losses=3"), penstock.scale_loss(out.mean(), opt, loss_id=2):
        pass


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_in_one_loss_moves_that_scale_alone(level: str) -> None:
    model, opt = made(level, "fp16", losses=2)
    before = copy.deepcopy(model.state_dict())
    out = model(batch()[0])
    descend(out.mean() * float("inf"), opt, loss_id=0, retain_graph=True)
    descend(out.square().mean(), opt, loss_id=1)
    opt.step()
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values()))
    assert [s.overflows.item() for s in scalers_of(opt)] == [1, 0]


@pytest.mark.parametrize(("level", "dtype"), [("O1", "bf16"), ("O2", "fp16"), ("O3", "bf16")])
def test_several_models_and_optimizers(level: str, dtype: str) -> None:
    """A generator and a discriminator by turns, each with its optimizer, and a loss through both."""
    torch.manual_seed(0)
    models: list[nn.Module] = [Net(), nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))]
    optimizers = [OPTIMIZERS["fused"](models[0].parameters()), OPTIMIZERS["sgd"](models[1].parameters())]
    (g, d), (og, od) = penstock.accelerate(
        models, optimizers, precision=level, dtype=dtype, scaler={"initial": 2.0**10}
    )
    for step in range(3):
        x, _ = batch(step)
        od.zero_grad()
        loss = F.softplus(d(g(x).detach())).mean()
        descend(loss, od)
        od.step()
        og.zero_grad()
        descend(F.softplus(-d(g(x))).mean(), og)
        og.step()
    before = [copy.deepcopy(m.state_dict()) for m in (g, d)]
    og.zero_grad()
    od.zero_grad()
    descend(d(g(batch()[0])).mean(), [og, od])  # one loss, both step
    og.step()
    od.step()
    for old, model in zip(before, (g, d)):
        assert any(not torch.equal(a, b) for a, b in zip(old.values(), model.state_dict().values()))
    if dtype == "fp16" and level != "O3":
        assert scalers_of(og)[0] is scalers_of(od)[0]


@pytest.mark.parametrize(("level", "dtype"), [("O1", "fp16"), ("O2", "bf16"), ("O3", "bf16")])
def test_closures(level: str, dtype: str) -> None:
    model, opt = made(level, dtype)
    other_model, other = made(level, dtype)
    for step in range(4):
        x, y = batch(step)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            descend(loss, opt)
            return loss.detach()

        loss = stepped(opt, closure)
        assert loss is not None
        assert [float(loss)] == train(other_model, other, 1, start=step)
    for a, b in zip(model.state_dict().values(), other_model.state_dict().values()):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize(("level", "when"), [("O1", "before"), ("O2", "after"), ("O2", "before")])
def test_schedulers_made_before_or_after(level: str, when: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = Net()
    opt = OPTIMIZERS["fused"](model.parameters())
    if when == "before":
        scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: 0.5**i)
    model, opt = penstock.accelerate(model, opt, precision=level, dtype="fp16")
    if when == "after":
        scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: 0.5**i)
    for _ in range(3):
        train(model, opt, 1)
        scheduler.step()  # warns, and warnings are errors here, if it does not see the step
    assert opt.param_groups[0]["lr"] == pytest.approx(1e-2 / 8)
    (scaler,) = scalers_of(opt)
    assert scaler.clean.item() == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inductor imports torch.jit
def test_a_compiled_model_learns_as_it_does_uncompiled() -> None:
    eager = train(*made("O1"), 4)
    torch.manual_seed(0)
    model: Any = Net()
    opt = OPTIMIZERS["fused"](model.parameters())
    model, opt = penstock.accelerate(torch.compile(model, fullgraph=True), opt, precision="O1")
    assert train(model, opt, 4) == pytest.approx(eager, rel=0.03)


# -- the model stays what it was


def test_class_name_and_signature_stay_and_optimizers_are_not_copied() -> None:
    model, opt = made("O2", "bf16")
    assert type(model).__name__ == "Net"
    assert list(inspect.signature(model.forward).parameters) == ["x"]
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(opt)


def test_a_copy_of_half_weights_holds_the_masters_and_can_be_averaged() -> None:
    """As timm's ModelEma does: a deep copy whose state dict follows the model's."""
    model, opt = made("O2", "bf16")
    average = copy.deepcopy(model)
    plain = Net()
    plain.load_state_dict(model.state_dict())
    for _ in range(3):
        train(model, opt, 1)
        with torch.no_grad():
            for follower in (average, plain):
                for name, value in model.state_dict().items():
                    follower.state_dict()[name].lerp_(value, 2.0**-10)
    torch.testing.assert_close(dict(average.state_dict()), dict(plain.state_dict()), rtol=0.0, atol=0.0)
    assert {p.dtype for p in average.parameters()} == {torch.float32}
    x, _ = batch()
    torch.testing.assert_close(average(x), plain(x), rtol=0.03, atol=0.03)

    with torch.no_grad():
        model.get_parameter("first.weight").fill_(0.5)
    assert (copy.deepcopy(model).get_parameter("first.weight") == 0.5).all(), "written just before"
    assert copy.copy(model).get_parameter("first.weight").dtype == torch.bfloat16, "it shares its weights"
    assert model.get_parameter("first.weight").dtype == torch.bfloat16


def test_tied_weights_stay_tied() -> None:
    model, opt = made("O2", "bf16")
    assert model.get_parameter("tied.weight") is model.get_parameter("back.weight")
    train(model, opt, 2)
    state = model.state_dict()
    assert torch.equal(state["tied.weight"], state["back.weight"])
    assert len(list(model.parameters())) == 7


def test_master_parameters_are_the_fp32_weights() -> None:
    model, opt = made("O2", "bf16")
    train(model, opt, 2)
    masters = master_parameters(model, opt)
    assert list(masters) == [name for name, _ in model.named_parameters()]
    for name, value in masters.items():
        assert value.dtype == torch.float32
        assert torch.equal(value.to(model.get_parameter(name).dtype), model.get_parameter(name))
    assert any(
        not torch.equal(v.detach(), model.get_parameter(n).detach().float()) for n, v in masters.items()
    )


def test_sparse_gradients_are_unscaled() -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Embedding(10, 4, sparse=True)
    model, opt = penstock.accelerate(
        model, torch.optim.SparseAdam(list(model.parameters()), lr=0.1), precision="O1", dtype="fp16"
    )
    descend(model(torch.tensor([1, 1, 3])).sum(), opt)
    unscale_(opt)
    gradient = opt.param_groups[0]["params"][0].grad
    assert gradient.is_sparse
    assert torch.equal(gradient.to_dense()[:, 0], torch.tensor([0.0, 2, 0, 1, 0, 0, 0, 0, 0, 0]))
    opt.step()


# -- errors


def test_what_cannot_be_accelerated_says_why() -> None:
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="given a SGD as model"):
        penstock.accelerate(opt, model)  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="losses is 0"):
        penstock.accelerate(model, opt, losses=0)
    with pytest.raises(ConfigError, match=r"model.float\(\)"):
        penstock.accelerate(Net().bfloat16())
    penstock.accelerate(model, opt, precision="O1")
    with pytest.raises(ConfigError, match="already accelerated"):
        penstock.accelerate(Net(), opt)
    with pytest.raises(ConfigError, match=r"already accelerated, as O1.*\.restore\(model, optimizer\)"):
        penstock.accelerate(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="O2")
    with pytest.raises(ConfigError, match="trains no weight of the model"):
        penstock.accelerate(Net(), torch.optim.SGD(Net().parameters(), lr=0.1))
    hidden = Net()
    hidden._original_forward = hidden.forward  # as Accelerate marks mixed precision
    hidden.forward = MethodType(type(hidden).forward, hidden)  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="replaced on the instance"):
        penstock.accelerate(hidden)
    hidden = Net()
    hidden.forward = functools.partial(hidden.forward)  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="replaced on the instance"):
        penstock.accelerate(hidden)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_method_bound_to_the_model_computes_in_half(level: str) -> None:
    """As TRL puts the head of its loss on a model; a second optimizer enters it once."""

    def summed(self: nn.Module, x: Tensor, *, total: bool = False) -> Tensor:
        out = before(x)
        return out.sum() if total else out

    model = Net()
    before = model.forward
    model.forward = MethodType(summed, model)  # type: ignore[method-assign]
    halves = [p.clone() for p in model.parameters()]
    sgd: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = penstock.accelerate(model, sgd, precision=level, dtype="bf16")  # type: ignore[arg-type]
    with ProductDtypes() as products:
        loss = model(torch.ones(2, 8), total=True)
        with penstock.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
    assert set(products.counts) == {torch.bfloat16}
    assert loss.dtype == torch.float32
    optimizer.step()
    copied = copy.deepcopy(model)
    assert copied.forward.__self__ is copied  # type: ignore[attr-defined]
    assert any(not torch.equal(a, b.float()) for a, b in zip(halves, model.parameters()))


def test_optimizers_of_two_calls_do_not_mix() -> None:
    _, one = made("O1", "fp16")
    _, two = made("O1", "fp16")
    with pytest.raises(ConfigError, match="in one call"), penstock.scale_loss(torch.zeros(()), [one, two]):
        pass
    assert gradients_beside(one).session is not gradients_beside(two).session


@pytest.mark.parametrize(
    ("first", "second", "form"),
    [("O1", "O2", "fused"), ("O2", "O0", "contiguous"), ("O2", "O1", "fused"), ("O3", "O3", "contiguous")],
)
def test_a_second_phase_with_a_new_optimizer(first: str, second: str, form: str) -> None:
    model, opt = made(first, "bf16", form)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1)
    train(model, opt, 3)
    exact = {name: value.clone() for name, value in model.state_dict().items()}
    restore(model, opt)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(torch.equal(value, exact[name]) for name, value in model.state_dict().items())
    assert model.get_parameter("tied.weight") is model.get_parameter("back.weight")
    assert type(model) is Net
    assert not any(key.startswith("_penstock") for module in model.modules() for key in vars(module))
    plain = torch.optim.AdamW(Net().parameters())
    assert "penstock" not in opt.state_dict()
    if form == "fused":
        plain.load_state_dict(opt.state_dict())
    opt.step()
    scheduler.step()
    new = OPTIMIZERS["sgd"](model.parameters())
    dtype = "auto" if second == "O0" else "bf16"
    again, new = penstock.accelerate(model, new, precision=second, dtype=dtype)
    losses = train(again, new, 6)
    assert losses[-1] < losses[0]


class Wrapper:
    """As LARC of Apex: has an optimizer inside and is none."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optim = optimizer
        self.param_groups = optimizer.param_groups

    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad *= min(
                    1.0, 0.2 * float(parameter.detach().norm() / (parameter.grad.norm() + 1e-8))
                )
        self.optim.step()


def test_a_wrapper_around_an_optimizer_says_what_to_do_and_that_works() -> None:
    def run(level: str, dtype: str) -> list[float]:
        torch.manual_seed(0)
        model: nn.Module = Net()
        opt: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if level == "O1":
            with pytest.raises(ConfigError, match="Accelerate the optimizer inside"):
                penstock.accelerate(model, Wrapper(opt), precision=level)  # type: ignore[call-overload]
        model, opt = penstock.accelerate(model, opt, precision=level, dtype=dtype)
        wrapper = Wrapper(opt)
        losses = []
        for step in range(4):
            opt.zero_grad()
            loss = loss_of(model, step)
            descend(loss, opt)
            unscale_(opt)
            wrapper.step()
            losses.append(loss.item())
        return losses

    expected = run("O0", "auto")
    assert run("O1", "fp16") == pytest.approx(expected, rel=0.01)
    assert run("O2", "fp16") == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("level", "optimizer"), [("O1", "fused"), ("O2", "foreach"), ("O2", "contiguous")])
def test_clipping_gradients_that_are_still_scaled_warns_once(
    level: str, optimizer: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, opt = made(level, "fp16", optimizer)
    train(model, opt, 2, clip=0.1)
    for step in range(2):
        opt.zero_grad()
        x, y = batch(step)
        for part in (0, 1):
            descend(F.cross_entropy(model(x[part::2]), y[part::2]) / 2, opt)
        opt.step()
    assert "were changed between" not in caplog.text
    for step in range(2):
        opt.zero_grad()
        descend(loss_of(model, step), opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
    assert caplog.text.count("were changed between") == 1


@pytest.mark.parametrize(
    ("cls", "level", "dtype"),
    [(nn.LSTM, "O1", "fp16"), (nn.LSTM, "O2", "bf16"), (nn.LSTM, "O3", "bf16"), (nn.GRU, "O2", "bf16")],
)
def test_a_bare_recurrent_layer(cls: type[nn.Module], level: str, dtype: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = cls(4, 4, batch_first=True)
    model, opt = penstock.accelerate(
        model, torch.optim.SGD(model.parameters(), lr=1.0), precision=level, dtype=dtype
    )
    x = torch.randn(2, 3, 4)
    before = model(x)[0]
    assert before.dtype == torch.float32
    descend(before.square().mean(), opt)
    opt.step()
    assert (model(x)[0] - before).abs().max() > 1e-3
    assert torch.equal(copy.deepcopy(model)(x)[0], model(x)[0])
    assert type(pickle.loads(pickle.dumps(model))) is cls
    restore(model, opt)
    assert type(model) is cls


@pytest.mark.parametrize(
    ("level", "dtype", "average"),
    [("O1", "fp16", "default"), ("O2", "bf16", "multi"), ("O2", "fp16", "lerp")],
)
def test_averages_of_parameters_follow_the_plain_model(level: str, dtype: str, average: str) -> None:
    model, opt = made(level, dtype)
    exact = plain(model)  # shares the master weights
    follower: Any = None
    if average == "lerp":
        follower = copy.deepcopy(exact)
    else:
        fn = torch.optim.swa_utils.get_ema_multi_avg_fn(0.75) if average == "multi" else None
        follower = torch.optim.swa_utils.AveragedModel(exact, multi_avg_fn=fn)
    for step in range(3):
        train(model, opt, 1, start=step)
        if average == "lerp":
            with torch.no_grad():
                for mine, theirs in zip(follower.parameters(), exact.parameters()):
                    mine.lerp_(theirs, 0.25)
        else:
            follower.update_parameters(exact)
    for name, value in exact.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    x, _ = batch()
    assert follower(x).dtype == torch.float32


def test_one_loss_of_two_optimizers_with_an_overflow_in_one() -> None:
    """As in torch, and other than in Apex: the other one steps. The page on mixed precision says so."""
    torch.manual_seed(0)
    first: nn.Module = nn.Linear(4, 4)
    second: nn.Module = nn.Linear(4, 4)
    opts: list[torch.optim.Optimizer] = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
    (first, second), opts = penstock.accelerate([first, second], opts, precision="O1", dtype="fp16")
    before = [m.get_parameter("weight").detach().clone() for m in (first, second)]
    x = torch.randn(2, 4)
    loss = first(x).mean() * 1e38 + second(x).mean()
    descend(loss, opts)
    for opt in opts:
        opt.step()
    assert torch.equal(first.get_parameter("weight"), before[0])
    assert not torch.equal(second.get_parameter("weight"), before[1])
    assert scalers_of(opts[0])[0].scale.item() == 2.0**15
