"""The climb's decisions, on a subject whose steps take the time that the test says, by a clock that the test holds."""

from __future__ import annotations

import itertools
import math
import random
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.sweeps import sweep
from penstock.config.machine import Machine
from penstock.config.model import ViTConfig
from penstock.config.plan import Plan
from penstock.config.run import DataConfig
from penstock.errors import ConfigError
from penstock.ladder import arena, climb, course, measure, search
from penstock.ladder.climb import _Climb
from penstock.ladder.result import Estimate, LadderReport, Progress, RungResult
from penstock.ladder.rung import PlanChange, Rung, Setting, Situation
from penstock.ladder.rungs import choose
from penstock.ladder.settings import LadderConfig, command_of
from penstock.ladder.space import Space
from penstock.ladder.statistics import FLOOR
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

    process_time = perf_counter


class Scripted(Subject):
    """Steps that take `cost(setting)` seconds and lose `loss(setting, seed)` each, less `fall(setting)` for each step
    before; building may raise."""

    title, unit = "scripted", "images"
    fall = staticmethod(lambda setting: 0.0)

    def __init__(self, clock: Clock, cost: Cost, loss: Callable[[Setting, int], float]) -> None:
        self.device = torch.device("cpu")
        self.first = Setting(model=MODEL, plan=Plan(micro_batch=8))
        self.clock, self.cost, self.loss = clock, cost, loss
        self.built: list[Setting] = []

    def situation(self, machine: Machine) -> Situation:
        return Situation(
            machine=machine,
            micro_batch=8,
            switches={"attention": ("plain", "sdpa"), "token_order": ("batch_first", "batch_second")},
        )

    def build(self, setting: Setting, seed: int) -> Any:
        self.built.append(setting)
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters())
        taken = itertools.count()

        class Step(SimpleNamespace):
            def __call__(_, batches: Any) -> SimpleNamespace:
                self.clock.now += self.cost(setting)
                loss = self.loss(setting, seed) - next(taken) * self.fall(setting)
                return SimpleNamespace(loss=torch.tensor(loss), grad_norm=None)

        step = Step(model=model, optimizer=optimizer, replicas=None, device=self.device)
        return SimpleNamespace(model=model, optimizer=optimizer, step=step, dims=ALONE, replicas=None)

    def batches(self, setting: Setting, seed: int) -> Iterator[Any]:
        return itertools.repeat(torch.zeros(1))

    def workload(self, setting: Setting) -> Workload:
        assert setting.model is not None
        return describe(setting.model, setting.plan, MACHINE.device)

    def train_command(self, setting: Setting) -> str:
        return setting.plan.line()


def _loss(setting: Setting, seed: int) -> float:
    return 2.0 + 0.1 * seed


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (measure, arena, search, course):
        monkeypatch.setattr(module, "time", clock)
    return clock


def _climb(
    clock: Clock, cost: Cost, loss: Callable[[Setting, int], float] = _loss, **settings: Any
) -> tuple[LadderReport, dict[str, RungResult], Scripted]:
    subject = Scripted(clock, cost, loss)
    defaults: dict[str, Any] = {"rounds": 4, "round_seconds": 0.01, "loss_steps": 4, "budget": 3600.0}
    config = LadderConfig(**{**defaults, **settings})
    report = _Climb(subject, MACHINE, config, told.append).run(choose(config.rungs, config.skip))
    return report, {rung.name: rung for rung in report.rungs}, subject


def value(estimate: Estimate | None) -> float:
    assert estimate is not None
    return estimate.value


told: list[Progress] = []
EAGER = ("matmul", "memory", "half", "optimizer", "masters", "token-order", "attention")


def _seconds(setting: Setting) -> float:
    """Casts cost while nothing is compiled and pay then; plain attention pays in half precision only."""
    p = setting.plan
    seconds = 1.0
    seconds *= 0.8 if p.optimizer == "fused" else 1.3 if p.optimizer == "foreach" else 1.0
    seconds *= 0.7 if p.compile == "whole" else 0.9 if p.compile == "blocks" else 1.0
    half = p.precision != "O0"
    seconds *= (0.6 if p.compile == "whole" else 1.2) if half else 1.0
    seconds *= (0.8 if half else 1.1) if p.attention == "plain" else 1.0
    seconds *= 1.02 if p.precision == "O2" else 1.0
    seconds *= 0.97 if p.token_order == "batch_second" else 1.0
    return seconds * p.micro_batch / 8


def test_the_search_finds_what_pays_only_together(clock: Clock) -> None:
    """One rung after the other, each kept or dropped for ever, ends at 1.84×: half precision loses eager, and plain
    attention loses in fp32."""
    report, rungs, _ = _climb(clock, _seconds, rungs=(*EAGER, "compile"))
    best = 1.0 / (0.8 * 0.7 * 0.6 * 0.8 * 0.97)
    words = "precision=O1 optimizer=fused token_order=batch_second attention=plain compile=whole"
    assert report.plan == words
    assert report.speedup == pytest.approx(best, rel=1e-3)
    for name, worth in (("half-bf16", 1 / (0.6 * 0.8 / 1.1)), ("optimizer-fused", 1.25)):
        assert value(rungs[name].worth) == pytest.approx(worth, rel=1e-3)
    assert {name for name, rung in rungs.items() if rung.status == "kept"} == set(report.same_results.rungs)
    assert report.fastest is None
    assert report.candidates > 100
    assert len(report.tried) < report.candidates / 5

    # Steps of the path multiply to the total.
    product, last = 1.0, report.baseline
    for name in report.same_results.rungs:
        last = rungs[name]
        product *= value(last.to_previous)
    assert product == pytest.approx(value(last.to_baseline))
    assert product == pytest.approx(report.same_results.speedup.value)
    rates = [value(one.samples_per_second) for one in (report.same_results, report.baseline)]
    assert rates[0] / rates[1] == pytest.approx(product)
    # What pays only later comes later: casts after compiling, and attention after the casts.
    order = list(report.same_results.rungs)
    assert order.index("compile-whole") < order.index("half-bf16") < order.index("attention-plain")


class _Bit(PlanChange):
    """Leaves the Plan as it is, and tells settings apart."""

    def __call__(self, setting: Setting, situation: Situation) -> Setting:
        return replace(setting, copy=setting.copy | self.fields["recompute_every"])


@pytest.mark.parametrize("switches", [8, 16])
def test_forecasts_grow_with_the_sum_of_answers_and_not_with_their_product(switches: int) -> None:
    """Of 256 and 65,536 combinations the fastest is found, though two switches gain only together."""
    rungs = [
        Rung(name=f"bit{i}", place=i, title="bit", why="Bit.", apply=_Bit({"recompute_every": 1 << i}))
        for i in range(switches)
    ]
    asked: list[int] = []

    def predicted(setting: Setting) -> float:
        asked.append(setting.copy)
        on = [i for i in range(switches) if setting.copy >> i & 1]
        together = 0.2 * (1 in on and 2 in on) - 0.05 * (2 in on and 4 in on)
        return math.exp(sum(0.02 if i % 2 == 0 else -0.01 for i in on) + together)

    first = Setting(model=MODEL, plan=Plan(micro_batch=8))
    space = Space(rungs, first, Situation(machine=MACHINE, micro_batch=8))
    still: Any = SimpleNamespace(speed=lambda setting: None)
    found = search.Search(still, space, predicted)._likely(3)
    assert space.size == 2**switches
    best = sum(1 << i for i in range(switches) if i % 2 == 0) + (1 << 1) - (1 << 4)
    assert found[0].setting.copy == best
    assert len(asked) == len(set(asked)) < 6 * switches


def test_a_gain_within_noise_is_no_gain(clock: Clock) -> None:
    rng = random.Random(0)
    report, rungs, _ = _climb(clock, lambda setting: rng.gauss(1.0, 0.02), rungs=("token-order",), rounds=9)
    assert rungs["token-order"].status in ("not kept", "not run")
    assert report.plan == report.same_results.plan == "baseline"
    assert report.nearest is not None
    assert report.nearest.plan == "token_order=batch_second"
    assert report.nearest.ratio.low < 1.0 < report.nearest.ratio.high


def test_only_what_is_beyond_the_noise_is_kept(clock: Clock) -> None:
    """One rung gains much, and three nothing, on a machine whose steps scatter by a tenth."""
    for seed in range(2):
        rng = random.Random(seed)

        def cost(setting: Setting, rng: random.Random = rng) -> float:
            return 0.3 * rng.lognormvariate(0.0, 0.1) * (0.6 if setting.plan.optimizer == "fused" else 1.0)

        names = ("matmul", "memory", "optimizer-fused", "token-order")
        report, rungs, _ = _climb(clock, cost, rungs=names, rounds=5, loss_steps=0, budget=50.0)
        assert rungs["optimizer-fused"].status == "kept"
        assert "optimizer=fused" in report.plan
        assert report.same_results.speedup.low > 1.0
        assert report.nearest is None
        for rung in report.rungs[1:]:
            gains = [ratio.low > 1.0 for ratio in (rung.to_previous, rung.worth) if ratio is not None]
            assert (rung.status == "kept") == (rung.name in report.same_results.rungs and any(gains)), rung
            assert rung.status != "unproven" or rung.reason


def test_a_rung_that_does_not_pay_by_itself_stays_where_the_plan_is_slower_without(clock: Clock) -> None:
    """Three of 2 % each, on a machine that tells 4 %: together they are beyond the noise."""

    def cost(setting: Setting) -> float:
        p = setting.plan
        gains = (p.matmul != "highest", p.host_memory == "keep", p.token_order == "batch_second")
        return 0.2 * 0.98 ** sum(gains)

    class Coarse(arena.Arena):
        """An arena whose noise floor is 4 %."""

        floor = property(lambda self: 0.04, lambda self, value: None)  # type: ignore[assignment]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(course, "Arena", Coarse)
        report, rungs, _ = _climb(
            clock, cost, rungs=("matmul", "memory", "token-order"), loss_steps=0, budget=60.0
        )
    assert report.plan == "matmul=medium token_order=batch_second host_memory=keep"
    assert report.same_results.speedup.low > 1.0
    assert {rungs[name].status for name in report.same_results.rungs} == {"unproven"}


@pytest.mark.parametrize(
    ("said", "measured", "forecast", "moves"),
    [
        ("open", 1.03, 0.03, True),
        ("open", 1.03, 0.0, False),  # two equal kernels, by the planner
        ("open", 1.005, 0.03, False),
        ("slower", 1.03, 0.03, False),
        ("faster", 1.03, -0.03, True),
    ],
)
def test_what_no_race_decides_is_taken_where_measurement_and_forecast_agree(
    said: str, measured: float, forecast: float, moves: bool
) -> None:
    first = Setting(model=MODEL, plan=Plan(micro_batch=8))
    best = search.Candidate(("",), first)
    other = search.Candidate(("memory",), replace(first, plan=replace(first.plan, host_memory="keep")))
    known = SimpleNamespace(
        arena=SimpleNamespace(verdict_of=lambda *settings: said),
        measured={best.key: best, other.key: other},
        allowed=lambda candidate: True,
        speed=lambda candidate: measured if candidate is other else 1.0,
        forecast=lambda candidate: forecast if candidate is other else 0.0,
    )
    found = search.Search._better(known, best, [other], [])  # type: ignore[arg-type]
    assert (found is other) == moves


def test_a_plan_that_all_rounds_together_do_not_call_faster_is_not_offered(clock: Clock) -> None:
    """On a machine where the same step takes from half to twice its time, a Plan can look fast until the last race."""
    for seed in range(12):
        rng = random.Random(seed)
        cost: Any = lambda setting, rng=rng: rng.lognormvariate(0.0, 0.4)  # noqa: E731
        report, _, _ = _climb(clock, cost, rungs=EAGER, rounds=7, loss_steps=0, budget=60.0)
        assert (
            (report.nearest is None) == (report.plan != "baseline") == (report.same_results.speedup.low > 1.0)
        )


def test_drift_of_the_machine_cancels(clock: Clock) -> None:
    """Every step is 2 % slower than the one before; a rung that gains 10 % still measures as that."""

    def cost(setting: Setting) -> float:
        drift = 1.02 ** min(clock.now, 100.0)
        return 0.05 * drift * (1 / 1.1 if setting.plan.token_order == "batch_second" else 1.0)

    _, rungs, _ = _climb(clock, cost, rungs=("token-order",), rounds=12, round_seconds=0.001, loss_steps=0)
    assert rungs["token-order"].status == "kept"
    assert value(rungs["token-order"].to_previous) == pytest.approx(1.1, rel=5e-3)


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to have 9 GiB\nmore"), "out of memory", "Tried to have"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), "out of memory", "9 bytes"),
        (ConfigError("This plan cannot be."), "unsupported", "This plan cannot be."),
        (ZeroDivisionError("oh"), "failed", "ZeroDivisionError: oh"),
    ],
)  # fmt: skip
def test_a_rung_that_fails_is_reported_and_searched_past(
    clock: Clock, error: Exception, status: str, reason: str
) -> None:
    failed = []

    def cost(setting: Setting) -> float:
        if setting.plan.matmul == "medium":
            failed.append(setting)
            raise error
        return _seconds(setting)

    report, rungs, _ = _climb(clock, cost, rungs=("matmul", "optimizer-fused", "token-order"))
    assert rungs["matmul"].status == status
    assert reason in rungs["matmul"].reason
    assert "\n" not in rungs["matmul"].reason
    assert report.plan == "optimizer=fused token_order=batch_second"
    assert len(failed) <= 3  # it is soon known which rung fails


def test_types_whose_loss_is_outside_the_noise_of_seeds_are_taken_by_no_plan(clock: Clock) -> None:
    def loss(setting: Setting, seed: int) -> float:
        return 2.0 + [0.0, 0.1, 0.2, 0.3][seed] + (0.5 if setting.plan.precision == "O1" else 0.0)

    report, rungs, _ = _climb(clock, lambda s: {"O0": 1.0, "O1": 0.5, "O2": 0.6}[s.plan.precision], loss,
                              rungs=("half-bf16", "masters"), seeds=3)  # fmt: skip
    assert report.noise is not None
    assert report.noise.seeds == (0, 1, 2, 3)
    assert report.noise.losses == pytest.approx((2.0, 2.1, 2.2, 2.3))
    assert report.noise.deviation == pytest.approx(0.1291, rel=1e-3)
    assert "more than seeds explain" in rungs["half-bf16"].reason
    assert report.plan == "precision=O2"
    assert report.same_results.within_noise is True
    assert any("autocast bf16" in note for note in report.notes)


def test_what_changes_results_is_offered_apart(clock: Clock) -> None:
    def cost(setting: Setting) -> float:
        half = 0.5 if setting.plan.precision == "O3" else 1.0
        return _seconds(setting) * half * (0.7 if setting.plan.micro_batch > 8 else 1.0)

    report, rungs, _ = _climb(clock, cost, rungs=("optimizer", "batch", "whole-half"))
    assert report.plan == "optimizer=fused"
    assert report.speedup == pytest.approx(1.25, rel=1e-3)
    assert rungs["batch-x2"].status == "offered"
    assert rungs["batch-x4"].status == "not kept"
    assert rungs["whole-half"].status == "offered"
    assert report.fastest is not None
    assert report.fastest.rungs == ("optimizer-fused", "batch-x2", "whole-half")
    assert report.fastest.plan == "precision=O3 optimizer=fused micro_batch=16"
    assert report.fastest.speedup.value == pytest.approx(1.25 / 0.7 / 0.5 / 1.2, rel=1e-3)
    assert report.fastest.within_noise is True


def test_a_loss_that_is_no_number_is_never_offered(clock: Clock) -> None:
    def loss(setting: Setting, seed: int) -> float:
        return float("nan") if setting.plan.precision == "O3" else 2.0

    report, rungs, _ = _climb(
        clock, lambda s: 0.5 if s.plan.precision == "O3" else 1.0, loss, rungs=("whole-half",)
    )
    assert rungs["whole-half"].status == "not kept"
    assert "infinite" in rungs["whole-half"].reason
    assert report.fastest is None


def test_a_budget_is_kept_and_what_it_had_no_time_for_is_said(clock: Clock) -> None:
    report, rungs, _ = _climb(clock, _seconds, loss_steps=100, budget=170.0, rounds=5)
    assert report.loss_steps < 100
    assert any("shortened" in note for note in report.notes)
    assert clock.now < 200.0
    assert report.speedup > 1.2
    clock.now = 0.0
    short, rungs, _ = _climb(clock, _seconds, loss_steps=0, budget=20.0, rounds=5)
    assert clock.now < 60.0
    assert rungs["whole-half"].status == "not run"
    assert "budget" in rungs["whole-half"].reason
    assert short.noise is None


@pytest.mark.parametrize(("rungs", "share"), [(("optimizer",), "apart"), (("optimizer", "batch"), "path")])
def test_the_path_has_the_time_of_what_was_left_out(
    rungs: tuple[str, ...], share: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short climb that leaves out what changes results would otherwise end before its time, with wide intervals."""
    ends = []
    path = search.Search.path
    monkeypatch.setattr(
        search.Search, "path", lambda self, best, end: ends.append(end) or path(self, best, end)
    )
    _climb(clock, _seconds, rungs=rungs, budget=1000.0, loss_steps=0)
    assert ends == [pytest.approx(1000.0 * climb.UNTIL[share])]


@pytest.mark.parametrize(("size", "budget"), sweep([(2.0, 420.0), (3.0, 600.0)], [(2.0, 420.0)]))
def test_slow_steps_keep_the_budget_and_leave_time_for_a_compiled_look(
    clock: Clock, size: float, budget: float
) -> None:
    """Twenty looks fit into the time, and the path takes a third of it."""
    report, _, _ = _climb(
        clock, lambda s: size * _seconds(s), rungs=(*EAGER, "compile"), budget=budget, round_seconds=0.3
    )
    assert clock.now < budget
    assert "compile=" in report.plan
    assert report.speedup > 1.4


def test_a_change_of_host_memory_costs_a_step_and_is_planned_for(clock: Clock) -> None:
    subject = Scripted(clock, lambda setting: 2.0, _loss)
    config = LadderConfig(round_seconds=0.01)
    races = arena.Arena(measure.Models(subject, MACHINE, config), 7, 0.01, lambda *said: None)
    keeps = replace(subject.first, plan=replace(subject.first.plan, host_memory="keep"))
    settings = [subject.first, keeps, replace(subject.first, copy=1), replace(keeps, copy=1)]
    races.play(settings, 1)
    before = clock.now
    races.play(settings, 4)
    assert clock.now - before <= 4 * races.round_of(settings) == 4 * 12.0


def test_where_memory_holds_few_settings_they_race_in_groups(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure.Models, "room", lambda self, setting: 2)
    report, rungs, _ = _climb(clock, _seconds, rungs=("optimizer", "token-order", "compile"))
    assert report.plan == "optimizer=fused token_order=batch_second compile=whole"
    assert report.speedup == pytest.approx(1 / (0.8 * 0.97 * 0.7), rel=1e-3)
    assert all(rungs[name].to_previous is not None for name in report.same_results.rungs)


def test_every_report_has_a_control_and_says_what_it_is_doing(clock: Clock) -> None:
    told.clear()
    report, _, _ = _climb(clock, _seconds, rungs=("optimizer",))
    assert report.control is not None
    assert report.control.ratio.value == pytest.approx(1.0)
    assert report.control.floor == FLOOR
    assert [*dict.fromkeys(one.phase for one in told)] == ["baseline", "search", "top", "path", "race"]
    assert {progress.doing for progress in told} >= {"building", "timing", "weighing"}
    assert told[-1].standings[0][0] == report.plan == "optimizer=fused"
    assert all(progress.budget == 3600.0 for progress in told)


def test_the_larger_image_is_compared_in_flops_and_never_carried(clock: Clock) -> None:
    def cost(setting: Setting) -> float:
        assert setting.model is not None
        return 1.0 if setting.model.image_size > 8 else 0.9  # much more work in little more time

    report, rungs, _ = _climb(clock, cost, rungs=("image",))
    image = rungs["image"]
    assert image.status == "reported"
    assert image.model == {"image_size": 10}
    assert value(image.to_baseline) > 1.3
    assert value(image.samples_per_second) == pytest.approx(8.0, rel=1e-3)
    assert report.plan == "baseline"


def test_smaller_models_are_reported_with_their_loss_and_never_carried(clock: Clock) -> None:
    def cost(setting: Setting) -> float:
        model: Any = setting.model
        return 0.5 * model.depth + model.mlp_width / 64

    def loss(setting: Setting, seed: int) -> float:
        model: Any = setting.model
        return 4.0 / model.depth + 0.1 * seed

    report, rungs, _ = _climb(clock, cost, loss, rungs=("compress",))
    for name, model, speed, change in (
        ("compress-depth", {"depth": 1}, 2 / 1.5, 2.0), ("compress-width", {"mlp_width": 32}, 2 / 1.5, 0.0),
    ):  # fmt: skip
        rung = rungs[name]
        assert (rung.status, rung.model) == ("reported", model)
        assert value(rung.to_baseline) == pytest.approx(speed, rel=1e-3)
        assert rung.loss_difference == pytest.approx(change)
    assert report.plan == "baseline"
    assert report.fastest is None


def test_muon_is_reported_with_its_seconds_to_the_loss_and_never_carried(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss falls by 0.1 a step to 1.35 in the last two of eight, and by 0.2 with Muon: there after five."""
    monkeypatch.setattr(Scripted, "fall", staticmethod(lambda s: 0.2 if s.plan.algorithm == "muon" else 0.1))
    cost: Cost = lambda s: 0.5 if s.plan.algorithm == "muon" else 1.0  # noqa: E731  # quicker is no reason either
    report, rungs, _ = _climb(clock, cost, rungs=("muon",), loss_steps=8)
    assert (rungs["muon"].status, rungs["muon"].plan) == ("reported", "optimizer=fused algorithm=muon")
    assert [rungs[name].steps_to_loss for name in ("baseline", "muon")] == [8, 5]
    assert rungs["baseline"].seconds_to_loss == pytest.approx(8.0, rel=1e-3)
    assert rungs["muon"].seconds_to_loss == pytest.approx(2.5, rel=1e-3)
    assert (report.plan, report.fastest) == ("baseline", None)


def test_the_command_makes_the_report_again() -> None:
    config = LadderConfig(
        model=replace(MODEL, classifier="pooled"), batch=4, rungs=("matmul", "half"), quick=True, loss_steps=3
    )
    line = command_of(config)
    assert line.startswith("penstock ladder vit-digits --model.width 32 ")
    assert line.endswith("--batch 4 --rungs matmul,half --quick")
    assert command_of(LadderConfig(factory="a:b")) == "penstock ladder --model a:b"
    data = DataConfig(source="text:my corpus", columns=("first name", "label"), separator=";")
    words = shlex.split(command_of(LadderConfig(machine="RTX 4090", data=data)))
    assert words[3:] == [
        "--data", "text:my corpus", "--data.columns", "first name,label", "--data.separator", ";", "--machine",
        "RTX 4090",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rounds": 1}, "rounds is 1, but must be at least 2"),
        ({"budget": 0.0}, "budget is 0.0, but must be above 0"),
        ({"factory": "nocolon"}, "must be package.module:function"),
        ({"seeds": 1}, "seeds is 1, but must be between 2 and 1,000"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LadderConfig(**settings)


@pytest.mark.parametrize(("left", "first"), [(120.0, "whole"), (20.0, "none")])
def test_a_long_compilation_that_promises_more_comes_before_cheap_looks_while_there_is_time(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, left: float, first: str
) -> None:
    """By gain per second, dozens of eager neighbours would come first, and the compilation never."""

    class One(SimpleNamespace):
        __hash__ = object.__hash__

    eager = One(key=("a",), gain=0.03, cost=3.0, setting=SimpleNamespace(plan=Plan()))
    whole = One(key=("b",), gain=0.12, cost=30.0, setting=SimpleNamespace(plan=Plan(compile="whole")))
    of = search.Search.__new__(search.Search)
    for name in ("gain", "cost"):
        monkeypatch.setattr(of, f"_{name}", lambda one, name=name: getattr(one, name), raising=False)
    monkeypatch.setattr(of, "_likely", lambda count, **wanted: [eager, whole], raising=False)
    of._forecasts = {eager.key: 0.03, whole.key: 0.12}
    monkeypatch.setattr(of, "speed", lambda one: 1.0, raising=False)
    found: Any = of._next(clock.now + left)
    assert found.setting.plan.compile == first


@pytest.mark.parametrize("size", [7.0, 12.0])
def test_where_few_steps_fit_the_first_looks_go_to_what_promises_most(clock: Clock, size: float) -> None:
    """GPT-2 with 1,024 tokens takes 7 s a step on two cores: fifty steps fit into six minutes."""

    def cost(setting: Setting) -> float:
        p = setting.plan
        return size * (0.45 if p.precision in ("O1", "O2") else 1.0) * (0.9 if p.compile != "none" else 1.0)

    report, _, _ = _climb(
        clock, cost, rungs=(*EAGER, "compile"), budget=360.0, round_seconds=0.3, loss_steps=0
    )
    assert clock.now < 375.0
    assert report.speedup > 2
    assert report.control is None
    assert "A step of the baseline takes" in report.notes[0]
