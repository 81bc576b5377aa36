"""The search for a script's fastest settings, with processes whose steps take what a table says."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from penstock.config.load import to_dict
from penstock.config.machine import Machine, load_machine
from penstock.errors import ConfigError, OutOfMemory
from penstock.ladder.page import to_html
from penstock.ladder.result import LadderReport
from penstock.ladder.settings import TuneConfig
from penstock.ladder.show import ending, remarks, table, write
from penstock.report.page import plain_console
from penstock.tune import script, search
from penstock.tune.process import Facts, ScriptCommand, ScriptEnded

ENDLESS = 10**9
FACTS = Facts(
    device="cpu", model="GPT", parameters=1000, optimizer="AdamW", blocks=2,
    switches={"attention": ["plain"], "padding": ["remove"]}, fused={"residual_norm": 4, "bias_activation": 2},
    forms={"foreach": "", "fused": ""}, products={"int8_all": "", "fp8_tensorwise": "fp8 needs a GPU"},
)  # fmt: skip
AMX = replace(
    load_machine("h100"), device="cpu", avx512=True, name="a CPU with units",
    peak_flops={"fp32": 1e12, "bf16": 4e12, "int8": 8e12},
)  # fmt: skip


@dataclass
class World:
    """How long a step of each setting takes: factors by word of a line, of a step of 10 ms."""

    gains: dict[str, float] = field(default_factory=dict)
    noise: float = 0.002
    length: int = ENDLESS
    """Steps of the script."""
    loss: Callable[[str, int, int], float] = lambda line, seed, step: 3.0 - 0.01 * step + 0.01 * seed
    fails: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Status and reason of the end of whatever line has a word."""
    facts: Facts = FACTS
    machine: Machine = AMX
    together: dict[frozenset[str], float] = field(default_factory=dict)
    """Further factors of words that come together."""
    started: list[str] = field(default_factory=list)
    alive: int = 0


class Fake:
    """A process of a made-up script."""

    world: World

    def __init__(self, command: ScriptCommand, line: str, seed: int, log: Path, timeout: float) -> None:
        self.line, self.seed = line, seed
        self.losses: list[float | None] = []
        self.memory, self.steps = None, 0
        self.words = frozenset(line.split())
        self._random = random.Random(f"{line} {seed}")
        for word, (status, why) in self.world.fails.items():
            if word in (self.words or {"baseline"}):
                raise ScriptEnded(status, why, 0)
        self.world.started.append(line)
        self.world.alive += 1

    def _advance(self, steps: int) -> None:
        for _ in range(steps):
            if self.steps == self.world.length:
                raise ScriptEnded("ended", "", self.steps)
            self.steps += 1
            self.losses.append(self.world.loss(self.line, self.seed, self.steps))

    def first_step(self) -> float:
        self._advance(1)
        return 0.02

    def turn(self, steps: int) -> float:
        self._advance(steps)
        seconds = 0.01
        for word in self.words:
            seconds /= self.world.gains.get(word, 1.0)
        for words, gain in self.world.together.items():
            seconds /= gain if words <= self.words else 1.0
        return seconds * (1 + self._random.uniform(-self.world.noise, self.world.noise))

    def facts(self) -> tuple[Facts, dict[str, Any]]:
        return self.world.facts, to_dict(self.world.machine)

    def predicted(self, first: str, plans: list[str]) -> dict[str, float]:
        assert first == "optimizer=loop" or "recompute" in first or "fused" in first
        return dict.fromkeys(plans, 1.25)

    def close(self) -> None:
        self.world.alive -= 1


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., LadderReport]:
    monkeypatch.setattr(script, "ScriptProcess", Fake)

    def run(world: World, **options: Any) -> LadderReport:
        monkeypatch.setattr(Fake, "world", world, raising=False)
        command = ScriptCommand("train.py", ("--lr", "1e-3"), procs=options.pop("procs", 1))
        try:
            report = search.tune(command, TuneConfig(output=str(tmp_path), **options))
        finally:
            assert world.alive == 0
        for rung in report.rungs:
            if rung.status in ("kept", "offered"):
                assert rung.to_previous is not None
                assert rung.to_previous.low > 1.0, rung
        return report

    return run


def _statuses(report: LadderReport) -> dict[str, str]:
    return {rung.name: rung.status for rung in report.rungs}


GAINS = {"optimizer=fused": 1.3, "precision=O1": 0.8, "compile=blocks": 1.5, "compile=whole": 0.9}


def test_what_pays_is_kept_and_nothing_else(tuned: Callable[..., LadderReport], tmp_path: Path) -> None:
    report = tuned(World(gains=GAINS))
    assert report.plan == "optimizer=fused compile=blocks"
    assert report.speedup == pytest.approx(1.95, rel=0.01)
    assert report.train_command == 'penstock run --plan "optimizer=fused compile=blocks" train.py --lr 1e-3'
    statuses = _statuses(report)
    assert statuses["optimizer-fused"] == statuses["compile-blocks"] == "kept"
    assert statuses["half-bf16"] == statuses["matmul"] == statuses["compile-whole"] == "not kept"
    assert statuses["padding"] == statuses["half-fp16"] == statuses["fp8"] == "unsupported"
    assert statuses["attention-flash"] == "unsupported"
    forecasts = {rung.name: rung.forecast for rung in report.rungs[1:] if rung.measured}
    predicted = {name: forecast and forecast.to_previous for name, forecast in forecasts.items()}
    unpredicted = dict.fromkeys(("attention-plain", "fuse-residual_norm", "fuse-bias_activation", "fuse-all"))
    assert predicted == dict.fromkeys(predicted, 1.25) | unpredicted | {"compile-whole": 1.0}
    assert report.same_results.predicted == pytest.approx(1.25**2)
    assert report.noise is not None
    losses = report.noise.losses
    assert losses == pytest.approx([losses[0] + 0.01 * seed for seed in range(3)])
    page, data = write(report, tmp_path)
    assert (page.name, data.read_text().count('"kept"')) == ("tune.html", 2)
    assert "Tuning train.py --lr 1e-3" in page.read_text()
    console = plain_console()
    with console.capture() as shown:
        console.print(table(report, 160, every=True), *remarks(report, every=True))
    assert "fused optimizer" in shown.get()
    assert "no token of its batches is padding" in " ".join(shown.get().split())
    same = report.same_results.speedup
    assert ending(report)[-1] == (
        f"Same results: 1.95× the speed of the script as it is ({same.low:.2f} to {same.high:.2f}), predicted 1.56×. "
        "Its Plan is optimizer=fused compile=blocks. "
        "Its loss differs by 0.0000, within what seeds and rounding explain.",
        report.train_command,
    )


def test_where_nothing_is_beyond_the_noise_the_script_stays(tuned: Callable[..., LadderReport]) -> None:
    report = tuned(World(noise=0.2, gains={"matmul=medium": 1.02}))
    assert report.plan == "the script as it is"
    assert report.speedup == 1.0
    assert report.train_command == "python train.py --lr 1e-3"
    assert not {"kept", "unproven"} & {*_statuses(report).values()}
    words, command = ending(report)[-1]
    assert words.startswith("Same results: Nothing beyond ±")
    assert "may be chance" in words
    assert command == report.train_command


def test_a_loss_beyond_seeds_and_rounding_is_not_kept(
    tuned: Callable[..., LadderReport], tmp_path: Path
) -> None:
    def worse(line: str, seed: int, step: int) -> float:
        return 3.0 - 0.01 * step + 0.001 * seed + (0.2 if "precision=O1" in line else 0.0)

    gains = {"precision=O1": 2.0, "optimizer=fused": 1.1}
    report = tuned(World(gains=gains, loss=worse))
    assert report.plan == "optimizer=fused"
    half = next(step for step in report.rungs if step.name == "half-bf16")
    assert half.status == "not kept"
    assert half.reason == "its loss differs by more than seeds and rounding explain"
    assert half.loss_difference == pytest.approx(0.2)
    report = tuned(World(gains=gains))
    assert "precision=O1" in report.plan

    def broken(line: str, seed: int, step: int) -> float:
        return float("nan") if "fused" in line else 1.0

    report = tuned(World(gains=gains, loss=broken))
    assert "fused" not in report.plan
    written = json.loads(write(report, tmp_path)[1].read_text(), parse_constant=pytest.fail)  # NaN is no JSON
    assert None in next(rung["losses"] for rung in written["rungs"] if rung["name"] == "optimizer-fused")


@pytest.mark.parametrize("seed", [0, 1])
def test_a_script_whose_own_loss_is_not_finite_is_tuned_by_speed(
    tuned: Callable[..., LadderReport], tmp_path: Path, seed: int
) -> None:
    def broken(line: str, of: int, step: int) -> float:
        return float("nan") if of == seed and step > 2 else 1.0

    report = tuned(World(gains={"optimizer=fused": 1.3}, loss=broken), rungs="optimizer")
    assert report.plan == "optimizer=fused"
    assert report.noise is None
    assert "became infinite or NaN, so that no losses were compared" in " ".join(report.notes)
    assert "optimizer=fused" in write(report, tmp_path)[0].read_text()


def test_fused_operators_that_fit_are_tried_alone_and_together(tuned: Callable[..., LadderReport]) -> None:
    gains = {
        "fuse=residual_norm": 1.2,
        "fuse=bias_activation": 1.1,
        "fuse=residual_norm,bias_activation": 1.3,
    }
    report = tuned(World(gains=gains), rungs="fuse")
    assert report.plan == "fuse=residual_norm,bias_activation"
    steps = {step.name: step for step in report.rungs}
    assert (steps["fuse-all"].status, steps["fuse-bias_activation"].status) == ("kept", "not kept")
    assert list(report.same_results.rungs) == ["fuse-residual_norm", "fuse-all"]
    one = World(gains=gains, facts=replace(FACTS, fused={"residual_norm": 0, "bias_activation": 2}))
    report = tuned(one, rungs="fuse")
    assert report.plan == "fuse=bias_activation"
    reasons = {step.name: step.reason for step in report.rungs}
    assert reasons["fuse-residual_norm"] == "no place of the model is known for residual + norm"
    assert reasons["fuse-all"] == "only one of them fits the model, and it has its own rung"
    unknown = World(facts=replace(FACTS, fused={}, no_blocks="No repeated blocks. Enrol it."))
    report = tuned(unknown, rungs="fuse")
    assert {step.reason for step in report.rungs[1:]} == {"No repeated blocks"}


def test_casts_that_pay_once_compiled_are_tried_again(tuned: Callable[..., LadderReport]) -> None:
    both = frozenset({"precision=O1", "compile=blocks"})
    gains = {"precision=O1": 0.92, "compile=blocks": 1.2}
    report = tuned(World(gains=gains, together={both: 1.4}), rungs="half,compile-blocks")
    assert {*report.plan.split()} >= both
    for slow in (0.92, 0.6):
        gains = {"precision=O1": slow, "compile=blocks": 0.95}
        report = tuned(World(gains=gains, together={both: 1.4 / slow}), rungs="half,compile-blocks")
        assert {*report.plan.split()} >= both
    assert _statuses(report)["half-bf16+compile-blocks"] == "kept"


def test_what_saves_more_of_a_shorter_step_is_tried_again(tuned: Callable[..., LadderReport]) -> None:
    """Nothing beyond the noise on the script as it is, but a tenth once products are half as long."""
    both = frozenset({"optimizer=fused", "precision=O1"})
    world = World(gains={"precision=O1": 2.0, "matmul=medium": 0.9}, together={both: 1.1})
    report = tuned(world, rungs="optimizer,matmul,half-bf16")
    assert {*report.plan.split()} >= both
    assert _statuses(report)["optimizer-fused"] == "kept"
    # What was slower is not: fast products were started once, on top of the script as it is.
    assert sum("matmul=medium" in line for line in world.started) == 1


def test_what_changes_results_is_offered_apart(tuned: Callable[..., LadderReport]) -> None:
    report = tuned(World(gains={"precision=O1": 1.5, "products=int8_all": 1.4}))
    assert report.plan == "precision=O1 dtype=bf16"
    assert report.fastest is not None, [s.reason for s in report.rungs if s.name == "int8"]
    assert report.fastest.plan == "precision=O1 dtype=bf16 products=int8_all"
    assert [command for _, command in ending(report)] == [report.fastest.train_command, report.train_command]


def test_a_script_that_ends_begins_again(tuned: Callable[..., LadderReport]) -> None:
    world = World(gains={"optimizer=fused": 1.5}, length=60)
    report = tuned(world, rungs="optimizer")
    assert report.plan == "optimizer=fused"
    assert world.started.count("") > 3
    with pytest.raises(ConfigError, match="it ended after 9 optimizer steps"):
        tuned(World(length=9))
    with pytest.raises(ConfigError, match="it ended after 1 optimizer step,"):
        tuned(World(length=1))


@pytest.mark.parametrize(
    ("status", "why", "said"),
    [
        ("ended", "", "it ended without a step of an optimizer"),
        ("failed", "ValueError: no data here", "cannot time train.py: ValueError: no data here"),
        ("unsupported", "it steps with several optimizers (Adam and SGD)", "several optimizers"),
        ("late", "it has made no optimizer step within 300 s", "within 300 s"),
    ],
)
def test_what_cannot_be_timed_is_refused(
    tuned: Callable[..., LadderReport], status: str, why: str, said: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        tuned(World(fails={"baseline": (status, why)}))
    assert said in str(raised.value)


def test_where_memory_runs_out_it_is_recomputed(tuned: Callable[..., LadderReport]) -> None:
    fails = {"baseline": ("out of memory", "CUDA out of memory")}
    report = tuned(World(fails=fails, gains={"optimizer=fused": 1.2}), rungs="optimizer")
    assert report.plan == "recompute=early optimizer=fused"
    assert "runs out of memory as it is" in " ".join(report.notes)
    report = tuned(World(fails=fails), rungs="optimizer")
    assert report.train_command == 'penstock run --plan "recompute=early" train.py --lr 1e-3'
    report = tuned(World(fails=fails, gains={"recompute=elementwise": 1.2}), rungs="optimizer")
    assert report.plan == "recompute=elementwise"
    full = {**fails, "recompute=elementwise": ("out of memory", "CUDA out of memory")}
    report = tuned(World(fails=full, gains={"optimizer=fused": 1.2}), rungs="optimizer")
    assert report.plan == "recompute=early optimizer=fused"
    assert _statuses(report)["recompute-elementwise"] == "out of memory"
    with pytest.raises(OutOfMemory, match="smaller batch"):
        tuned(World(fails={**fails, "recompute=early": ("out of memory", "CUDA out of memory")}))


def test_on_a_gpu_activations_may_wait_on_the_host_instead(tuned: Callable[..., LadderReport]) -> None:
    """What compiles gives up the host for recomputation, against which it races then."""
    gpu = {"machine": load_machine("a100-80g"), "facts": replace(FACTS, device="cuda")}
    fails = {"baseline": ("out of memory", "CUDA out of memory")}
    gains = {"recompute=none": 1.3, "optimizer=fused": 1.2}
    report = tuned(World(fails=fails, gains=gains, **gpu), rungs="optimizer-fused")
    assert report.plan == "recompute=none offload=activations optimizer=fused"
    assert _statuses(report)["offload"] == "kept"
    gains["compile=blocks"] = 2.0
    report = tuned(World(fails=fails, gains=gains, **gpu), rungs="compile-blocks")
    assert report.plan == "recompute=early compile=blocks"
    on_a_cpu = tuned(World(fails=fails, gains=gains), rungs="optimizer")
    assert next(step for step in on_a_cpu.rungs if step.name == "offload").reason == (
        "on a CPU activations are in host memory already"
    )
    assert "offload" not in _statuses(tuned(World(), rungs="optimizer"))


def test_a_rung_that_fails_is_reported(tuned: Callable[..., LadderReport]) -> None:
    fails = {"compile=blocks": ("failed", "RuntimeError: graph"), "compile=whole": ("unsupported", "no")}
    report = tuned(World(fails=fails, gains={"optimizer=fused": 1.5}))
    steps = {step.name: step for step in report.rungs}
    failed = steps["compile-blocks"]
    assert (failed.status, failed.reason) == ("failed", "RuntimeError: graph")
    assert steps["compile-whole"].status == "unsupported"
    assert report.plan == "optimizer=fused"


@pytest.mark.parametrize(
    ("changes", "name", "reason"),
    [
        (
            {"mixed": "it runs under torch.autocast"},
            "half-bf16",
            "own precision: it runs under torch.autocast",
        ),
        ({"compiled": True}, "compile-whole", "the script calls torch.compile itself"),
        (
            {"blocks": 0, "no_blocks": "No repeated blocks were found. Enrol it."},
            "compile-blocks",
            "No repeated",
        ),
        ({"form": "fused"}, "optimizer-fused", "the script's AdamW is fused already"),
        ({"forms": {"fused": "Lion has no fused form"}}, "optimizer-fused", "Lion has no fused form"),
        ({"model": ""}, "compile-whole", "no module was called"),
        ({"model": ""}, "matmul-probed", "no module was called"),
        ({"switches": {}}, "attention-plain", "the model cannot be switched"),
        ({"padding": 0.4, "switches": {}}, "padding", "the model cannot be switched"),
    ],
)
def test_what_does_not_apply_is_not_started(
    tuned: Callable[..., LadderReport], changes: dict[str, Any], name: str, reason: str
) -> None:
    report = tuned(World(facts=replace(FACTS, **changes)), rungs=name)
    step = next(step for step in report.rungs if step.name == name)
    assert step.status == "unsupported"
    assert reason in step.reason
    avx2 = replace(AMX, peak_flops={"fp32": 1e12, "bf16": 1e11})
    report = tuned(World(machine=avx2), rungs="half")
    assert "has no units for bf16" in report.rungs[1].reason


def test_too_little_time_is_said(tuned: Callable[..., LadderReport]) -> None:
    report = tuned(World(gains={"optimizer=fused": 1.5}), budget=0.5, rungs="optimizer")
    assert _statuses(report)["optimizer-fused"] == "not run"
    assert "Time was too short for fused optimizer; --budget 2 gives them more." in report.notes
    assert ending(report)[-1][0].startswith("Same results: nothing that applies here was measured")
    written = json.loads(json.dumps(report.to_dict(), allow_nan=False))  # a rate that is not known is null
    assert written["same"]["plan"] == report.same.plan  # former names in Python, and those in files
    assert "none pays" not in to_html(report)


def test_rungs_that_no_script_can_have_are_refused(tuned: Callable[..., LadderReport]) -> None:
    with pytest.raises(ConfigError, match="can be applied to a script from outside"):
        tuned(World(), rungs="batch")
    with pytest.raises(ConfigError, match="There is no rung 'compil'"):
        tuned(World(), skip="compil")


def test_the_command_that_repeats_a_tuning_has_its_options(tmp_path: Path) -> None:
    command = ScriptCommand("my.trainer", ("--lr", "1"), module=True, procs=2)
    config = TuneConfig(output=str(tmp_path), round_seconds=0.5, skip="half, int8", procs=2)
    assert script.Script(command, config).tune_command == (
        "penstock tune --round-seconds 0.5 --skip 'half, int8' --procs 2 -m my.trainer --lr 1"
    )


def test_ranks_are_started_by_torchrun(tuned: Callable[..., LadderReport]) -> None:
    report = tuned(World(gains={"optimizer=fused": 1.5}), rungs="optimizer", procs=2)
    assert report.command == "penstock tune --rungs optimizer train.py --lr 1e-3"
    assert report.train_command == (
        'torchrun --nproc-per-node 2 -m penstock run --plan "optimizer=fused" train.py --lr 1e-3'
    )
    words = ScriptCommand("train.py", ("1",), procs=2).words("--plan", "")
    assert words[:3] == ["-m", "torch.distributed.run", "--standalone"]
    assert list(itertools.dropwhile(lambda word: word != "penstock", words)) == [
        "penstock", "run", "--plan", "", "train.py", "1",
    ]  # fmt: skip
