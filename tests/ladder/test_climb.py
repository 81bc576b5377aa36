"""The climb's decisions, on a subject whose steps take the time that the test says, by a clock that the test holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.config.machine import Machine
from penstock.config.model import ViTConfig
from penstock.config.plan import Plan
from penstock.errors import ConfigError
from penstock.ladder import climb, measure
from penstock.ladder.climb import _Climb
from penstock.ladder.result import LadderReport, RungResult
from penstock.ladder.rung import Setting, Situation, choose
from penstock.ladder.settings import LadderConfig, command_of
from penstock.ladder.subject import Subject
from penstock.parallel import ALONE
from penstock.planner.describe import describe
from penstock.planner.operators import Workload

MODEL = ViTConfig(
    image_size=8, patch_size=2, channels=1, width=32, depth=2, heads=2, mlp_width=64, classes=10
)
MACHINE = Machine(
    name="toy", device="cpu", source="measured", peak_flops={"fp32": 1e11, "fp32_medium": 2e11, "bf16": 4e11},
    memory_bytes_per_second=1e10, memory_bytes=1e9, launch_seconds=1e-6,
)  # fmt: skip

Cost = Callable[[Setting], float]


class Clock:
    """Stands for the `time` module: moves only when a step is taken."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Scripted(Subject):
    """Steps that take `cost(setting)` seconds and lose `loss(setting, seed)` each; building may raise."""

    title, unit = "scripted", "images"

    def __init__(self, clock: Clock, cost: Cost, loss: Callable[[Setting, int], float]) -> None:
        self.device = torch.device("cpu")
        self.first = Setting(model=MODEL, plan=Plan(micro_batch=8))
        self.clock, self.cost, self.loss = clock, cost, loss
        self.built: list[Setting] = []

    def situation(self, machine: Machine) -> Situation:
        return Situation(
            machine=machine,
            micro_batch=8,
            attention=("plain", "sdpa"),
            token_orders=("batch_first", "batch_second"),
        )

    def build(self, setting: Setting, seed: int) -> Any:
        self.built.append(setting)
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters())

        class Step(SimpleNamespace):
            def __call__(_, batches: Any) -> SimpleNamespace:
                self.clock.now += self.cost(setting)
                return SimpleNamespace(loss=torch.tensor(self.loss(setting, seed)), grad_norm=None)

        step = Step(model=model, optimizer=optimizer, replicas=None, device=self.device)
        return SimpleNamespace(model=model, optimizer=optimizer, step=step, dims=ALONE, replicas=None)

    def batches(self, setting: Setting, seed: int) -> Iterator[Any]:
        return itertools.repeat(torch.zeros(1))

    def workload(self, setting: Setting) -> Workload:
        assert setting.model is not None
        return describe(setting.model, setting.plan, MACHINE.device)

    def blocks(self) -> int:
        return MODEL.depth

    def train_command(self, setting: Setting) -> str:
        return setting.plan.line()


def _loss(setting: Setting, seed: int) -> float:
    return 2.0 + 0.1 * seed


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(measure, "time", clock)
    monkeypatch.setattr(climb, "time", clock)
    return clock


def _climb(
    clock: Clock, cost: Cost, loss: Callable[[Setting, int], float] = _loss, **settings: Any
) -> tuple[LadderReport, dict[str, RungResult], Scripted]:
    subject = Scripted(clock, cost, loss)
    defaults: dict[str, Any] = {"rounds": 3, "round_seconds": 0.01, "loss_steps": 4}
    config = LadderConfig(**{**defaults, **settings})
    report = _Climb(subject, MACHINE, config, lambda result: None).run(choose(config.rungs, config.skip))
    return report, {rung.name: rung for rung in report.rungs}, subject


def test_what_pays_is_built_upon_and_what_does_not_is_not(clock: Clock) -> None:
    def cost(setting: Setting) -> float:
        seconds = 1.0
        seconds *= 0.5 if setting.plan.matmul == "medium" else 1.0
        seconds *= 1.2 if setting.plan.optimizer == "foreach" else 1.0
        seconds *= 0.8 if setting.plan.optimizer == "fused" else 1.0
        return seconds

    report, rungs, _ = _climb(clock, cost, rungs=("matmul", "optimizer"))
    assert rungs["matmul"].status == "kept"
    assert rungs["matmul"].to_previous is not None
    assert rungs["matmul"].to_previous.value == pytest.approx(2.0)
    assert rungs["optimizer-foreach"].status == "not kept"
    assert rungs["optimizer-foreach"].reason == "slower"
    assert rungs["optimizer-fused"].status == "kept"
    assert rungs["optimizer-fused"].to_previous is not None
    assert rungs["optimizer-fused"].to_previous.value == pytest.approx(1.25)  # over matmul, not over foreach
    assert (
        rungs["optimizer-contiguous"].status == "not kept"
    )  # slower than fused, though quicker than the baseline
    assert report.plan == "matmul=medium optimizer=fused"
    assert report.speedup == pytest.approx(2.5)
    assert report.train_command == "matmul=medium optimizer=fused"


def test_a_gain_within_noise_is_no_gain(clock: Clock) -> None:
    jitter = itertools.cycle([0.97, 1.01, 1.03, 0.99, 1.02])
    _, rungs, _ = _climb(clock, lambda setting: next(jitter), rungs=("token-order",), rounds=9)
    assert rungs["token-order"].status == "not kept"
    assert rungs["token-order"].reason == "no clear gain"


def test_an_unclear_gain_is_given_as_many_rounds_again(clock: Clock) -> None:
    ratios = itertools.cycle([1.2, 0.9, 1.05, 0.95, 1.1])
    taken: list[str] = []

    def cost(setting: Setting) -> float:
        taken.append(setting.plan.token_order)
        return 1.0 / next(ratios) if setting.plan.token_order == "batch_second" else 1.0

    _, rungs, _ = _climb(clock, cost, rungs=("token-order",), rounds=5, round_seconds=0.001, loss_steps=0)
    assert taken.count("batch_second") == measure.WARM_UP_STEPS + 2 * 5 + 1  # and the step that weighs memory
    assert rungs["token-order"].to_previous is not None
    assert rungs["token-order"].to_previous.rounds == 10
    assert rungs["token-order"].reason == "no clear gain"


def test_drift_of_the_machine_cancels(clock: Clock) -> None:
    """Every step is 2 % slower than the one before; a rung that gains 10 % still measures as that."""

    def cost(setting: Setting) -> float:
        drift = 1.02 ** min(clock.now, 100.0)
        return 0.05 * drift * (1 / 1.1 if setting.plan.token_order == "batch_second" else 1.0)

    _, rungs, _ = _climb(clock, cost, rungs=("token-order",), rounds=12, round_seconds=0.001, loss_steps=0)
    assert rungs["token-order"].status == "kept"
    assert rungs["token-order"].to_previous is not None
    assert rungs["token-order"].to_previous.value == pytest.approx(1.1, rel=5e-3)


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to have 9 GiB\nmore"), "out of memory", "Tried to have"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), "out of memory", "9 bytes"),
        (ConfigError("This plan cannot be."), "unsupported", "This plan cannot be."),
        (ZeroDivisionError("oh"), "failed", "ZeroDivisionError: oh"),
    ],
)  # fmt: skip
def test_a_rung_that_fails_is_reported_and_climbed_past(
    clock: Clock, error: Exception, status: str, reason: str
) -> None:
    def cost(setting: Setting) -> float:
        if setting.plan.matmul == "medium":
            raise error
        return 0.5 if setting.plan.optimizer == "fused" else 1.0

    report, rungs, _ = _climb(clock, cost, rungs=("matmul", "optimizer-fused"))
    assert rungs["matmul"].status == status
    assert reason in rungs["matmul"].reason
    assert "\n" not in rungs["matmul"].reason
    assert report.plan == "optimizer=fused"


def test_a_loss_that_is_no_number_is_never_built_upon(clock: Clock) -> None:
    def loss(setting: Setting, seed: int) -> float:
        return float("nan") if setting.plan.precision == "O3" else 2.0

    _, rungs, _ = _climb(
        clock, lambda s: 0.5 if s.plan.precision == "O3" else 1.0, loss, rungs=("whole-half",)
    )
    assert rungs["whole-half"].status == "not kept"
    assert "finite" in rungs["whole-half"].reason


def test_losses_stand_beside_the_noise_of_the_seeds(clock: Clock) -> None:
    def loss(setting: Setting, seed: int) -> float:
        return 2.0 + [0.0, 0.1, 0.2, 0.3][seed] + (0.5 if setting.plan.precision == "O1" else 0.0)

    report, rungs, _ = _climb(
        clock, lambda s: 0.5 if s.plan.precision == "O1" else 1.0, loss, rungs=("half-bf16",), seeds=3
    )
    assert report.noise is not None
    assert report.noise.seeds == (0, 1, 2, 3)
    assert report.noise.losses == pytest.approx((2.0, 2.1, 2.2, 2.3))
    assert report.noise.deviation == pytest.approx(0.1291, rel=1e-3)
    assert rungs["half-bf16"].loss_difference == pytest.approx(0.5)
    assert report.same.within_noise is False


def test_a_hopeless_rung_costs_little(clock: Clock) -> None:
    steps = []

    def cost(setting: Setting) -> float:
        steps.append(setting.plan.precision)
        return 50.0 if setting.plan.precision == "O1" else 1.0

    _, rungs, _ = _climb(clock, cost, rungs=("half-bf16",), rounds=7, loss_steps=20)
    assert rungs["half-bf16"].status == "not kept"
    assert rungs["half-bf16"].loss is None
    assert (
        steps.count("O1") == 2 + 2 + 1
    )  # a warm-up that is long already, two rounds, the step that weighs memory


def test_a_budget_shortens_and_then_stops(clock: Clock) -> None:
    report, rungs, _ = _climb(clock, lambda setting: 1.0, loss_steps=100, budget=200.0, rounds=5)
    assert report.loss_steps < 100
    assert any("shortened" in note for note in report.notes)
    assert clock.now < 230.0
    assert rungs["matmul"].measured
    short, rungs, _ = _climb(clock, lambda setting: 1.0, loss_steps=0, budget=30.0, rounds=5)
    assert rungs["whole-half"].status == "not run"
    assert "budget of 30 s" in rungs["whole-half"].reason
    assert short.noise is None


def test_the_larger_image_is_compared_in_flops_and_never_carried(clock: Clock) -> None:
    def cost(setting: Setting) -> float:
        assert setting.model is not None
        return 1.0 if setting.model.image_size > 8 else 0.9  # much more work in little more time

    report, rungs, _ = _climb(clock, cost, rungs=("image",))
    image = rungs["image"]
    assert image.status == "reported"
    assert image.model == {"image_size": 10}
    assert image.to_baseline is not None
    assert image.samples_per_second is not None
    assert image.to_baseline.value > 1.3
    assert image.samples_per_second.value == pytest.approx(8.0)
    assert report.plan == "baseline"


def test_a_former_best_is_let_go(clock: Clock) -> None:
    subject = Scripted(clock, lambda s: 0.5 if s.plan.matmul == "medium" else 1.0, _loss)
    climbing = _Climb(
        subject, MACHINE, LadderConfig(rounds=2, loss_steps=0, round_seconds=0.01), lambda result: None
    )
    climbing.run(choose(("matmul", "token-order")))
    medium = replace(subject.first, plan=replace(subject.first.plan, matmul="medium"))
    assert set(climbing.arena._built) == {subject.first, medium}


def test_the_command_makes_the_report_again() -> None:
    config = LadderConfig(
        model=replace(MODEL, classifier="pooled"),
        batch=4,
        rungs=("matmul", "half"),
        quick=True,
        rounds=3,
    )
    line = command_of(config)
    assert line.startswith("penstock ladder vit-digits --model.width 32 ")
    assert line.endswith("--batch 4 --rungs matmul,half --quick")
    assert command_of(LadderConfig(factory="a:b")) == "penstock ladder --model a:b"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rounds": 1}, "rounds is 1, but must be at least 2"),
        ({"budget": 0.0}, "budget is 0.0, but must be above 0"),
        ({"factory": "nocolon"}, "write package.module:function"),
        ({"seeds": 1}, "seeds is 1, but must be at least 2"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LadderConfig(**settings)
