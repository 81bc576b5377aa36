"""The ladder: finds the fastest Plan with the same results, and says what each optimisation on the way to it gains.

`search` finds the best setting and the path to it. This file runs the phases, in the order in which it reads, and makes
the report. A setting that cannot be built, runs out of memory or fails is reported, and the climb goes on.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from penstock.config.load import load, to_dict
from penstock.config.machine import Machine, load_machine
from penstock.config.model import ModelConfig
from penstock.errors import EnvironmentProblem
from penstock.ladder.account import NO_GAIN, UNPROVEN, WORTH, Account, Losses, changes
from penstock.ladder.course import Course, Greedy, OnProgress
from penstock.ladder.measure import Models, side_by_side
from penstock.ladder.own import Factory, subject_of
from penstock.ladder.result import Control, LadderReport, Phase, RungResult, Tried
from penstock.ladder.rung import Rung, Situation
from penstock.ladder.rungs import choose
from penstock.ladder.search import Search
from penstock.ladder.settings import QUICK_LOSS_STEPS, LadderConfig, command_of
from penstock.ladder.space import Candidate, Space
from penstock.ladder.statistics import FEWEST
from penstock.ladder.subject import Subject
from penstock.ladder.team import threads_of
from penstock.probe import machine_for, resolve_device

UNTIL: dict[Phase, float] = {"search": 0.55, "top": 0.75, "path": 0.85, "apart": 0.96, "race": 1.0}
"""Share of the budget after which a phase begins nothing new; the next phase gets the rest."""
SCOUT_UNTIL = 0.42
"""Share of the budget after which the search tries no new setting and races the best of those it has measured."""
BASELINE_WHY = "fp32, eager, an optimizer that loops over tensors, torch's own attention: the plain loop."


def ladder(
    model: str | ModelConfig | None = None, *, factory: str | Factory | None = None, config: LadderConfig | None = None,
    on_progress: OnProgress | None = None, **settings: Any,
) -> LadderReport:  # fmt: skip
    """Find the fastest Plan with the same results on this machine, and what each optimisation gains on the way to it.

    `model` is a preset's name or a configuration; `factory` instead brings any module: a function, or its path
    `package.module:name`, that returns (model, batch, loss), where `loss(model, batch)` is a scalar tensor. `settings`
    are fields of `LadderConfig` and override `config`. `on_progress` is called before each activity. No file is
    written; see `LadderReport` and `penstock.ladder.write`.

    Raises ConfigError for impossible settings, models and factories, EnvironmentProblem for a missing device, and
    whatever the baseline itself raises: without it there is nothing to compare with.
    """
    overrides = dict(settings)
    if model is not None:
        overrides["model"] = model
    if isinstance(factory, str):
        overrides["factory"] = factory
    settled = load(LadderConfig, overrides=overrides, base=config, origin="the call of ladder")
    if settled.quick:
        steps, seconds = min(settled.loss_steps, QUICK_LOSS_STEPS), min(settled.round_seconds, 0.1)
        settled = replace(settled, loss_steps=steps, round_seconds=seconds)
    rungs = choose(settled.rungs, settled.skip)
    device = resolve_device(settled.device)
    _require_devices(settled.procs, device)
    began = time.perf_counter()
    machine = load_machine(settled.machine) if settled.machine else machine_for(device)
    with side_by_side():
        subject = subject_of(settled, factory, device)
        climb = _Climb(subject, machine, settled, on_progress or (lambda progress: None))
        climb.start = max(began, climb.start - climb.budget / 3)  # probing counts, up to a third
        return climb.run(rungs)


def _require_devices(procs: int, device: torch.device) -> None:
    if device.type == "cuda" and procs > (gpus := torch.cuda.device_count()):
        raise EnvironmentProblem(
            f"procs is {procs}, and each process takes one GPU, but this machine has {gpus}. Give --procs {gpus}, or "
            "--device cpu, where processes share the cores."
        )


def _notes(subject: Subject) -> list[str]:
    """Notes for the reader on packed samples and on several processes."""
    notes = []
    if (share := subject.unpacked_padding) is not None:
        notes.append(
            f"Documents are packed into samples: with one document per sample {share:.0%} would be padding."
        )
    if subject.procs == 1 or subject.device.type != "cpu":
        return notes
    alone_threads, rank_threads = torch.get_num_threads(), threads_of(subject.procs)
    return [
        *notes,
        f"On this CPU one process computes with {alone_threads} thread{'s' if alone_threads > 1 else ''}, and each of "
        f"{subject.procs} with {rank_threads}.",
    ]


class _Climb(Course):
    """One climb of a model. `_climb` runs its phases from top to bottom."""

    search: Search

    def __init__(
        self, subject: Subject, machine: Machine, config: LadderConfig, on_progress: OnProgress
    ) -> None:
        self.subject, self.machine, self.config = subject, machine, config
        models = self.models = Models(subject, machine, config)
        super().__init__(models, config.seconds, config.rounds, config.round_seconds, on_progress)
        self.situation: Situation = subject.situation(machine)
        self.losses = Losses(self.arena, config.loss_steps, config.seed, config.seeds, self.budget)
        self.account = Account(self.arena, self.losses)
        self.notes += _notes(subject)

    def _climb(self, rungs: Sequence[Rung]) -> LadderReport:
        arena, first = self.arena, self.first
        arena.build(first)
        twin = replace(first, copy=1)
        control = self.control(twin)
        arena.retire(twin)
        space = Space(rungs, first, self.situation)
        search = self.search = Search(arena, space, lambda s: self.models.predict(s).samples_per_second)
        self.ranked = lambda: [candidate.setting for candidate in search.ranked()]
        self.phase = "search"
        search.scout(self.start + SCOUT_UNTIL * self.budget)
        best = self._same_results(search.halve(self._until("search")))
        self.phase = "top"
        best = self._same_results(search.top(best, self._until("top")))
        self.phase = "path"
        # If no rung changes results, the path may use their time too.
        others = [rung for rung in rungs if not rung.searched]
        best, path = search.path(best, self._until("apart" if not others else "path", weighing=True))
        if space.computes_otherwise(best):
            self.losses.measure(best.setting)
        steps = [step.setting for step in path.values()]
        for setting in (first, *steps):
            self.account.weigh(setting)
        self.phase = "apart"
        refusal = functools.partial(Rung.refusal, situation=self.situation)
        offer = Greedy(self.account, self.situation, best.setting, refusal, self.config.seed)
        offered_on = [*path]
        offer.climb(others, self._until("apart"))
        self.phase = "race"
        self.last_race([first, best.setting, offer.best], steps, self._until("race"))
        # Never recommend a Plan that all rounds together do not show to be faster; a shorter path may be.
        while path and not arena.faster(best.setting, first):
            path.popitem()
            best = [space.first, *path.values()][-1]
            if space.computes_otherwise(best):
                self.losses.measure(best.setting)
        return self._report(rungs, control, best, path, offer, offered_on)

    def _same_results(self, best: Candidate) -> Candidate:
        """The best candidate with the same results: if it computes in other types than the baseline, its loss must be
        within the noise of seeds."""
        search = self.search
        while rounding := search.space.computes_otherwise(best):
            phase, self.phase = self.phase, "losses"
            self.losses.measure(best.setting)
            self.phase = phase
            if self.losses.within_noise(best.setting) is not False:
                break
            search.refused.append(rounding)
            titles = " and ".join(search.space.rungs[name].title for name in sorted(rounding))
            self.notes.append(
                f"With {titles} the loss differs by more than seeds explain, so no Plan includes it."
            )
            best = search.best
        return best

    def _until(self, phase: Phase, *, weighing: bool = False) -> float:
        """Time after which a phase begins nothing new: its share of the budget, or earlier, so that time is left for
        the path (before it is climbed), for measuring the memory of its steps (`weighing`), and for the last race."""
        needed = 0.0
        if phase != "race":
            needed = FEWEST * self.arena.round_of([self.first, self.search.best.setting])
        if phase in ("search", "top"):
            needed += self.search.path_seconds()
        elif weighing:
            needed += self.search.path_seconds(built=True)
        return self.start + min(UNTIL[phase] * self.budget, self.budget - needed)

    # The report

    def _kept(self, best: Candidate, path: Mapping[str, Candidate]) -> list[RungResult]:
        """Results of the best Plan's rungs in the order of the path; rungs without a step of their own come first."""
        search = self.search
        results: list[RungResult] = []
        before = search.space.first
        for name, step in path.items():
            result = self.account.result(search.space.rungs[name], step.setting)
            corrected = search.before.get(step.setting)
            forecast = self.account.forecast(step.setting, before.setting, corrected=corrected)
            result = replace(result, status="kept", forecast=forecast)
            if not search.proven(name, step, before, best):
                result = replace(result, status="unproven", reason=UNPROVEN)
            elif not self.arena.faster(step.setting, before.setting):
                result = replace(result, reason=WORTH)
            result = self.account.with_figures(result, step.setting, before.setting)
            without = search.space.without(best, name)
            worth = None if without is None else self.account.ratio(best.setting, without.setting)
            results.append(replace(result, worth=worth))
            before = step
        for name in sorted(best.rungs - path.keys()):
            reason = "it could not be built without a rung that comes after it"
            result = self.account.result(search.space.rungs[name], best.setting)
            results.insert(0, replace(result, status="unproven", reason=reason))
        return results

    def _left_out(self, best: Candidate, rung: Rung) -> RungResult:
        """Result of a rung that keeps results but is not in the best Plan: as measured on top of that Plan, else in the
        fastest setting with this rung."""
        search = self.search
        on_best = search.space.with_one(best, rung.name)
        least = search.space.least.get(rung.name)
        if least is None:
            refusal = rung.refusal(self.first, self.situation) or rung.refusal(best.setting, self.situation)
            return replace(self.account.result(rung), reason=refusal or "the baseline already has it")
        candidate = on_best
        if candidate is None or candidate.key not in search.measured:
            measured = [c for c in search.measured.values() if rung.name in c.rungs]
            failed = [c for c in search.failures if rung.name in c.rungs]
            if not measured and failed:
                status, reason = search.failures[failed[0]]
                result = self.account.result(rung, failed[0].setting)
                return replace(result, status=status, reason=reason)
            candidate = max(measured, key=search.speed, default=on_best or least)
        search.forecast(candidate)
        result = self.account.result(rung, candidate.setting)
        corrected = search.before.get(candidate.setting, search.speed(candidate))
        forecast = self.account.forecast(candidate.setting, best.setting, corrected=corrected)
        result = replace(result, forecast=forecast)
        if candidate.key not in search.measured:
            ahead = search.speed(candidate) / search.speed(best)
            reason = f"forecast at {ahead:.2f}× the best Plan, from measurements of other settings"
            return replace(result, status="not run", reason=reason)
        result = self.account.with_figures(result, candidate.setting, best.setting)
        if not search.allowed(candidate):
            reason = "with it the loss differs by more than seeds explain"
        else:
            reason = NO_GAIN[self.arena.verdict_of(candidate.setting, best.setting)]
        reason = reason or "too little of the budget was left to adopt it"
        if candidate is not on_best:
            reason += " (with it, the fastest setting measured)"
        return replace(result, status="not kept", reason=reason)

    def _tried(self) -> tuple[Tried, ...]:
        """Every candidate that was measured, the fastest first."""
        rows = []
        for candidate in sorted(self.search.measured.values(), key=self.search.speed, reverse=True):
            setting = candidate.setting
            if (ratio := self.account.ratio(setting, self.first)) is None:
                continue
            predicted = self.models.forecast(setting, self.first).to_baseline
            corrected = self.search.before.get(setting, predicted)
            row = Tried(
                plan=setting.words, model=changes(self.first, setting), predicted=predicted, corrected=corrected,
                to_baseline=ratio, compile_seconds=self.arena.compile_seconds.get(setting),
                build_seconds=self.arena.build_seconds.get(setting, 0.0),
            )  # fmt: skip
            rows.append(row)
        return tuple(rows)

    def _report(
        self, rungs: Sequence[Rung], control: Control | None, best: Candidate, path: Mapping[str, Candidate],
        offer: Greedy, offered_on: Sequence[str],
    ) -> LadderReport:  # fmt: skip
        kept = self._kept(best, path)
        left_out = [rung for rung in rungs if rung.searched and rung.name not in best.rungs]
        others = {rung.name: self._left_out(best, rung) for rung in left_out}
        fastest = offer.best if offer.taken and self.arena.faster(offer.best, best.setting) else None
        carried = tuple(offer.attempts) if fastest is not None else ()
        others |= {result.name: result for result in offer.results(offer.attempts, carried=carried)}
        results = (*kept, *(others[rung.name] for rung in rungs if rung.name in others))
        chosen = self.account.chosen
        return self.report(
            rungs=(self.baseline("baseline fp32", BASELINE_WHY), *results),
            same_results=chosen(best.setting, [result.name for result in kept]),
            fastest=None if fastest is None else chosen(fastest, (*offered_on, *offer.taken)),
            nearest=None if kept else self.nearest(self.ranked()), control=control, tried=self._tried(),
            candidates=self.search.space.size, batch=self.first.plan.micro_batch, machine=to_dict(self.machine),
            command=command_of(self.config), procs=self.config.procs,
        )  # fmt: skip
