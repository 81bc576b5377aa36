"""The ladder: finds the fastest Plan with the same results, and says what each optimisation on the way to it gains.

Search, then climb: `search` finds the setting and its path, this file reads from top to bottom as what happens, and
makes the report. A setting that cannot be built, runs out of memory or fails is reported, and the climb goes on.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from penstock.config.load import load, to_dict
from penstock.config.machine import Machine, load_machine
from penstock.config.model import ModelConfig
from penstock.errors import EnvironmentProblem
from penstock.ladder import measure
from penstock.ladder.account import Account
from penstock.ladder.arena import Arena, busy_seconds
from penstock.ladder.factory import Factory
from penstock.ladder.judge import NO_GAIN, UNPROVEN, WORTH
from penstock.ladder.losses import Losses
from penstock.ladder.offer import Offer
from penstock.ladder.own import subject_of
from penstock.ladder.result import Control, LadderReport, Nearest, Phase, Progress, RungResult
from penstock.ladder.rung import Rung, Setting, Situation
from penstock.ladder.rungs import choose
from penstock.ladder.search import MOST_ROUNDS, Search
from penstock.ladder.settings import QUICK_LOSS_STEPS, LadderConfig, command_of
from penstock.ladder.space import Candidate, Space
from penstock.ladder.statistics import FEWEST, FLOOR, SMALL
from penstock.ladder.subject import Subject
from penstock.ladder.team import Team, threads_of
from penstock.probe import machine_for, resolve_device
from penstock.report import record

UNTIL: dict[Phase, float] = {"search": 0.55, "top": 0.75, "path": 0.85, "apart": 0.96, "race": 1.0}
"""Share of the budget after which a phase begins nothing new; the next phase gets the rest."""
SCOUT_UNTIL = 0.42
"""Share of the budget after which the search looks at no new setting, and races the best of those it saw."""
CONTROL_ROUNDS, CONTROL_SHARE = 10, 0.06
"""Rounds of the baseline against itself, and what they may take of the budget."""
STANDINGS = 5
"""Plans whose speeds are reported while the climb goes on."""
BUSY = 0.1
"""Share of the cores that others may keep busy before that is reported."""
MOST_LONGER = 50.0
"""Times the budget beyond which a longer climb is no advice."""
BASELINE_WHY = "fp32, eager, an optimizer that loops over tensors, torch's own attention: the plain loop."

OnProgress = Callable[[Progress], None]
"""Called before anything that takes time."""


def ladder(
    model: str | ModelConfig | None = None,
    *,
    factory: str | Factory | None = None,
    config: LadderConfig | None = None,
    on_progress: OnProgress | None = None,
    **settings: Any,
) -> LadderReport:
    """Find the fastest Plan with the same results on this machine, and what each optimisation gains on the way to it.

    `model` is a preset's name or a configuration; `factory` instead brings any module: a function, or its path
    `package.module:name`, that returns (model, batch, loss) with `loss(model, batch)` a scalar tensor. `settings` are
    fields of `LadderConfig`, over `config`. `on_progress` is called with what comes next. Nothing is written; see
    `LadderReport` and `penstock.ladder.write`.

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
            loss_steps=min(settled.loss_steps, QUICK_LOSS_STEPS),
            round_seconds=min(settled.round_seconds, 0.1),
        )
    rungs = choose(settled.rungs, settled.skip)
    device = resolve_device(settled.device)
    _require_devices(settled.procs, device)
    began = time.perf_counter()
    machine = load_machine(settled.machine) if settled.machine else machine_for(device)
    with measure.side_by_side():
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
    """Notes for a reader on the subject's samples, and on several processes."""
    notes = []
    if (share := subject.unpacked_padding) is not None:
        notes.append(f"Documents are packed into samples: one document in each would be {share:.0%} padding.")
    if subject.procs == 1 or subject.device.type != "cpu":
        return notes
    alone, each = torch.get_num_threads(), threads_of(subject.procs)
    return [
        *notes,
        f"On this CPU one process computes with {alone} thread{'s' if alone > 1 else ''}, and each of "
        f"{subject.procs} with {each}.",
    ]


class _Climb:
    """One climb. `run` and `_climbed` are its phases from top to bottom."""

    def __init__(self, subject: Subject, machine: Machine, config: LadderConfig, tell: OnProgress) -> None:
        self.subject, self.machine, self.config, self.on_progress = subject, machine, config, tell
        self.situation: Situation = subject.situation(machine)
        self.start, self.budget = time.perf_counter(), config.seconds
        team = Team(subject, config)
        self.arena = Arena(subject, config.seed, config.round_seconds, team, self._tell)
        self.losses = Losses(self.arena, config.loss_steps, config.seed, config.seeds, self.budget)
        self.account = Account(subject, machine, self.arena, self.losses)
        self.arena.compile_until = lambda: self.start + self.budget
        self.phase: Phase = "baseline"
        self.search: Search | None = None
        self.notes: list[str] = _notes(subject)

    def run(self, rungs: Sequence[Rung]) -> LadderReport:
        """The report of all rungs, with a note where others used the machine meanwhile."""
        busy, own, began = busy_seconds(), time.process_time(), time.perf_counter()
        try:
            report = self._climbed(rungs)
        finally:
            self.arena.close()
        after, own = busy_seconds(), time.process_time() - own
        if busy is None or after is None or self.subject.procs > 1:
            return report
        others = max(0.0, (after - busy - own) / max(time.perf_counter() - began, 1e-9))
        if others > BUSY * (os.cpu_count() or 1):
            note = f"Other programs kept {others:.1f} of {os.cpu_count()} cores busy while this measured: "
            note += "settings took turns, so ratios stand, but a quiet machine tells small gains better."
            report = replace(report, notes=(*report.notes, note))
        return replace(report, others_busy=others)

    def _climbed(self, rungs: Sequence[Rung]) -> LadderReport:
        arena, first = self.arena, self.subject.first
        arena.build(first)
        control = self._control()
        space = Space(rungs, first, self.situation)
        search = self.search = Search(
            arena, space, lambda s: self.account.predict(s).samples_per_second, self.config.rounds
        )
        self.phase = "search"
        search.scout(self.start + SCOUT_UNTIL * self.budget)
        best = self._same_results(search, search.halve(self._until("search")))
        self.phase = "top"
        best = self._same_results(search, search.top(best, self._until("top")))
        self.phase = "path"
        # Rungs that change results may have been left out; then their time is the path's.
        others = [rung for rung in rungs if not rung.searched]
        best, path = search.path(best, self._until("apart" if not others else "path", weighing=True))
        if search.space.computes_otherwise(best):
            self.losses.curve(best.setting)
        for setting in (first, *(step.setting for _, step in path)):
            self.account.weigh(setting)
        self.phase = "apart"
        offer = Offer(self.account, search, self.situation, best.setting, [name for name, _ in path])
        offer.climb(others, self._until("apart"))
        self.phase = "race"
        self._race([first, best.setting, offer.best], [step.setting for _, step in path])
        # A Plan that all rounds together do not call faster is not recommended; a part of it may be.
        while path and not self._faster(best.setting, first):
            path = path[:-1]
            best = path[-1][1] if path else space.first
            if search.space.computes_otherwise(best):
                self.losses.curve(best.setting)
        return self._report(rungs, control, best, path, offer)

    def _faster(self, setting: Setting, over: Setting) -> bool:
        """Whether all rounds so far say that one setting is faster than another, beyond the noise."""
        return self.arena.verdict_of(setting, over, self.config.rounds) == "faster"

    def _control(self) -> Control | None:
        """Build the baseline twice, and see by how much the two differ; None where not even two rounds fit."""
        arena, first = self.arena, self.subject.first
        twin = replace(first, copy=1)
        affordable = int(CONTROL_SHARE * self.budget / (2 * arena.turn_seconds(first)))
        if affordable < 2:
            arena.floor = FLOOR
            self.notes.append(
                f"A step of the baseline takes {arena.turn_seconds(first):.1f} s. Too few fit into the time to compare "
                f"the baseline with itself, so the noise floor is taken to be {FLOOR:.1%}. A larger --budget tells "
                "more, and so do shorter steps (--batch, --model.sequence)."
            )
            return None
        arena.play([first, twin], max(FEWEST, min(CONTROL_ROUNDS, affordable)))
        ratio, processor = self.account.ratio(twin, first), self.account.processor_ratio(twin, first)
        assert ratio is not None  # the two have just raced
        arena.retire(twin)
        arena.floor = arena.wall.joint().noise_floor(first, twin)
        return Control(ratio=ratio, processor_ratio=processor, floor=arena.floor)

    def _same_results(self, search: Search, best: Candidate) -> Candidate:
        """The best whose loss is within the noise of seeds, where it computes in other types than the baseline."""
        while rounding := search.space.computes_otherwise(best):
            phase, self.phase = self.phase, "losses"
            self.losses.curve(best.setting)
            self.phase = phase
            if self.losses.within_noise(best.setting) is not False:
                break
            search.refused.append(rounding)
            titles = " and ".join(search.space.rungs[name].title for name in sorted(rounding))
            self.notes.append(
                f"With {titles} the loss differs by more than seeds explain, so no Plan has it."
            )
            best = search.best
        return best

    def _race(self, ends: Sequence[Setting], between: Sequence[Setting]) -> None:
        """Race first and last once more, and what is still built of the path between them: the joint estimate holds the
        whole ladder by both ends. It goes on until the intervals are narrow, or the time is up."""
        arena = self.arena
        racing = list(dict.fromkeys([*ends, *(s for s in between if not arena.building(s))]))
        if len(racing) == 1:
            return
        arena.keep = set(racing)
        arena.clear()
        end = self._until("race") - sum(map(arena.building, ends))
        if FEWEST * arena.round_of(racing) > end - time.perf_counter():
            racing = list(dict.fromkeys(ends))
        for turn in range(MOST_ROUNDS):
            done = turn >= self.config.rounds and all(map(self._narrow, racing))
            if turn >= FEWEST and (done or arena.round_of(racing) > end - time.perf_counter()):
                return
            arena.play(racing, 1)

    def _narrow(self, setting: Setting) -> bool:
        """Whether a setting's ratio to the baseline is known well enough to end before the time is up."""
        ratio = self.account.ratio(setting, self.subject.first)
        return ratio is not None and ratio.high <= (1 + SMALL) * ratio.value

    def _until(self, phase: Phase, *, weighing: bool = False) -> float:
        """Time after which a phase begins nothing new: at its share of the budget, or earlier, so that what must come
        can come.

        That is the path until it was climbed, `weighing` its steps, and the last race.
        """
        needed = 0.0
        if phase != "race" and self.search is not None:
            needed = FEWEST * self.arena.round_of([self.subject.first, self.search.best.setting])
        if phase in ("search", "top") and self.search is not None:
            needed += self.search.path_seconds()
        elif weighing and self.search is not None:
            needed += self.search.weighing_seconds()
        return self.start + min(UNTIL[phase] * self.budget, self.budget - needed)

    def _tell(self, doing: Any, words: str, settings: Sequence[Setting], expected: float) -> None:
        """Say what comes next, and how the race stands."""
        ranked = self.search.ranked()[:STANDINGS] if self.search else []
        standings = [
            (c.setting.plan.line(), self.account.ratio(c.setting, self.subject.first)) for c in ranked
        ]
        plans = tuple(setting.plan.line() for setting in settings)
        self.on_progress(
            Progress(
                phase=self.phase,
                doing=doing,
                what=words or f"{len(settings)} settings in turn",
                plans=plans,
                expected_seconds=expected,
                spent=time.perf_counter() - self.start,
                budget=self.budget,
                standings=tuple((plan, ratio) for plan, ratio in standings if ratio is not None),
            )
        )

    # The report

    def _baseline(self) -> RungResult:
        first = self.subject.first
        result = RungResult(
            name="baseline",
            title="baseline fp32",
            why=BASELINE_WHY,
            status="baseline",
            plan=first.plan.line(),
            forecast=self.account.forecast(first, first),
        )
        return self.account.with_figures(result, first, first)

    def _kept(
        self, search: Search, best: Candidate, path: Sequence[tuple[str, Candidate]]
    ) -> list[RungResult]:
        """Rungs of the best Plan in the order of the path, and those that have no step of their own on it."""
        results, before = [], search.space.first
        for name, step in path:
            result = self.account.result(search.space.rungs[name], step.setting)
            corrected = search.before.get(step.setting)
            forecast = self.account.forecast(step.setting, before.setting, corrected=corrected)
            result = replace(result, status="kept", forecast=forecast)
            if not search.proven(name, step, before, best):
                result = replace(result, status="unproven", reason=UNPROVEN)
            elif not self._faster(step.setting, before.setting):
                result = replace(result, reason=WORTH)
            result = self.account.with_figures(result, step.setting, before.setting)
            without = search.space.without(best, name)
            worth = None if without is None else self.account.ratio(best.setting, without.setting)
            results.append(replace(result, worth=worth))
            before = step
        for name in sorted(best.rungs - {name for name, _ in path}):
            reason = "it could not be built without what comes after it"
            result = self.account.result(search.space.rungs[name], best.setting)
            results.insert(0, replace(result, status="unproven", reason=reason))
        return results

    def _nearest(self, search: Search) -> Nearest | None:
        """The most promising of the Plans that are not faster beyond the noise, and what would decide it."""
        first, limit = self.subject.first, math.log1p(self.arena.floor)
        ratios = {
            c: self.account.ratio(c.setting, first) for c in search.ranked() if c is not search.space.first
        }
        known = {c: ratio for c, ratio in ratios.items() if ratio is not None}
        if not known:
            return None
        best = max(known, key=lambda c: known[c].value)
        estimate = known[best]
        gain, width = math.log(estimate.value), math.log(estimate.high / estimate.value)
        longer = (width**2 - limit**2) / (gain**2 - limit**2) if gain > limit else math.inf
        # Half as much again: the gain itself is known no better than this.
        budget = 1.5 * longer * self.budget if longer < MOST_LONGER else None
        return Nearest(plan=best.setting.plan.line(), ratio=estimate, budget=budget)

    def _left_out(self, search: Search, best: Candidate, rung: Rung) -> RungResult:
        """A rung that keeps results and is not in the best Plan: what it does there, or in the fastest that has it."""
        beside = search.space.with_one(best, rung.name)
        least = search.space.least.get(rung.name)
        if least is None:
            refusal = rung.refusal(self.subject.first, self.situation) or rung.refusal(
                best.setting, self.situation
            )
            return replace(self.account.result(rung), reason=refusal or "it is the baseline's already")
        candidate = beside
        if candidate is None or candidate.key not in search.measured:
            measured = [c for c in search.measured.values() if rung.name in c.rungs]
            failed = [c for c in search.failures if rung.name in c.rungs]
            if not measured and failed:
                status, reason = search.failures[failed[0]]
                result = self.account.result(rung, failed[0].setting)
                return replace(result, status=status, reason=reason)
            candidate = max(measured, key=search.speed, default=beside or least)
        search.forecast(candidate)
        result = self.account.result(rung, candidate.setting)
        corrected = search.before.get(candidate.setting, search.speed(candidate))
        forecast = self.account.forecast(candidate.setting, best.setting, corrected=corrected)
        result = replace(result, forecast=forecast)
        if candidate.key not in search.measured:
            ahead = search.speed(candidate) / search.speed(best)
            reason = f"forecast at {ahead:.2f}× the best Plan by what was measured of others"
            return replace(result, status="not run", reason=reason)
        result = self.account.with_figures(result, candidate.setting, best.setting)
        if not search.allowed(candidate):
            reason = "with it the loss differs by more than seeds explain"
        else:
            reason = NO_GAIN[self.arena.verdict_of(candidate.setting, best.setting, self.config.rounds)]
        reason = reason or "too little of the budget was left to move to it"
        if candidate is not beside:
            reason += " (with it, the fastest setting measured)"
        return replace(result, status="not kept", reason=reason)

    def _report(
        self,
        rungs: Sequence[Rung],
        control: Control | None,
        best: Candidate,
        path: Sequence[tuple[str, Candidate]],
        offer: Offer,
    ) -> LadderReport:
        search = self.search
        assert search is not None
        kept = self._kept(search, best, path)
        others = {
            r.name: self._left_out(search, best, r) for r in rungs if r.searched and r.name not in best.rungs
        }
        fastest = offer.best if offer.taken and self._faster(offer.best, best.setting) else None
        others |= {result.name: result for result in offer.results(carried=fastest is not None)}
        names = [result.name for result in kept]
        return LadderReport(
            title=self.subject.title,
            unit=self.subject.unit,
            rungs=(self._baseline(), *kept, *(others[rung.name] for rung in rungs if rung.name in others)),
            same=self.account.chosen(best.setting, names),
            fastest=None if fastest is None else self.account.chosen(fastest, (*offer.rungs, *offer.taken)),
            nearest=None if kept else self._nearest(search),
            control=control,
            tried=self.account.tried(search),
            candidates=search.space.size,
            noise=self.losses.noise_if_run,
            batch=self.subject.first.plan.micro_batch,
            rounds=self.config.rounds,
            loss_steps=self.losses.steps,
            machine=to_dict(self.machine),
            environment=record.environment(),
            command=command_of(self.config),
            wall_seconds=time.perf_counter() - self.start,
            procs=self.config.procs,
            notes=(*self.notes, *self.losses.notes),
        )
