"""Gradients by power of two, and the constant loss scale that follows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import ConfigError, NumericError
from penstock.precision import gradient_histogram, recommend
from penstock.precision.histogram import LOW, Histogram, Meter

INF, NAN = math.inf, math.nan
PLANTED = [
    0.0, -0.0, 2.0**-149, -(2.0**-130), 2.0**-126, 2.0**-41, 2.0**-40, -1.5 * 2.0**-40, 2.0**-25, 2.0**-24,
    2.0**-15, 2.0**-14, 0.75, 1.0, -1.999, 2.0, 65504.0, 65536.0, 2.0**127, INF, -INF, NAN,
]  # fmt: skip


def cross(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def histogram(values: Any) -> Histogram:
    meter = Meter()
    meter.add(torch.as_tensor(values))
    return meter.read()


def expected(values: list[float]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for value in values:
        if value and math.isfinite(value):
            exponent = math.floor(math.log2(abs(value)))
            counts[exponent] = counts.get(exponent, 0) + 1
    return counts


def of(found: Histogram) -> dict[int, int]:
    return {LOW + place: count for place, count in enumerate(found.counts) if count}


def test_each_value_falls_into_its_bin() -> None:
    found = histogram(PLANTED)
    assert of(found) == expected(PLANTED)
    assert (found.zeros, found.wrong, found.values) == (2, 3, len(PLANTED))
    assert found.largest == 2.0**127


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_are_binned_by_value(dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, 2.0**-24, -(2.0**-14), 1.5, 1024.0, INF], dtype=dtype)
    found = histogram(values)
    assert of(found) == {-24: 1, -14: 1, 0: 1, 10: 1}
    assert (found.zeros, found.wrong, found.largest) == (1, 1, 1024.0)


def test_tensors_add_up_whatever_their_size_and_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.precision.histogram._AT_ONCE_ON_HOST", 7)
    meter = Meter()
    values = torch.randn(5, 4, 3)
    meter.add(values.transpose(0, 2))
    meter.add(torch.zeros(0))
    meter.add(torch.sparse_coo_tensor([[1, 1]], [2.0, 2.0], (4,), check_invariants=True))
    found = meter.read()
    assert of(found) == expected([*values.flatten().tolist(), 4.0])
    assert found.largest == max(values.abs().max().item(), 4.0)
    half = histogram(values[:2])
    assert half + histogram(values[2:]) == histogram(values)


def test_what_devices_without_bincount_do_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    here = histogram(PLANTED)
    monkeypatch.setattr("penstock.precision.histogram._on_host", lambda tensor: False)
    assert histogram(PLANTED) == here


@pytest.mark.gpu
def test_a_gpu_bins_alike_and_without_waiting() -> None:
    values = torch.cat([torch.randn(100_000) * 2.0**-20, torch.tensor(PLANTED)])
    there = values.cuda()
    meter = Meter()
    meter.add(there)
    torch.cuda.set_sync_debug_mode("error")
    try:
        meter.add(there)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert meter.read() == histogram(values) + histogram(values)


def test_shares_say_what_fp16_makes_of_the_values() -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(20_000, generator=generator) * torch.exp2(
        torch.randint(-40, 22, (20_000,), generator=generator).float()
    )
    found = histogram(values)
    for scale in (2.0**-4, 1.0, 2.0**10, 2.0**20):
        halves = (values * scale).half()
        assert found.lost(scale) == (halves == 0).double().mean().item()
        normal = (halves.abs() >= 2.0**-14) & halves.isfinite()
        assert found.denormal(scale) == pytest.approx(
            ((halves != 0) & ~normal & halves.isfinite()).float().mean().item(), abs=1e-4
        )
        assert found.infinite(scale) == pytest.approx((~halves.isfinite()).float().mean().item(), abs=1e-3)


def test_the_recommended_scale() -> None:
    values = torch.tensor([0.0, 2.0**-30, 2.0**-26, 2.0**-20, 2.0**-8])
    found = recommend(histogram(values))
    # 65,504 / (2^-8 · 2) lies just below 2^23.
    assert (found.scale, found.largest, found.headroom) == (2.0**22, 2.0**-8, 2.0)
    assert (found.lost_before, found.lost, found.saved) == (0.4, 0.0, 0.4)
    assert (found.denormal_before, found.denormal) == (0.2, 0.0)
    assert recommend(histogram(values), headroom=1.0).scale == 2.0**23
    assert recommend(histogram(values), headroom=100.0).scale == 2.0**17
    assert recommend(histogram([40000.0])).scale == 0.5  # such a loss must be scaled down


def test_what_no_scale_mends_is_refused() -> None:
    with pytest.raises(NumericError, match="2 of 3 gradients are infinite or not a number"):
        recommend(histogram([1.0, NAN, INF]))
    with pytest.raises(NumericError, match="nothing to choose"):
        recommend(histogram([0.0]))
    with pytest.raises(ConfigError, match="headroom"):
        recommend(histogram([1.0]), headroom=0.5)
    with pytest.raises(ConfigError, match="not at 3"):
        histogram([1.0]).lost(3.0)


# -- of models


class Weighted(nn.Module):
    """A layer whose weights are multiplied with given factors: their gradients are the factors."""

    def __init__(self, factors: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones_like(factors))
        self.register_buffer("factors", factors)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.to(x.dtype) * x


def test_a_models_gradients_are_counted_batch_by_batch() -> None:
    factors = torch.tensor([0.0, 2.0**-30, 2.0**-20, 3.0])
    model = Weighted(factors)
    found = gradient_histogram(model, [factors, 2 * factors], loss=lambda m, x: m(x).sum())
    assert found.batches == 2
    assert of(found.weights) == {-30: 1, -29: 1, -20: 1, -19: 1, 1: 1, 2: 1}
    assert found.weights.zeros == 2
    assert of(found.activations) == {0: 8}  # the sum passes 1 to each output
    assert found.all.values == 16
    assert found.to_dict()["weights"]["largest"] == 6.0


def test_training_may_go_on_between_batches() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []

    def train(batch: Tensor) -> None:
        seen.append(model.weight.detach().clone())
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    batches = [torch.ones(3, 2), torch.ones(3, 2)]
    gradient_histogram(model, batches, loss=lambda m, x: m(x).sum(), between=train)
    assert len(seen) == 2
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("precision", ["O1", "O2", "O3"])
def test_an_accelerated_model_is_measured_in_fp32(precision: str) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    batch = (torch.randn(6, 8), torch.randint(0, 4, (6,)))
    if precision != "O1":  # what O2 and O3 round the weights to, they compute with
        for parameter in model.parameters():
            parameter.data = parameter.data.half().float()
    plain = gradient_histogram(model, [batch], cross)
    penstock.accelerate(model, torch.optim.AdamW(model.parameters()), precision=precision, dtype="fp16")
    assert gradient_histogram(model, [batch], cross) == plain


class Planted(nn.Module):
    """Passes its gradient on times 2^k, each in fp16: the whole model's gradients span what fp16 cannot."""

    def __init__(self, power: int) -> None:
        super().__init__()
        self.inner, self.power = nn.Linear(8, 8), power

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 2.0**self.power


def test_the_recommended_scale_is_finite_in_fp16_and_four_times_it_is_not() -> None:
    model = nn.Sequential(Planted(-12), nn.GELU(), Planted(10), nn.LayerNorm(8), nn.Linear(8, 4))
    batches = [(torch.randn(16, 8), torch.randint(0, 4, (16,))) for _ in range(3)]
    found = recommend(gradient_histogram(model, batches, cross))
    assert found.lost_before > found.lost
    taken: dict[float, list[bool]] = {found.scale: [], 4 * found.scale: []}
    for scale, steps in taken.items():
        for x, target in batches:
            torch.manual_seed(0)
            again = nn.Sequential(*(Planted(-12), nn.GELU(), Planted(10), nn.LayerNorm(8), nn.Linear(8, 4)))
            again.load_state_dict(model.state_dict())
            optimizer = torch.optim.AdamW(again.parameters(), fused=True)
            again, optimizer = penstock.accelerate(again, optimizer, dtype="fp16", loss_scale=scale)
            before = [p.detach().clone() for p in again.parameters()]
            with penstock.scale_loss(nn.functional.cross_entropy(again(x), target), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            steps.append(not all(torch.equal(a, b) for a, b in zip(before, again.parameters())))
    assert all(taken[found.scale])
    assert not all(taken[4 * found.scale])


class Net(nn.Module):
    """Batch norm and dropout, which a pass changes and draws for, and a module that passes on what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.BatchNorm1d(16))
        self.dropout, self.same, self.head = nn.Dropout(0.5), nn.Identity(), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.same(self.dropout(self.body(x))))


def state(model: nn.Module) -> list[Any]:
    return [
        {name: value.clone() for name, value in model.state_dict().items()},
        [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        torch.get_rng_state(),
        [(id(p), p.requires_grad) for p in model.parameters()],
        [(m.training, type(m), len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
    ]


@pytest.mark.parametrize("accelerated", [None, "O1", "O2", "O3"])
def test_everything_is_as_before(accelerated: str | None) -> None:
    model = Net()
    model.dropout.eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if accelerated:
        model, optimizer = penstock.accelerate(model, optimizer, precision=accelerated, dtype="fp16")
    x, target = torch.randn(6, 8), torch.randint(0, 4, (6,))
    model(x).sum().backward()
    stepped: list[Tensor] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(stepped.append)
    before = state(model)
    gradient_histogram(model, [(x, target)], cross)
    after = state(model)
    torch.testing.assert_close(before[:3], after[:3], rtol=0, atol=0)
    assert before[3:] == after[3:]
    assert not stepped


def test_each_layer_is_counted_once_and_compiled_parts_are_looked_into() -> None:
    model, batch = Net(), (torch.randn(6, 8), torch.randint(0, 4, (6,)))
    found = gradient_histogram(model, [batch], cross)
    assert found.activations.values == 6 * (16 + 16 + 16 + 16 + 4)  # Identity gives what dropout did
    assert found.weights.values == sum(p.numel() for p in model.parameters())
    model.body.compile(backend="aot_eager")
    compiled = gradient_histogram(torch.compile(model, backend="aot_eager"), [batch], cross)
    assert compiled.activations.values == found.activations.values


def test_a_loss_that_is_none_is_refused() -> None:
    x, target = torch.randn(6, 8), torch.randint(0, 4, (6,))
    model = nn.Linear(8, 4)
    with pytest.raises(ConfigError, match=r"shape \(6, 4\), but must return a scalar"):
        gradient_histogram(model, [x], lambda m, b: m(b))
    with pytest.raises(ConfigError, match="at least one"):
        gradient_histogram(model, [], cross)
    with pytest.raises(ConfigError, match="No gradient flows"):
        gradient_histogram(model.requires_grad_(False), [(x, target)], cross)


def test_the_report_by_layers_is_refused_by_name() -> None:
    with pytest.raises(ImportError, match=r"penstock\.precision\.report was removed; gradient_histogram"):
        from penstock.precision import report  # type: ignore[attr-defined]  # noqa: F401
