"""The climb: rung after rung, each measured against the best setting so far and against the baseline.

Later rungs build on a rung that pays. A rung that does not pay, cannot be applied here, runs out of memory or fails is
reported, and the climb goes on.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from penstock.config.load import load, to_dict
from penstock.config.machine import Machine, load_machine
from penstock.config.model import ModelConfig
from penstock.errors import EnvironmentProblem
from penstock.ladder import measure
from penstock.ladder.arena import Arena, failure
from penstock.ladder.factory import Factory
from penstock.ladder.forecast import rank_machine
from penstock.ladder.judge import HOPELESS, equality, spread, tail_mean, undecided, verdict
from penstock.ladder.result import Chosen, Estimate, Forecast, LadderReport, Noise, RungResult
from penstock.ladder.rung import Rung, Setting, Situation, choose
from penstock.ladder.settings import QUICK_LOSS_STEPS, QUICK_ROUNDS, LadderConfig, command_of
from penstock.ladder.subject import Subject, subject_of
from penstock.ladder.team import Team, threads_of
from penstock.planner.prediction import Prediction, predict_workload
from penstock.probe import machine_for, resolve_device
from penstock.report import record

log = logging.getLogger(__name__)

LOSS_SHARE = 0.4
"""Share of a budget that loss runs may take; the rest is for building and timing."""
LEAST_LOSS_STEPS = 4
COMPILE_SECONDS = {"none": 0.0, "blocks": 25.0, "whole": 60.0}
"""What a budget sets aside for compiling: measured for ViT-S/16 on two CPU cores, a GPU takes about as long."""
EQUAL_STEPS = 6
"""Steps for which several processes are held to one."""
BASELINE_WHY = "fp32, eager, an optimizer that loops over tensors, torch's own attention: the plain loop."

OnResult = Callable[[RungResult], None]
"""Called with each rung's result as soon as it is there."""


def ladder(
    model: str | ModelConfig | None = None,
    *,
    factory: str | Factory | None = None,
    config: LadderConfig | None = None,
    on_result: OnResult | None = None,
    **settings: Any,
) -> LadderReport:
    """Climb the ladder and report what each rung gains on this machine, in speed, memory and loss.

    `model` is a preset's name or a configuration; `factory` instead brings any module: a function, or its path
    `package.module:name`, that returns (model, batch, loss) with `loss(model, batch)` a scalar tensor. `settings` are
    fields of `LadderConfig`, over `config`. Nothing is written; see `LadderReport` and `penstock.ladder.write`.

    Raises ConfigError for settings, models and factories that cannot be, EnvironmentProblem for a missing device, and
    what the baseline itself raises: without it there is nothing to compare with.
    """
    overrides = dict(settings)
    if model is not None:
        overrides["model"] = model
    if isinstance(factory, str):
        overrides["factory"] = factory
    settled = load(LadderConfig, overrides=overrides, base=config, origin="the call of ladder")
    if settled.quick:
        settled = replace(
            settled,
            rounds=min(settled.rounds, QUICK_ROUNDS),
            loss_steps=min(settled.loss_steps, QUICK_LOSS_STEPS),
            round_seconds=min(settled.round_seconds, 0.1),
        )
    rungs = choose(settled.rungs, settled.skip)
    device = resolve_device(settled.device)
    _require_devices(settled.procs, device)
    machine = load_machine(settled.machine) if settled.machine else machine_for(device)
    with measure.side_by_side():
        subject = subject_of(settled, factory, device)
        return _Climb(subject, machine, settled, on_result or (lambda result: None)).run(rungs)


def _model_changes(first: ModelConfig | None, model: ModelConfig | None) -> dict[str, Any]:
    """Fields of the model that a setting changes."""
    if first is None or model is None:
        return {}
    return {
        f.name: getattr(model, f.name)
        for f in fields(model)
        if getattr(model, f.name) != getattr(first, f.name)
    }


def _require_devices(procs: int, device: torch.device) -> None:
    if device.type == "cuda" and procs > (found := torch.cuda.device_count()):
        raise EnvironmentProblem(
            f"procs is {procs}, and each process takes one GPU, but this machine has {found}. Give --procs {found}, or "
            "--device cpu, where processes share the cores."
        )


def _notes(subject: Subject) -> list[str]:
    """What a reader must know of a climb of several processes."""
    if subject.procs == 1 or subject.device.type != "cpu":
        return []
    alone, each = torch.get_num_threads(), threads_of(subject.procs)
    return [
        f"On this CPU one process computes with {alone} thread{'s' if alone > 1 else ''}, and each of "
        f"{subject.procs} with {each}."
    ]


class _Climb:
    """One climb. `run` reads from top to bottom as what happens."""

    def __init__(self, subject: Subject, machine: Machine, config: LadderConfig, on_result: OnResult) -> None:
        self.subject, self.machine = subject, machine
        self.config = config
        self.on_result = on_result
        self.situation: Situation = subject.situation(machine)
        self.arena = Arena(subject, config.seed, config.round_seconds, Team(subject, config))
        self.start = time.perf_counter()
        self.loss_steps = config.loss_steps
        self.notes: list[str] = _notes(subject)

    def run(self, rungs: Sequence[Rung]) -> LadderReport:
        """Measure the baseline, then every rung."""
        try:
            return self._climbed(rungs)
        finally:
            self.arena.close()

    def _climbed(self, rungs: Sequence[Rung]) -> LadderReport:
        self.arena.contender(self.arena.baseline)
        self._fit_into_budget(len(rungs))
        noise = self._noise()
        results = [self._baseline_result(noise)]
        self.on_result(results[0])
        for index, rung in enumerate(rungs):
            result = self._rung(rung, noise, remaining=len(rungs) - index)
            results.append(result)
            self.on_result(results[-1])
        return self._report(results, noise)

    def _rung(self, rung: Rung, noise: Noise | None, *, remaining: int) -> RungResult:
        """The result of one rung, also where it cannot be applied or fails."""
        reference = self.arena.best
        result = RungResult(
            name=rung.name,
            title=rung.title,
            why=rung.why,
            status="unsupported",
            results="other" if rung.changes_numerics else "same",
            compared_by=rung.compared_by,
        )
        refusal = rung.refusal(reference, self.situation)
        if refusal is not None:
            return replace(result, reason=refusal)
        setting = rung.apply(reference, self.situation)
        changes = _model_changes(self.subject.first.model, setting.model)
        result = replace(result, plan=setting.plan.line(), model=changes)
        try:
            result = self._tried(rung, result, setting, reference, remaining, noise)
        except Exception as error:  # a rung is an experiment: any way of failing is its result
            status, reason = failure(error)
            log.info("%s: %s: %s", rung.name, status, reason, exc_info=error if status == "failed" else None)
            result = replace(result, status=status, reason=reason)
        if result.status == "kept":
            self.arena.accept(setting)
        self.arena.retire(setting)
        return result

    def _tried(
        self,
        rung: Rung,
        result: RungResult,
        setting: Setting,
        reference: Setting,
        remaining: int,
        noise: Noise | None,
    ) -> RungResult:
        """Predict, measure, train and judge a rung. Raises whatever the rung raises."""
        forecast = self._forecast(setting, reference, rung.compared_by)
        if self._seconds_left() < self._least_seconds(setting, forecast):
            spent = f"too little was left of the budget of {self.config.budget:g} s"
            return replace(result, status="not run", reason=spent, forecast=forecast)
        result = self._measured(replace(result, forecast=forecast), setting, reference, remaining)
        if rung.twin:
            result = self._with_equality(result, setting)
        else:
            result = self._with_losses(result, setting, noise)
        status, reason = verdict(result, carried=rung.carried)
        return replace(result, status=status, reason=reason)

    def _measured(
        self, result: RungResult, setting: Setting, reference: Setting, remaining: int
    ) -> RungResult:
        """Speed and memory of one setting."""
        together = self.arena.challenge(setting)
        baseline = self.arena.baseline
        rounds = self.config.rounds if setting == baseline else self._rounds(setting, remaining)
        work = self.subject.model_flops if result.compared_by == "flops" else self.subject.samples

        def timed() -> dict[Setting, list[float]]:
            return self.arena.time(setting, (reference, baseline), rounds, together=together)

        def against(other: Setting) -> Estimate:
            pairs = zip(taken[setting], taken[other], strict=True)
            return spread([(work(setting) / mine) / (work(other) / theirs) for mine, theirs in pairs])

        taken = timed()
        if undecided(against(reference)):
            more = timed()
            taken = {one: seconds + more[one] for one, seconds in taken.items()}
        contender = self.arena.contender(setting)
        samples, flops = self.subject.samples(setting), self.subject.model_flops(setting)
        memory = contender.memory()
        return replace(
            result,
            samples_per_second=spread([samples / s for s in taken[setting]]),
            model_flops_per_second=spread([flops / s for s in taken[setting]]),
            to_previous=against(reference),
            to_baseline=against(baseline),
            interleaved=together,
            memory_bytes=max(memory),
            memory_by_rank=tuple(memory) if len(memory) > 1 else (),
            compile_seconds=contender.compile_seconds,
        )

    def _forecast(self, setting: Setting, reference: Setting, compared_by: str) -> Forecast:
        """What the planner says of a setting, and of the two it will be compared with."""
        predicted, before, first = (self._predict(s) for s in (setting, reference, self.arena.baseline))

        def rate(prediction: Prediction) -> float:
            flops = prediction.model_flops_per_second_per_gpu * prediction.gpus
            return flops if compared_by == "flops" else prediction.samples_per_second

        return Forecast(
            samples_per_second=predicted.samples_per_second,
            to_previous=rate(predicted) / rate(before),
            to_baseline=rate(predicted) / rate(first),
            corrected=rate(predicted) / rate(first),
            memory_bytes=predicted.memory_bytes,
            mfu=predicted.mfu,
            seconds=predicted.seconds,
        )

    def _predict(self, setting: Setting) -> Prediction:
        work, machine = self.subject.workload(setting), self.machine
        if setting.plan.gpus > 1:
            machine = rank_machine(machine, setting.plan.gpus, self.arena.team.link())
        return predict_workload(work, machine, setting.plan)

    def _noise(self) -> Noise | None:
        """The baseline's loss under several seeds; none where no loss runs are made."""
        if not self.loss_steps:
            return None
        first = self.arena.baseline
        seeds = tuple(self.config.seed + i for i in range(self.config.seeds + 1))
        curves = tuple(tuple(self.arena.trained(first, seed, self.loss_steps).losses) for seed in seeds)
        last = tuple(tail_mean(curve) for curve in curves)
        return Noise(seeds=seeds, losses=last, curves=curves, deviation=statistics.stdev(last))

    def _with_losses(self, result: RungResult, setting: Setting, noise: Noise | None) -> RungResult:
        hopeless = result.to_previous is not None and result.to_previous.high < HOPELESS
        if noise is None or hopeless:
            return result
        curve = self.arena.trained(setting, self.config.seed, self.loss_steps).losses
        loss = tail_mean(curve)
        return replace(result, losses=tuple(curve), loss=loss, loss_difference=loss - noise.losses[0])

    def _with_equality(self, result: RungResult, setting: Setting) -> RungResult:
        """Compared with one process that takes the same micro-batches one after the other."""
        plan = setting.plan
        single = replace(
            plan, dp=1, sharding="ddp", shard=1, offload="none", accumulate=plan.accumulate * plan.dp
        )
        ranks = self.arena.trained(setting, self.config.seed, EQUAL_STEPS)
        one = self.arena.trained(replace(setting, plan=single), self.config.seed, EQUAL_STEPS)
        found = equality(plan, ranks.losses, one.losses, ranks.norms, one.norms)
        return replace(result, equality=found, loss_difference=ranks.losses[-1] - one.losses[-1])

    def _baseline_result(self, noise: Noise | None) -> RungResult:
        first = self.arena.baseline
        result = RungResult(
            name="baseline",
            title="baseline fp32",
            why=BASELINE_WHY,
            status="baseline",
            plan=first.plan.line(),
            forecast=self._forecast(first, first, "samples"),
            losses=noise.curves[0] if noise else (),
            loss=noise.losses[0] if noise else None,
            loss_difference=0.0 if noise else None,
        )
        return self._measured(result, first, first, 0)

    def _seconds_left(self) -> float:
        """What is left of the budget; without one, no end."""
        return (
            math.inf
            if self.config.budget is None
            else self.config.budget - (time.perf_counter() - self.start)
        )

    def _pace(self, setting: Setting) -> float:
        """Seconds per sample of a setting, as last measured."""
        return self.arena.step_seconds(setting) / self.subject.samples(setting)

    def _fit_into_budget(self, rungs: int) -> None:
        """Shorten the loss runs, all alike, so that they take no more than their share."""
        if self.config.budget is None or not self.loss_steps:
            return
        runs = rungs + self.config.seeds + 1
        step = self.arena.step_seconds(self.arena.baseline)
        affordable = int(LOSS_SHARE * self._seconds_left() / (runs * step))
        if affordable < self.loss_steps:
            self.loss_steps = affordable if affordable >= LEAST_LOSS_STEPS else 0
            said = f"to {self.loss_steps} steps" if self.loss_steps else "to none"
            self.notes.append(f"The budget shortened loss runs from {self.config.loss_steps} steps {said}.")

    def _rounds(self, setting: Setting, remaining: int) -> int:
        """As many rounds as wished, or as fit into this rung's part of what is left; at least two.

        Two are enough for a setting that the warm-up has shown to be hopeless.
        """
        step = self.arena.step_seconds
        if self._pace(setting) * HOPELESS > self._pace(self.arena.best):
            return 2
        if self.config.budget is None:
            return self.config.rounds
        each = sum(
            max(self.config.round_seconds, step(s)) for s in {setting, self.arena.best, self.arena.baseline}
        )
        fit = int((self._seconds_left() / remaining - self.loss_steps * step(setting)) / each)
        return max(2, min(self.config.rounds, fit))

    def _least_seconds(self, setting: Setting, forecast: Forecast) -> float:
        """The least time that measuring a setting takes, if its speed is as predicted."""
        samples, first = self.subject.samples(setting), self._pace(self.arena.baseline)
        pace = self._predict(self.arena.baseline).samples_per_second / forecast.samples_per_second
        compiling = 0.0
        if setting.plan.compile != self.arena.best.plan.compile:
            compiling = COMPILE_SECONDS[setting.plan.compile]
        trained = 2 * EQUAL_STEPS if setting.plan.gpus > 1 else self.loss_steps
        return compiling + first * pace * samples * (measure.WARM_UP_STEPS + 2 + trained)

    def _report(self, results: list[RungResult], noise: Noise | None) -> LadderReport:
        best, measured = self.arena.best, [r for r in results if r.status in ("baseline", "kept")][-1]
        assert measured.to_baseline is not None
        assert measured.samples_per_second is not None
        change, deviation = measured.loss_difference, noise.deviation if noise else 0.0
        chosen = Chosen(
            plan=best.plan.line(),
            model=_model_changes(self.subject.first.model, best.model),
            rungs=tuple(r.name for r in results if r.status == "kept"),
            train_command=self.subject.train_command(best),
            speedup=measured.to_baseline,
            samples_per_second=measured.samples_per_second,
            predicted=measured.forecast.to_baseline if measured.forecast else 1.0,
            memory_bytes=measured.memory_bytes,
            loss_difference=change,
            within_noise=None if noise is None or change is None else abs(change) <= 2 * deviation,
        )
        return LadderReport(
            title=self.subject.title,
            unit=self.subject.unit,
            rungs=tuple(results),
            same=chosen,
            fastest=None,
            control=None,
            tried=(),
            candidates=0,
            noise=noise,
            batch=self.subject.first.plan.micro_batch,
            rounds=self.config.rounds,
            loss_steps=self.loss_steps,
            machine=to_dict(self.machine),
            environment=record.environment(),
            command=command_of(self.config),
            wall_seconds=time.perf_counter() - self.start,
            procs=self.config.procs,
            notes=tuple(self.notes),
        )
