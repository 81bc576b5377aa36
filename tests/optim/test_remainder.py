"""RemainderAdamW takes exactly torch's steps on weights that nobody stores in fp32."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.errors import CheckpointError, ConfigError
from penstock.optim import EMA, RemainderAdamW, clipped_step, contiguous, grad_norm
from penstock.optim.remainder import from_adamw, join, split
from penstock.precision import LossScaler
from penstock.shards import whole_of

SHAPES: list[tuple[int, ...]] = [(65, 33), (33,), (1,), (), (7, 3, 2, 2), (300, 1001)]


def fp32_parameters(seed: int = 0) -> list[Parameter]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator) for shape in SHAPES]
    made[4] = made[4].to(memory_format=torch.channels_last)
    return [Parameter(value) for value in made]


def twins(values: list[Parameter]) -> list[Parameter]:
    return [Parameter(value.detach().clone()) for value in values]


def groups(parameters: list[Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": parameters[:2], "weight_decay": 0.1},
        {"params": parameters[2:], "weight_decay": 0.0, "lr": 3e-3, "betas": (0.8, 0.95)},
    ]


def gradients(step: int, dtype: torch.dtype) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    for shape in SHAPES:
        yield (torch.randn(shape, generator=generator) * 10.0 ** (step % 5 - 4)).to(dtype)


def give(parameter: Parameter, gradient: Tensor) -> None:
    """A gradient of any type, in the order of memory that it comes in."""
    parameter.grad = None
    parameter.grad_dtype = gradient.dtype
    parameter.grad = gradient


def give_gradients(
    halves: list[Parameter], wholes: list[Parameter], step: int, dtype: torch.dtype, factor: float = 1.0
) -> None:
    """The same gradients to both, of `dtype` to the bf16 weights and cast up to the fp32 ones.

    The latter in the weight's own strides, as autograd leaves them: torch's fused kernel takes others for these.
    """
    for half, whole, gradient in zip(halves, wholes, gradients(step, dtype)):
        give(half, gradient * factor)
        give(whole, torch.empty_like(whole).copy_(gradient))


def assert_same(optimizer: RemainderAdamW, halves: list[Parameter], reference: torch.optim.Optimizer) -> None:
    """Weights, moments and counters equal bit by bit; what the model sees is the weight rounded to nearest."""
    wholes = [p for group in reference.param_groups for p in group["params"]]
    for half, whole in zip(halves, wholes, strict=True):
        exact = optimizer.fp32_weight(half)
        assert exact.dtype == torch.float32
        assert torch.equal(exact, whole.detach())
        assert half.dtype == torch.bfloat16
        assert torch.equal(half.detach(), split(whole.detach())[0])
        for name in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(optimizer.state[half][name], reference.state[whole][name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equals_adamw_on_fp32_weights_bit_by_bit(dtype: torch.dtype) -> None:
    """120 steps, two groups, decay, a schedule, gradients over five orders of magnitude."""
    halves = fp32_parameters()
    wholes = twins(halves)
    reference = torch.optim.AdamW(groups(wholes), lr=1e-2, fused=True)
    optimizer = from_adamw(torch.optim.AdamW(groups(halves), lr=1e-2), form="fused")
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=100) for o in (optimizer, reference)]
    start = [whole.detach().clone() for whole in wholes]
    for step in range(120):
        give_gradients(halves, wholes, step, dtype)
        optimizer.step()
        reference.step()
        for schedule in schedules:
            schedule.step()
    assert_same(optimizer, halves, reference)
    assert all((whole != before).any() for whole, before in zip(wholes, start))
    assert (wholes[0] - start[0]).abs().max() > 0.05
    assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"] != 1e-2


def test_maximize_and_late_and_missing_gradients() -> None:
    halves = fp32_parameters()
    wholes = twins(halves)
    reference = torch.optim.AdamW(wholes, maximize=True, fused=True)
    optimizer = from_adamw(torch.optim.AdamW(halves, maximize=True), form="fused")
    for step in range(6):
        give_gradients(halves, wholes, step, torch.bfloat16)
        if step % 2:
            halves[1].grad = wholes[1].grad = None
        optimizer.step()
        reference.step()
    assert_same(optimizer, halves, reference)
    assert optimizer.state[halves[1]]["step"].item() == 3


def test_without_the_remainder_small_updates_are_lost() -> None:
    """What the sixteen bits are for: a thousand steps of a thousandth each."""
    for stay, expected in ((True, 1.0), (False, 2.0)):
        weight = Parameter(torch.ones(64, dtype=torch.bfloat16))
        optimizer: torch.optim.Optimizer
        if stay:
            optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.0)
        else:
            optimizer = RemainderAdamW([weight], lr=1e-3, weight_decay=0.0)
        for _ in range(1000):
            weight.grad = -torch.ones_like(weight)
            optimizer.step()
        torch.testing.assert_close(weight.detach().float(), torch.full((64,), expected))


def test_norms_may_stay_fp32_and_every_layout_is_taken() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 2), nn.LayerNorm([8, 3, 3]), nn.Flatten(), nn.Linear(72, 4))
    model = model.to(memory_format=torch.channels_last)
    twin = copy.deepcopy(model)
    norms = list(model[1].parameters())
    old = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = from_adamw(old, keep_fp32=norms, form="fused")
    reference = torch.optim.AdamW(twin.parameters(), lr=0.01, fused=True)
    assert [p.dtype for p in model.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 2 + [
        torch.bfloat16
    ] * 2
    for step in range(5):
        for mine, theirs in zip(model.parameters(), twin.parameters()):
            generator = torch.Generator().manual_seed(step)
            # Contiguous whatever the weight's strides are, as some backward kernels leave them.
            gradient = torch.randn(mine.shape, generator=generator).to(mine.dtype)
            mine.grad, theirs.grad = (
                gradient,
                gradient.float().contiguous(memory_format=torch.preserve_format),
            )
            theirs.grad = torch.empty_like(theirs).copy_(gradient)
        optimizer.step()
        reference.step()
    for (mine, exact), theirs in zip(optimizer.fp32_weights(), twin.parameters()):
        assert torch.equal(exact, theirs.detach())
        assert ("remainder" in optimizer.state[mine]) == (mine.dtype == torch.bfloat16)


# -- loss scaling and clipping


class _Synchronisations(TorchDispatchMode):
    """Counts reads of a tensor's value by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += "_local_scalar_dense" in str(func) or "is_nonzero" in str(func)
        return func(*args, **(kwargs or {}))


def test_overflows_skip_the_whole_step_without_waiting_for_the_device() -> None:
    halves = fp32_parameters()
    wholes = twins(halves)
    optimizer = from_adamw(torch.optim.AdamW(groups(halves), lr=1e-2), form="fused")
    reference = torch.optim.AdamW(groups(wholes), lr=1e-2, fused=True)
    scaler = LossScaler(initial=2.0**12, interval=100)
    watch = _Synchronisations()
    for step in range(9):
        give_gradients(halves, wholes, step, torch.float32, factor=scaler.scale.item())
        overflow = step in (0, 4, 5)
        if overflow:
            assert halves[5].grad is not None
            halves[5].grad[17, 400] = float("inf")
        before = copy.deepcopy(optimizer.state_dict()), [half.detach().clone() for half in halves]
        given = [half.grad.clone() for half in halves if half.grad is not None]
        with watch:
            norm = clipped_step(optimizer, scaler=scaler)
        assert norm is not None
        assert norm.isfinite().item() is not overflow
        assert all(
            torch.equal(half.grad, gradient) for half, gradient in zip(halves, given) if half.grad is not None
        )
        if overflow:
            assert_states_equal(before[0], optimizer.state_dict())
            assert all(map(torch.equal, before[1], halves))
        else:
            reference.step()
    assert watch.count == 0
    assert scaler.scale.item() == 2.0**9
    assert_same(optimizer, halves, reference)
    assert {state["step"].item() for state in optimizer.state.values()} == {6.0}
    assert not hasattr(optimizer, "grad_scale")


def test_clipping_folds_into_the_step() -> None:
    halves = fp32_parameters()
    wholes = twins(halves)
    optimizer = from_adamw(torch.optim.AdamW(halves, lr=1e-2), form="fused")
    reference = torch.optim.AdamW(wholes, lr=1e-2, fused=True)
    for step in range(8):
        give_gradients(halves, wholes, step, torch.bfloat16)
        norm = clipped_step(optimizer, max_norm=0.5)
        expected = grad_norm([half.grad for half in halves if half.grad is not None])
        torch.testing.assert_close(norm, expected)
        # The same divisor, given to torch's kernel over fp32 weights.
        reference.grad_scale = ((expected + 1e-6) / 0.5).clamp(min=1.0)  # type: ignore[attr-defined]
        reference.step()
        del reference.grad_scale  # type: ignore[attr-defined]
    assert_same(optimizer, halves, reference)


@pytest.mark.parametrize("unscale", [False, True])
def test_works_under_torchs_grad_scaler(unscale: bool) -> None:
    halves = fp32_parameters()
    wholes = twins(halves)
    optimizer = from_adamw(torch.optim.AdamW(halves, lr=1e-2), form="fused")
    reference = torch.optim.AdamW(wholes, lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for step in range(4):
        give_gradients(halves, wholes, step, torch.bfloat16, factor=2.0**8)
        scaler.scale(torch.zeros(()))
        if step == 2 and halves[1].grad is not None:
            halves[1].grad[3] = float("nan")
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        if step != 2:
            reference.step()
        scaler.update(2.0**8)
    assert_same(optimizer, halves, reference)


def test_closures_and_hooks() -> None:
    weight = Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = RemainderAdamW([weight], lr=0.5)
    called: list[str] = []
    optimizer.register_step_post_hook(lambda *_: called.append("after"))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = weight.float().square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert called == ["after"]
    assert (weight < 1.0).all()


# -- state


def assert_states_equal(mine: Any, theirs: Any) -> None:
    assert mine["state"].keys() == theirs["state"].keys()
    for index, state in mine["state"].items():
        assert state.keys() == theirs["state"][index].keys()
        for name, value in state.items():
            other = theirs["state"][index][name]
            assert value.dtype == other.dtype
            assert torch.equal(value, other), name
    assert mine["param_groups"] == theirs["param_groups"]


def trained(steps: int = 3, form: Any = "auto") -> tuple[list[Parameter], RemainderAdamW]:
    halves = fp32_parameters()
    optimizer = from_adamw(torch.optim.AdamW(groups(halves), lr=1e-2), form=form)
    for step in range(steps):
        give_gradients(halves, fp32_parameters(), step, torch.bfloat16)
        optimizer.step()
    return halves, optimizer


def test_state_round_trips_bit_by_bit_through_a_file() -> None:
    halves, optimizer = trained()
    file = io.BytesIO()
    torch.save({"weights": [half.detach() for half in halves], "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    stored = torch.load(file, weights_only=True)
    fresh = [Parameter(weight) for weight in stored["weights"]]
    resumed = RemainderAdamW(groups(fresh))
    resumed.load_state_dict(stored["optimizer"])
    assert_states_equal(resumed.state_dict(), optimizer.state_dict())
    for (_, mine), (_, theirs) in zip(resumed.fp32_weights(), optimizer.fp32_weights()):
        assert torch.equal(mine, theirs)
    # Going on gives what going on without interruption gives.
    for step in range(3, 6):
        for parameters, each in ((halves, optimizer), (fresh, resumed)):
            give_gradients(parameters, fp32_parameters(), step, torch.bfloat16)
            each.step()
    for (_, mine), (_, theirs) in zip(resumed.fp32_weights(), optimizer.fp32_weights()):
        assert torch.equal(mine, theirs)


def test_loading_makes_copies_and_runs_hooks() -> None:
    halves, optimizer = trained()
    packed = optimizer.state_dict()
    seen: list[str] = []

    def before(_: Any, given: dict[str, Any]) -> dict[str, Any]:
        seen.append(str(given["state"][0]["remainder"].dtype))
        return given

    fresh = RemainderAdamW(groups([Parameter(half.detach().clone()) for half in halves]))
    fresh.register_load_state_dict_pre_hook(before)
    fresh.register_load_state_dict_post_hook(lambda each: seen.append(str(len(each.state))))
    fresh.load_state_dict(packed)
    assert seen == ["torch.int16", str(len(SHAPES))]
    assert len(fresh._optimizer_load_state_dict_pre_hooks) == 1
    packed["state"][0]["exp_avg"].add_(1.0)
    assert not torch.equal(fresh.state_dict()["state"][0]["exp_avg"], packed["state"][0]["exp_avg"])


def test_goes_over_from_torch_and_back_mid_run() -> None:
    """Three steps of torch, three of ours, three of torch: the same as nine of torch."""
    wholes = fp32_parameters()
    reference = torch.optim.AdamW(groups(wholes), lr=1e-2, fused=True)
    first = twins(wholes)
    plain = torch.optim.AdamW(groups(first), lr=1e-2, fused=True)
    # The model is bf16 by then, and the fp32 values come from elsewhere, a checkpoint say.
    halves = [Parameter(torch.zeros_like(whole, dtype=torch.bfloat16)) for whole in wholes]
    ours = RemainderAdamW(groups(halves), form="fused")
    last = twins(wholes)
    back = torch.optim.AdamW(groups(last), lr=1e-2, fused=True)

    def run(parameters: list[Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            for parameter, gradient in zip(parameters, gradients(step, torch.bfloat16)):
                give(parameter, torch.empty_like(parameter).copy_(gradient))
            optimizer.step()

    run(wholes, reference, range(9))
    run(first, plain, range(3))
    for half, value in zip(halves[:3], first[:3]):
        ours.set_fp32_weight(half, value.detach())
    ours.load_state_dict(plain.state_dict())  # keeps the remainders that are there already
    for half, value in zip(halves[3:], first[3:]):
        ours.set_fp32_weight(half, value.detach())
    run(halves, ours, range(3, 6))
    packed = ours.adamw_state_dict()
    assert all(set(state) == {"step", "exp_avg", "exp_avg_sq"} for state in packed["state"].values())
    back.load_state_dict(packed)
    for group in back.param_groups:
        group.update(fused=True)
    with torch.no_grad():
        for value, (_, exact) in zip(last, ours.fp32_weights()):
            value.copy_(exact)
    run(last, back, range(6, 9))
    for mine, theirs in zip(last, wholes):
        assert torch.equal(mine, theirs)
        assert torch.equal(back.state[mine]["exp_avg_sq"], reference.state[theirs]["exp_avg_sq"])


def test_deep_copies_step_alike() -> None:
    halves, optimizer = trained(form="fused")
    again, twin = copy.deepcopy((halves, optimizer))
    assert twin.form == "fused"
    for parameters, each in ((halves, optimizer), (again, twin)):
        give_gradients(parameters, fp32_parameters(), 7, torch.bfloat16)
        each.step()
    assert_states_equal(optimizer.state_dict(), twin.state_dict())
    assert all(map(torch.equal, halves, again))


# -- from_adamw


def test_conversion_is_in_place_and_mid_run() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))
    twin = copy.deepcopy(model)
    old = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.StepLR(old, step_size=2, gamma=0.5)
    reference = torch.optim.AdamW(twin.parameters(), lr=0.01, fused=True)
    their_schedule = torch.optim.lr_scheduler.StepLR(reference, step_size=2, gamma=0.5)
    optimizer: torch.optim.Optimizer = old
    parameters = list(model.parameters())
    for step in range(8):
        if step == 3:
            moment = old.state[parameters[0]]["exp_avg"]
            optimizer = from_adamw(old, form="fused")
            assert optimizer is old
            assert optimizer.state[parameters[0]]["exp_avg"] is moment
        for mine, theirs in zip(parameters, twin.parameters()):
            gradient = torch.randn(mine.shape, generator=torch.Generator().manual_seed(step)).bfloat16()
            mine.grad, theirs.grad = gradient.to(mine.dtype), gradient.float()
        optimizer.step()
        reference.step()
        schedule.step()  # made for AdamW, it still sets the rates
        their_schedule.step()
    assert isinstance(optimizer, RemainderAdamW)
    assert list(map(id, model.parameters())) == list(map(id, parameters))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    for (_, exact), theirs in zip(optimizer.fp32_weights(), twin.parameters()):
        assert torch.equal(exact, theirs.detach())


def test_conversion_loses_no_bit_and_rounds_gradients() -> None:
    values = fp32_parameters()
    before = [value.detach().clone() for value in values]
    values[0].grad = torch.full_like(values[0], 1.0 + 2.0**-10)
    optimizer = from_adamw(torch.optim.AdamW(values))
    for (value, exact), expected in zip(optimizer.fp32_weights(), before):
        assert torch.equal(exact, expected)
        assert exact.stride() == expected.stride() == value.stride()
    assert values[0].grad.dtype == torch.bfloat16
    assert (values[0].grad == 1.0).all()


def test_what_cannot_be_converted_is_refused_and_nothing_changes() -> None:
    weight = Parameter(torch.ones(4))

    def refused(make: Any, message: str) -> None:
        optimizer = make([weight])
        with pytest.raises(ConfigError, match=message):
            from_adamw(optimizer)
        assert weight.dtype == torch.float32
        weight.grad = torch.ones(4)
        optimizer.step()
        weight.grad = None

    refused(lambda p: torch.optim.SGD(p, lr=0.1), "part of AdamW, but the optimizer is SGD")
    refused(torch.optim.Adam, "the optimizer is Adam; use torch.optim.AdamW")
    refused(lambda p: torch.optim.AdamW(p, amsgrad=True), "has no amsgrad")
    refused(lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3)), "takes lr as a number")
    refused(
        lambda p: torch.optim.AdamW([*p, Parameter(torch.ones(2).bfloat16())]), "exact fp32 weight is needed"
    )
    refused(lambda p: torch.optim.AdamW([*p, Parameter(torch.ones(4, 4)[:, :2])]), "has gaps or overlaps")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"amsgrad": True}, "has no amsgrad"),
        ({"lr": torch.tensor(0.1)}, "takes lr as a number"),
        ({"lr": -1.0}, "lr is -1.0, but must be at least 0"),
        ({"betas": (0.9, 1.0)}, "at least 0 and below 1"),
        ({"eps": float("nan")}, "eps is nan"),
        ({"form": "quick"}, "no form 'quick'"),
        ({"form": "triton"}, "needs Triton and a CUDA device"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RemainderAdamW([Parameter(torch.ones(2, dtype=torch.bfloat16))], **options)


def test_fp16_weights_and_sparse_gradients_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"float16; RemainderAdamW updates bf16 .* fewer exponents"):
        RemainderAdamW([Parameter(torch.ones(2, dtype=torch.float16))])
    table = nn.Embedding(5, 3, sparse=True).bfloat16()
    optimizer = RemainderAdamW(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="dense gradients"):
        optimizer.step()


def test_flat_buffers_are_refused() -> None:
    weight = Parameter(torch.ones(2, dtype=torch.bfloat16))
    with pytest.raises(ConfigError, match=r"would round its fp32 moments; use it without contiguous"):
        contiguous(RemainderAdamW, [weight], elementwise=True)


def test_a_refused_group_is_not_added() -> None:
    optimizer = RemainderAdamW([Parameter(torch.ones(2, dtype=torch.bfloat16))])
    with pytest.raises(ConfigError, match="float64"):
        optimizer.add_param_group({"params": [Parameter(torch.ones(2).double())]})
    assert len(optimizer.param_groups) == 1


def test_states_of_other_optimizers_are_refused() -> None:
    halves, optimizer = trained()
    packed = optimizer.state_dict()

    def refused(error: type[Exception], message: str, given: dict[str, Any]) -> None:
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(error, match=message):
            optimizer.load_state_dict(given)
        assert_states_equal(before, optimizer.state_dict())

    def changed(**entries: Any) -> dict[str, Any]:
        state = {
            name: value for name, value in {**packed["state"][0], **entries}.items() if value is not None
        }
        return {**packed, "state": {**packed["state"], 0: state}}

    refused(CheckpointError, "knows remainder besides", changed(momentum_buffer=torch.zeros(65, 33)))
    refused(CheckpointError, "needs step, exp_avg and exp_avg_sq", changed(exp_avg=None))
    refused(CheckpointError, "exp_avg of a weight of shape .65, 33. is .2,.", changed(exp_avg=torch.zeros(2)))
    cast = packed["state"][0]["remainder"].float()
    refused(CheckpointError, "float32 in place of int16", changed(remainder=cast))
    other = [{**group, "decoupled_weight_decay": False} for group in packed["param_groups"]]
    refused(CheckpointError, "stored optimizer is Adam", {**packed, "param_groups": other})
    other = [{**group, "amsgrad": True} for group in packed["param_groups"]]
    refused(ConfigError, "has no amsgrad", {**packed, "param_groups": other})
    wide = RemainderAdamW(groups(fp32_parameters()))
    with pytest.raises(CheckpointError, match="belongs to a bf16 weight"):
        wide.load_state_dict(packed)
    assert len(halves) == len(packed["state"])


# -- exact weights


def test_exact_weights_are_set_and_read() -> None:
    halves = [Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in SHAPES]
    optimizer = RemainderAdamW(halves)
    values = fp32_parameters(3)
    for half, value in zip(halves, values):
        assert optimizer.fp32_weight(half).eq(0.0).all()
        optimizer.set_fp32_weight(half, value.detach())
    for (half, exact), value in zip(optimizer.fp32_weights(), values):
        assert torch.equal(exact, value)
        pieces = list(optimizer.fp32_chunks(half, 1000))
        assert max(piece.numel() for piece in pieces) <= 1000
        assert torch.equal(torch.cat(pieces), exact.flatten())
    optimizer.set_fp32_weight(halves[1], torch.full((33,), 0.5, dtype=torch.bfloat16))
    assert optimizer.fp32_weight(halves[1]).eq(0.5).all()
    for value, message in ((torch.zeros(2), "shape"), (torch.zeros(33, dtype=torch.float64), "float64")):
        with pytest.raises(ConfigError, match=message):
            optimizer.set_fp32_weight(halves[1], value)
    stranger = Parameter(torch.zeros(2, dtype=torch.bfloat16))
    for call in (optimizer.fp32_weight, lambda p: optimizer.set_fp32_weight(p, torch.zeros(2))):
        with pytest.raises(ConfigError, match="not in this optimizer's groups"):
            call(stranger)
    assert not optimizer.completes(stranger)
    assert optimizer.completes(halves[0])


def test_averages_are_of_the_exact_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.optim.ema._CHUNK", 1000)  # so that a weight takes many pieces
    model = nn.Sequential(nn.Linear(30, 70), nn.LayerNorm(70))
    twin = copy.deepcopy(model)
    optimizer = from_adamw(
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        keep_fp32=list(model[1].parameters()),
        form="fused",  # the same bits as torch's
    )
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True)
    averages, expected = EMA(model, 0.9, optimizer), EMA(twin, 0.9)
    for step in range(6):
        for mine, theirs in zip(model.parameters(), twin.parameters()):
            gradient = torch.randn(mine.shape, generator=torch.Generator().manual_seed(step)).bfloat16()
            mine.grad, theirs.grad = gradient.to(mine.dtype), gradient.float()
        optimizer.step()
        reference.step()
        averages.update()
        expected.update()
    for name, value in expected.state_dict().items():
        assert torch.equal(averages.state_dict()[name], value)
    before = [exact for _, exact in optimizer.fp32_weights()]
    with averages.swapped():
        assert torch.equal(model[0].weight, expected.state_dict()["0.weight"].bfloat16())
    assert all(map(torch.equal, before, (exact for _, exact in optimizer.fp32_weights())))


# -- memory


def test_bytes_per_parameter() -> None:
    """bf16 weight 2, remainder 2, moments 4 + 4: 12 where a bf16 weight with an fp32 copy takes 14."""
    _, optimizer = trained()
    count = sum(half.numel() for half, _ in optimizer.fp32_weights())
    held = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for parameter, state in optimizer.state.items()
        for name, tensor in [("weight", parameter), *state.items()]
        if name != "step"
    }
    assert sum(held.values()) == 12 * count


# -- shards


@pytest.fixture
def mesh(tmp_path: Any) -> Iterator[Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_sharded_parameters_are_updated_shard_by_shard(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    values = [torch.randn(6, 4), torch.randn(5)]
    wholes = [Parameter(value.clone()) for value in values]
    reference = torch.optim.AdamW(wholes, lr=0.1, fused=True)
    shards = [Parameter(distribute_tensor(value, mesh, [Shard(0)])) for value in values]
    with pytest.raises(ConfigError, match="set_fp32_weight"):
        from_adamw(torch.optim.AdamW(shards, lr=0.1))
    shards = [Parameter(shard.detach().bfloat16()) for shard in shards]
    optimizer = RemainderAdamW(shards, lr=0.1, form="fused")
    for shard, whole in zip(shards, wholes):
        optimizer.set_fp32_weight(shard, whole.detach())
    for step in range(4):
        for shard, whole in zip(shards, wholes):
            gradient = torch.randn(whole.shape, generator=torch.Generator().manual_seed(step)).bfloat16()
            shard.grad = distribute_tensor(gradient, mesh, [Shard(0)])
            whole.grad = gradient.float()
        optimizer.step()
        reference.step()
    for (shard, exact), whole in zip(optimizer.fp32_weights(), wholes):
        assert isinstance(exact, DTensor)
        assert exact.placements == shard.placements
        assert torch.equal(whole_of(exact), whole.detach())
        for name in ("remainder", "exp_avg"):
            assert isinstance(optimizer.state[shard][name], DTensor)
    again = RemainderAdamW([Parameter(shard.detach().clone()) for shard in shards])
    again.load_state_dict(optimizer.state_dict())
    for (mine, exact), whole in zip(again.fp32_weights(), wholes):
        assert torch.equal(whole_of(exact), whole.detach())
        again.set_fp32_weight(mine, torch.full(tuple(whole.shape), 0.1))
        assert torch.equal(join(*split(torch.tensor(0.1))), whole_of(again.fp32_weight(mine)).flatten()[0])


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["fused", "triton"])
def test_on_a_gpu_steps_are_torchs_and_nothing_waits(form: Any) -> None:
    halves = [Parameter(value.detach().cuda()) for value in fp32_parameters()]
    wholes = twins(halves)
    optimizer = from_adamw(torch.optim.AdamW(groups(halves), lr=1e-2), form=form)
    reference = torch.optim.AdamW(groups(wholes), lr=1e-2, fused=True)
    for step in range(50):
        for half, whole, gradient in zip(halves, wholes, gradients(step, torch.bfloat16)):
            # torch's kernel demands that a gradient lies in memory as its weight does.
            half.grad, whole.grad = gradient.cuda(), torch.empty_like(whole).copy_(gradient)
        optimizer.found_inf = torch.full((), float(step == 7), device="cuda")  # type: ignore[attr-defined]
        reference.found_inf = optimizer.found_inf  # type: ignore[attr-defined]
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        reference.step()
    if form == "fused":
        assert_same(optimizer, halves, reference)
    for half, whole in zip(halves, wholes):
        torch.testing.assert_close(optimizer.fp32_weight(half), whole.detach())
        assert optimizer.state[half]["step"].item() == 49
