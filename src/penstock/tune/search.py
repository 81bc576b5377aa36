"""Finds the fastest settings for a script: rung by rung, each kept only if it is faster beyond the noise.

The unchanged script, the fastest settings so far and those being tried are separate processes, which take turns of some
optimizer steps. Free of torch, which only those processes load.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import replace

from penstock.config.fused import FUSED, FusedName
from penstock.config.load import from_dict, to_dict
from penstock.config.machine import Machine
from penstock.errors import ConfigError, OutOfMemory
from penstock.ladder.account import NO_GAIN, Account, Losses
from penstock.ladder.course import Attempt, Course, Greedy, OnProgress
from penstock.ladder.result import Control, LadderReport
from penstock.ladder.rung import PlanChange, Rung, Setting, Situation, joined
from penstock.ladder.rungs import choose
from penstock.ladder.settings import TuneConfig
from penstock.ladder.statistics import FEWEST
from penstock.tune.process import Facts, ScriptCommand, ScriptEnded, ScriptProcess
from penstock.tune.script import LONGEST_WARM_UP, LOSS_STEPS, Script, script_setting

SEEDS = (1, 2)
"""Numbers added to the unchanged script's seeds, to see how much chance changes its loss."""
UNPREDICTED = ("padding", "attention", "fuse", "loss", "experts")
"""Groups of rungs that change the operators which were recorded from the unchanged script."""
RACE_FROM = 0.85
"""Share of the budget after which no rung is begun; the rest is for the last race."""
PAIRED = 0.85
"""A rung that does not pay by itself but has at least this speed is tried again, with others or on top of them."""


def tune(
    command: ScriptCommand, config: TuneConfig, on_progress: OnProgress = lambda progress: None
) -> LadderReport:
    """Find the fastest settings for a script. `on_progress` is called before each activity.

    Raises:
        ConfigError: the script cannot be timed, with the reason.
        OutOfMemory: it runs out of memory unchanged, and with recomputation too.
    """
    rungs = rungs_for(config)
    return _Tuning(Script(command, config), on_progress).run(rungs)


class _Tuning(Course):
    """One tuning. `_climb` runs its phases from top to bottom."""

    def __init__(self, script: Script, on_progress: OnProgress) -> None:
        config = script.config
        super().__init__(script, config.budget, config.rounds, config.round_seconds, on_progress)
        self.script = script
        self.account = Account(self.arena, Losses(self.arena, LOSS_STEPS, 0, len(SEEDS), self.budget))

    def _climb(self, rungs: Sequence[Rung]) -> LadderReport:
        self.names = {rung.name for rung in (*SAVING, *rungs)}
        control = self._look(rungs)
        if self.first.line:
            rungs = [*SAVING, *rungs]
        safe = [rung for rung in rungs if rung.searched]
        end = self.start + RACE_FROM * self.budget
        self.phase = "search"
        greedy = Greedy(self.account, self.situation, self.first, self._refusal)
        self.ranked = lambda: [a.setting for a in reversed(greedy.attempts.values()) if a.paid]
        greedy.climb(safe, end, share=False)
        greedy.climb(self._together(safe, greedy), end, share=False)
        greedy.climb(self._undecided(safe, greedy), end, share=False)
        same = greedy.best
        self.phase = "apart"
        greedy.climb([rung for rung in rungs if not rung.searched], end, share=False)
        self.phase = "race"
        self.last_race([self.first, same, greedy.best], [], self.start + self.budget)
        return self._report(greedy, control)

    # -- the script as it is

    def _look(self, rungs: Sequence[Rung]) -> Control | None:
        """Run the unchanged script twice side by side, with other seeds in the second, and collect facts about it."""
        arena = self.arena
        try:
            self._start()
            twin, third = (replace(self.first, copy=seed) for seed in SEEDS)
            arena.build(twin)
            control = self.control(twin)
            second = self.script.open[twin]
            second.lengthen()
            process = second.process  # started again if its steps were used up
            self.facts, machine = process.facts()
            self.machine = from_dict(Machine, machine, origin="the script's machine")
            self.situation = situation_of(self.facts, self.machine)
            self._predict(process, rungs)
            arena.retire(twin)
            remaining = self.start + self.budget - time.perf_counter()
            if arena.building(third) + 2 * arena.turn_seconds(self.first) < remaining:
                arena.build(third)
                self.script.open[third].lengthen()
                arena.retire(third)
        except ScriptEnded as end:
            raise ConfigError(self._untimed(end)) from None
        return control

    def _start(self) -> None:
        """Start the script; if it runs out of memory, use it with recomputation as the baseline."""
        try:
            self.arena.build(self.first)
        except ScriptEnded as end:
            if end.status != "out of memory":
                raise
            self.script.first = self.arena.baseline = script_setting(RECOMPUTE)
            self.arena.keep = {self.first}
            try:
                self.arena.build(self.first)
            except ScriptEnded as again:
                raise OutOfMemory(
                    f"The script {self.script.command.target} runs out of memory as it is ({end.why}), and with "
                    f"{RECOMPUTE} it does not run either: {again.why}. Give it a smaller batch."
                ) from None
            self.notes.append(f"The script runs out of memory as it is: all was measured with {RECOMPUTE}.")

    def _predict(self, process: ScriptProcess, rungs: Sequence[Rung]) -> None:
        """Ask for the predicted speed of each single rung, relative to the unchanged script."""
        form = self.facts.form or ("foreach" if self.facts.device == "cuda" else "loop")
        first = self.first.line or ""
        lines = [
            rung.apply(self.first, self.situation).line or ""
            for rung in rungs
            if rung.group not in UNPREDICTED and self._refusal(rung, self.first) is None
        ]
        plans = {line: line if "optimizer=" in line else f"{line} optimizer={form}" for line in lines}
        speeds = process.predicted(f"{first} optimizer={form}".strip(), list(plans.values()))
        self.script.alone = {line: speeds[plan] for line, plan in plans.items() if plan in speeds}

    def _untimed(self, end: ScriptEnded) -> str:
        """Message why a script cannot be timed."""
        what = f"penstock tune cannot time {self.script.command.target}"
        if end.status != "ended":
            return f"{what}: {end.why}."
        if end.steps == 0:
            return (
                f"{what}: it ended without a step of an optimizer of torch.optim, and steps are what is timed"
                + (f" ({end.why})" if end.why else "")
                + ". Name the script that trains, with the arguments that make it train."
            )
        return (
            f"{what}: it ended after {end.steps} optimizer step{'s' * (end.steps > 1)}, and warming up and a turn take "
            f"at least {LONGEST_WARM_UP + FEWEST}; give it more steps through its own arguments, or more data."
        )

    # -- rungs

    def _refusal(self, rung: Rung, setting: Setting) -> str | None:
        """Why a rung cannot be added to a setting, or None."""
        if rung.apply(setting, self.situation) == setting:
            return "the settings already include it"
        own = unfit(rung, self.facts, self.machine) if rung.name in self.names else ""  # not a pair
        return own or rung.refusal(setting, self.situation)

    def _together(self, rungs: Sequence[Rung], greedy: Greedy) -> list[Rung]:
        """Rungs to try again: half precision after something was compiled, or both at once."""

        def lost(prefix: str, above: float = 0.0) -> list[Rung]:
            attempts = [greedy.attempts[rung.name] for rung in rungs if rung.name.startswith(prefix)]
            return [a.rung for a in attempts if a.result.status == "not kept" and _speed(a) > above]

        # Half precision may be slow without compiling: casts can cost more time than faster products save.
        half, compiled = lost("half-"), lost("compile-", PAIRED)
        if greedy.best.plan.compile != "none":
            return [*half, *lost("attention-", PAIRED)]
        return [joined(half_rung, compile_rung) for half_rung in half[:1] for compile_rung in compiled[:1]]

    def _undecided(self, rungs: Sequence[Rung], greedy: Greedy) -> list[Rung]:
        """Rungs to try again on the best settings, the most promising first: those that were measured on earlier
        settings and may be faster. They now save a larger share of a shorter step."""

        def promise(rung: Rung) -> float:
            attempt = greedy.attempts[rung.name]
            ratio = attempt.result.to_previous
            lost = attempt.result.status == "not kept" and attempt.result.reason in NO_GAIN.values()
            again = lost and attempt.before != greedy.best and ratio is not None and ratio.high > 1.0
            return _speed(attempt) if again else 0.0

        return [rung for rung in sorted(rungs, key=promise, reverse=True) if promise(rung) > PAIRED]

    # -- the report

    def _report(self, greedy: Greedy, control: Control | None) -> LadderReport:
        attempts = [*greedy.attempts.values()]
        paid = [a for a in attempts if a.paid and a.rung.searched]
        offered = [a for a in attempts if a.paid and not a.rung.searched]
        # Recommend only settings that all rounds together show to be faster, and no part that was not raced again.
        path = paid if paid and self.arena.faster(paid[-1].setting, self.first) else []
        same = path[-1].setting if path else self.first
        fastest = greedy.best if offered and self.arena.faster(greedy.best, same) else None
        names, more = _names(path), _names(offered if fastest else [])
        order = dict.fromkeys([*_names(paid), *_names(offered), *greedy.attempts])
        results = greedy.results(order, carried=[*names, *more])
        if late := [result.title for result in results if result.status == "not run"]:
            longer = 2 * math.ceil(self.budget)
            self.notes.append(f"Time was too short for {', '.join(late)}; --budget {longer} gives them more.")
        account, script = self.account, self.script
        return self.report(
            rungs=(self.baseline("the script as it is", "The script without any change."), *results),
            same_results=account.chosen(same, names),
            fastest=None if fastest is None else account.chosen(fastest, [*names, *more]),
            nearest=None if path else self.nearest(a.setting for a in attempts if a.result.measured), control=control,
            tried=(), candidates=0, batch=None, machine=to_dict(self.machine), command=script.tune_command,
            procs=script.command.procs, script=dataclasses.asdict(self.facts),
        )  # fmt: skip


def _speed(attempt: Attempt) -> float:
    ratio = attempt.result.to_previous
    return 0.0 if ratio is None else ratio.value


def _names(attempts: Sequence[Attempt]) -> list[str]:
    return [attempt.rung.name for attempt in attempts]


# -- rungs of the ladder that can be applied to a script from outside, and why others do not fit it


TUNED = (
    "padding", "optimizer-fused", "optimizer-foreach", "matmul", "matmul-probed", "half-bf16", "half-fp16",
    "attention-plain", "attention-flash", "attention-efficient", "attention-cudnn", "compile-blocks", "compile-whole",
    "fuse-residual_norm", "fuse-bias_activation", "fuse-all", "loss-chunked", "experts-loop", "memory", "int8", "fp8",
)  # fmt: skip
"""Rungs of the ladder that can be applied to a script from outside, in the order of trying them: first those that save
work, last those that change results."""
CHANGES_RESULTS = ("int8", "fp8")
SDPA = Rung(
    name="attention-sdpa", place=590, title="torch's attention", apply=PlanChange({"attention": "sdpa"}),
    why="Attention is one call of torch's instead of products and a softmax, and keeps no scores in memory.",
)  # fmt: skip
RECOMPUTE = "recompute=early"
ELEMENTWISE = Rung(
    name="recompute-elementwise", place=40, title="products kept", apply=PlanChange({"recompute": "elementwise"}),
    why="Norms and activations are recomputed; outputs of attention and matrix products are kept.",
)  # fmt: skip
OFFLOAD = Rung(
    name="offload", place=50, title="activations on the host",
    apply=PlanChange({"recompute": "none", "offload": "activations"}),
    why="Tensors that blocks save for the backward pass are kept in host memory instead of being recomputed.",
)  # fmt: skip
SAVING = (ELEMENTWISE, OFFLOAD)
"""Rungs that are also tried if a script runs out of memory without recomputation."""


def rungs_for(config: TuneConfig) -> list[Rung]:
    """The rungs to try, in their order. Raises ConfigError for unknown names, or if none can be applied to scripts."""
    only, skipped = (tuple(text.replace(",", " ").split()) for text in (config.rungs, config.skip))
    names = {rung.name: rung for rung in choose((), skipped)}
    asked_names = {rung.name for rung in choose(only, skipped)}
    if only and not asked_names & {*TUNED}:
        raise ConfigError(
            f"None of the rungs {', '.join(only)} can be applied to a script from outside; these can: "
            f"{', '.join(TUNED)}."
        )
    chosen = [names[name] for name in TUNED if name in names and name in asked_names]
    at = next((i for i, rung in enumerate(chosen) if rung.name.startswith("attention-")), None)
    return chosen if at is None else [*chosen[:at], SDPA, *chosen[at:]]


def situation_of(facts: Facts, machine: Machine) -> Situation:
    """The situation of a script, for the ladder's rungs."""
    switches = {name: tuple(values) for name, values in facts.switches.items()}
    if facts.eager:
        switches["attention"] = (*switches.get("attention", ()), "sdpa")
    share = facts.padding
    return Situation(machine=machine, micro_batch=1, splittable=False, switches=switches, padding_share=share)


def unfit(rung: Rung, facts: Facts, machine: Machine) -> str:
    """Why a rung is pointless or impossible for this script; empty if it is neither."""
    group, _, form = rung.name.partition("-")
    if group == "optimizer":
        return _unfit_form(form, facts)
    if not facts.model and rung.name not in ("matmul", "memory"):
        return "no module was called with gradients, so there is no model to change"
    if group in ("half", *CHANGES_RESULTS) and facts.mixed:
        return f"the script sets its own precision: {facts.mixed}"
    if group == "half":
        peaks = machine.peak_flops
        if machine.device == "cpu" and peaks.get(form, 0.0) <= peaks.get("fp32", math.inf):
            return f"this CPU has no units for {form}: it multiplies {form} no faster than fp32"
    if rung is SDPA and not facts.eager:
        return "it already calls torch's attention, or has no attention of transformers"
    if rung is OFFLOAD and facts.device == "cpu":
        return "on a CPU activations are in host memory already"
    if group in ("compile", "offload"):
        if facts.compiled:
            return "the script calls torch.compile itself"
        if (form == "blocks" or rung is OFFLOAD) and not facts.blocks:
            return facts.no_blocks.partition(". ")[0]
    if group == "fuse":
        return _unfit_fused(rung, facts)
    if group in CHANGES_RESULTS:
        return facts.products.get("int8_all" if group == "int8" else "fp8_tensorwise", "")
    return ""


def _unfit_fused(rung: Rung, facts: Facts) -> str:
    """Why fused operators do not fit the model, or need not be tried together."""
    assert isinstance(rung.apply, PlanChange)
    names: tuple[FusedName, ...] = rung.apply.fields["fuse"]
    absent = [FUSED[name].title for name in names if not facts.fused.get(name)]
    if not absent:
        return ""
    where = facts.no_blocks.partition(". ")[0] or f"no place of the model is known for {' or '.join(absent)}"
    return where if len(absent) == len(names) else "only one of them fits the model, and it has its own rung"


def _unfit_form(form: str, facts: Facts) -> str:
    if facts.form == form:
        return f"the script's {facts.optimizer} is {form} already"
    if form == "foreach" and facts.device == "cpu":
        return "on a CPU torch has no kernels for many tensors at once"
    if form == "foreach" and not facts.form:
        return "torch chooses it on a GPU already"
    return next((why for name, why in facts.forms.items() if name == form), "")
