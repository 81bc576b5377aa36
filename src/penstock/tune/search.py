"""Finds the fastest settings for a script: one rung after the other, kept only where it is faster beyond the noise.

The script as it is, the fastest so far and the one that is tried are processes of their own, which take turns of some
optimizer steps. Free of torch, which only those processes load.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from penstock.config import rules
from penstock.config.load import from_dict
from penstock.config.machine import Machine
from penstock.config.plan import Plan
from penstock.errors import ConfigError, OutOfMemory
from penstock.ladder.judge import NO_GAIN, UNPROVEN, tail_mean
from penstock.ladder.result import Estimate, Nearest
from penstock.ladder.rung import PlanChange, Rung, Setting, group_of
from penstock.ladder.statistics import FEWEST, SMALL
from penstock.tune.fit import CHANGES_RESULTS, OFFLOAD, RECOMPUTE, SDPA, rungs_for, situation_of, unfit
from penstock.tune.process import ScriptCommand, ScriptEnded, ScriptProcess
from penstock.tune.result import TuneReport, TuneStep
from penstock.tune.settings import TuneConfig
from penstock.tune.turns import LEAST_LOSS_STEPS, LONGEST_WARM_UP, SEEDS, Turns

_SCRIPT_OWN = ("master",)
"""Settings of rungs that mean nothing for a script."""
CONTROL_ROUNDS, MOST_ROUNDS = 8, 14
UNPREDICTED = ("padding", "attention", "fuse", "loss", "experts")
"""Groups of rungs that compute other operators than were recorded of the script as it is."""
LAST_RACE = 0.15
"""Share of the time that is kept for the last race."""
PAIRED = 0.85
"""Speed from which a rung that does not pay alone is tried once more, together with others or on top of them."""
MOST_LONGER = 50.0

Tell = Callable[[str], None]


def tune(command: ScriptCommand, config: TuneConfig, tell: Tell = lambda words: None) -> TuneReport:
    """Find the fastest settings for a script. `tell` is called with what comes next.

    Raises:
        ConfigError: the script cannot be timed, with the reason.
        OutOfMemory: it runs out of memory as it is, and with recomputation too.
    """
    rungs = rungs_for(config)
    tuning = _Tuning(command, config, tell)
    try:
        return tuning.run(rungs)
    finally:
        tuning.turns.close_all()


class _Tuning:
    """One tuning. `run` reads from top to bottom as what happens."""

    def __init__(self, command: ScriptCommand, config: TuneConfig, tell: Tell) -> None:
        self.command, self.config, self._say = command, config, tell
        self.turns = Turns(command, config)
        self.start = time.perf_counter()
        self.notes: list[str] = []
        self.predicted: dict[str, float | None] = {}
        """The planner's speed of each rung alone."""

    def run(self, rungs: Sequence[Rung]) -> TuneReport:
        """Find the fastest settings."""
        machine = self._look(rungs)
        if self.turns.first:
            rungs = [OFFLOAD, *rungs]
        path: list[TuneStep] = []
        others: dict[str, TuneStep] = {}
        end = self.start + (1 - LAST_RACE) * self.config.budget
        safe = [rung for rung in rungs if rung.name not in CHANGES_RESULTS]
        best = self._climb([[rung] for rung in safe], self.turns.first, path, others, end)
        best = self._climb(self._together(safe, path, others), best, path, others, end)
        best = self._climb(self._undecided(safe, others, best), best, path, others, end)
        offered: list[TuneStep] = []
        fastest = self._climb(
            [[rung] for rung in rungs if rung.name in CHANGES_RESULTS], best, offered, others, end
        )
        self._race(list(dict.fromkeys([self.turns.first, best, fastest])))
        return self._report(path, offered, others, machine)

    # -- the script as it is

    def _look(self, rungs: Sequence[Rung]) -> Machine:
        """Run the script as it is twice side by side, with other seeds in the second, and learn what it is."""
        self.tell("starting the script as it is")
        try:
            self.turns.process((self.turns.first, 0))
        except ScriptEnded as end:
            if end.status != "out of memory":
                raise ConfigError(self._untimed(end)) from None
            self.tell("it runs out of memory; trying it with recomputation")
            self.turns.first = RECOMPUTE
            try:
                self.turns.process((self.turns.first, 0))
            except ScriptEnded as again:
                raise OutOfMemory(
                    f"The script {self.command.target} runs out of memory as it is ({end.why}), and with {RECOMPUTE} "
                    f"it does not run either: {again.why}. Give it a smaller batch."
                ) from None
            self.notes.append(
                f"The script runs out of memory as it is, so that all was measured with {RECOMPUTE}."
            )
        baseline, twin = (self.turns.first, 0), (self.turns.first, SEEDS[0])
        self.tell("the same again, to see what differs by chance")
        try:
            rounds = 0
            while rounds < FEWEST or (rounds < CONTROL_ROUNDS and self._spent() < 0.15 * self.config.budget):
                self.turns.play([baseline, twin])
                rounds += 1
            self.turns.floor = self.turns.journal.joint().noise_floor(baseline, twin)
            self.turns.lengthen(twin)
            self.facts, known = self.turns.process(twin).facts()
            machine = from_dict(Machine, known, origin="the script's machine")
            self.situation = situation_of(self.facts, machine)
            self.predicted = self._predictions(self.turns.process(twin), rungs)
            self.turns.close(twin)
            other = (self.turns.first, SEEDS[1])
            if self._affordable(1):
                self.turns.process(other)
                self.turns.lengthen(other)
                self.turns.close(other)
        except ScriptEnded as end:
            raise ConfigError(self._untimed(end)) from None
        return machine

    def _predictions(self, process: ScriptProcess, rungs: Sequence[Rung]) -> dict[str, float | None]:
        """The planner's speed of each rung alone to the script as it is."""
        alone = {r.name: self._with(r, self.turns.first) for r in rungs if group_of(r) not in UNPREDICTED}
        form = self.facts.form or ("foreach" if self.facts.device == "cuda" else "loop")
        plans = {
            name: line if "optimizer=" in line else f"{line} optimizer={form}"
            for name, (why, line) in alone.items()
            if not why
        }
        speeds = process.predicted(f"{self.turns.first} optimizer={form}".strip(), list(plans.values()))
        return {name: speeds.get(line) for name, line in plans.items()}

    def _untimed(self, end: ScriptEnded) -> str:
        """Why a script cannot be timed."""
        what = f"penstock tune cannot time {self.command.target}"
        if end.status != "ended":
            return f"{what}: {end.why}."
        if end.steps == 0:
            return (
                f"{what}: it ended without a step of an optimizer of torch.optim, and steps are what is timed"
                + (f" ({end.why})" if end.why else "")
                + ". Give the script that trains, with the arguments that let it train."
            )
        return (
            f"{what}: it ended after {end.steps} optimizer step{'s' * (end.steps > 1)}, and warming up and a turn take "
            f"at least {LONGEST_WARM_UP + FEWEST}; give it more by its own arguments, or more data."
        )

    # -- rungs

    def _climb(
        self,
        groups: Iterable[Sequence[Rung]],
        best: str,
        path: list[TuneStep],
        others: dict[str, TuneStep],
        end: float,
    ) -> str:
        """Put groups of rungs on top of the best, one after the other, and return the best line in the end."""
        for group in groups:
            step = self._tried(group, best, end)
            if step.status in ("kept", "offered"):
                best = step.line
                path.append(step)
                others.pop(step.name, None)
                self.turns.keep([best])
            elif step.name not in others or step.ratio is not None:
                others[step.name] = step
        return best

    def _tried(self, group: Sequence[Rung], best: str, end: float) -> TuneStep:
        """A group of rungs measured on top of the best."""
        name, title = "+".join(r.name for r in group), " and ".join(r.title for r in group)
        step = TuneStep(name=name, title=title, status="unsupported", before=best)
        line = best
        for rung in group:
            why, line = self._with(rung, line)
            if why:
                return replace(step, reason=why)
        step = replace(step, line=line)
        compiles = Plan.parse(line).compile != "none"
        if not self._affordable(FEWEST, best, compiles=compiles, until=end):
            return replace(step, status="not run", reason="too little time was left; --budget gives more")
        self.tell(f"{title}, on top of {best or 'the script as it is'}")
        try:
            self._race_two(line, best, end)
        except ScriptEnded as ended:
            self.turns.close((line, 0))
            status = ended.status if ended.status in ("unsupported", "out of memory", "failed") else "failed"
            return replace(step, status=status, reason=ended.why)
        outcome = self.turns.verdict(line, best)
        different, allowed = self.turns.difference(line)
        self.turns.close((line, 0)) if outcome != "faster" else None
        ratio = self.turns.ratio(line, best)
        step = replace(
            step, ratio=ratio, compile_seconds=self.turns.compiling.get(line), loss_difference=different,
            allowed_difference=allowed, memory_bytes=self.turns.memory.get((line, 0)),
            predicted=self.predicted.get(name),
        )  # fmt: skip
        self.tell(
            f"    {ratio.value:.2f}× ({ratio.low:.2f} to {ratio.high:.2f})" if ratio else "    not measured"
        )
        if not self.turns.is_finite(line):
            return replace(step, status="not kept", reason="its loss became infinite or NaN")
        changes = any(rung.results == "rounding" for rung in group)
        if changes and different is not None and allowed is not None and abs(different) > allowed:
            return replace(
                step, status="not kept", reason="its loss differs by more than seeds and rounding explain"
            )
        if outcome != "faster":
            return replace(step, status="not kept", reason=NO_GAIN[outcome])
        return replace(step, status="offered" if group[0].name in CHANGES_RESULTS else "kept")

    def _with(self, rung: Rung, line: str) -> tuple[str, str]:
        """Why a rung cannot be put on a line, or nothing; and the line with it."""
        facts, plan = self.facts, Plan.parse(line)
        assert isinstance(rung.apply, PlanChange)
        values = {
            name: ",".join(value) if isinstance(value, tuple) else value
            for name, value in rung.apply.values(self.situation).items()
            if name not in _SCRIPT_OWN
        }
        named = {word.partition("=")[0]: word for word in line.split()}
        if "compile" in values and "offload" in named:  # which eager blocks alone do
            del named["offload"]
            named["recompute"] = RECOMPUTE
        if all(named.get(name) == f"{name}={value}" for name, value in values.items()):
            return "it is there already", line
        why = unfit(rung, facts, self.situation.machine)
        if not why and rung is not SDPA:
            why = rung.hindrance(Setting(model=None, plan=plan), self.situation) or ""
        changed = " ".join(
            [*(w for n, w in named.items() if n not in values), *(f"{n}={v}" for n, v in values.items())]
        )
        if not why:
            why = next(iter(rules.problems(Plan.parse(changed), None, self.situation.machine, run=True)), "")
        return why, changed

    def _together(
        self, rungs: Sequence[Rung], path: Sequence[TuneStep], others: dict[str, TuneStep]
    ) -> list[list[Rung]]:
        """Groups worth another try: half precision once something is compiled, or both together."""
        named = {rung.name: rung for rung in rungs}

        def measured(name: str, above: float = 0.0) -> bool:
            step = others.get(name)
            if step is None or step.status != "not kept" or step.ratio is None:
                return False
            return step.ratio.value > above

        # However slow half precision is alone: its casts may take more time than its products save.
        half = [name for name in named if name.startswith("half-") and measured(name)]
        compiled = [name for name in named if name.startswith("compile-") and measured(name, PAIRED)]
        if any(step.name.startswith("compile-") for step in path):
            attention = [name for name in named if name.startswith("attention-") and measured(name, PAIRED)]
            return [[named[name]] for name in (*half, *attention)]
        return [[named[one], named[other]] for one in half[:1] for other in compiled[:1]]

    def _undecided(self, rungs: Sequence[Rung], others: dict[str, TuneStep], best: str) -> list[list[Rung]]:
        """Rungs worth another try on top of the best, the most promising first: those that were measured on top of less
        and may have been faster. What they save is a larger share of a step that has become shorter."""

        def speed(rung: Rung) -> float:
            step = others.get(rung.name)
            if step is None or step.status != "not kept" or step.reason not in NO_GAIN.values():
                return 0.0
            return step.ratio.value if step.ratio and step.before != best and step.ratio.high > 1.0 else 0.0

        return [[rung] for rung in sorted(rungs, key=speed, reverse=True) if speed(rung) > PAIRED]

    # -- races

    def _race_two(self, line: str, best: str, end: float) -> None:
        """Let a line and the best take turns until it is decided, or the time is up."""
        self.turns.keep([best, line])
        for turn in range(MOST_ROUNDS):
            self.turns.play([(best, 0), (line, 0)])
            enough = turn + 1 >= FEWEST and time.perf_counter() > end
            if enough or self.turns.verdict(line, best) != "open":
                return

    def _race(self, lines: Sequence[str]) -> None:
        """Let the script as it is and the best take turns until the interval is within ±5 %, or the time is up."""
        if len(lines) == 1:
            return
        self.tell("the fastest against the script as it is")
        self.turns.keep(lines)
        for turn in range(MOST_ROUNDS):
            ratios = [self.turns.ratio(line, self.turns.first) for line in lines[1:]]
            narrow = all(r is not None and r.high <= (1 + SMALL) * r.value for r in ratios)
            if (turn >= self.config.rounds and narrow) or (turn >= FEWEST and self._left() < 0):
                return
            try:
                self.turns.play([(line, 0) for line in lines])
            except ScriptEnded as ended:
                self.notes.append(f"The last race ended early: {ended.why}.")
                return

    # -- time

    def tell(self, words: str) -> None:
        """Say what comes next."""
        spent, budget = (f"{int(s) // 60}:{int(s) % 60:02d}" for s in (self._spent(), self.config.budget))
        self._say(f"[{spent} of {budget}] {words}")

    def _spent(self) -> float:
        return time.perf_counter() - self.start

    def _left(self) -> float:
        return self.config.budget - self._spent()

    def _affordable(
        self, rounds: int, best: str = "", *, compiles: bool = False, until: float = math.inf
    ) -> bool:
        """Whether a process can be started, and take so many turns beside the best."""
        step = max(
            self.config.round_seconds,
            self.turns.seconds.get((best, 0), self.turns.seconds[self.turns.first, 0]),
        )
        compiling = max(self.turns.compiling.values(), default=10.0) if compiles else 0.0
        needed = self.turns.starting + compiling + 2 * rounds * step
        return time.perf_counter() + needed < min(until, self.start + self.config.budget)

    # -- the report

    def _report(
        self,
        path: list[TuneStep],
        offered: list[TuneStep],
        others: dict[str, TuneStep],
        machine: Machine,
    ) -> TuneReport:
        exact = Estimate.exact(1.0)
        steps = [self._judged(step) for step in (*path, *offered)]
        same, change = steps[: len(path)], steps[len(path) :]
        line, speedup, nearest = self.turns.first, exact, None
        if same:
            total = self.turns.ratio(same[-1].line, self.turns.first)
            assert total is not None  # they have raced
            if total.low > 1.0:
                line, speedup = same[-1].line, total
            else:
                nearest = self._nearest(same[-1].line, total)
                same = [
                    replace(step, status="not kept", reason="nothing of it is beyond the noise in all rounds")
                    for step in same
                ]
        if not same and nearest is None:
            known = {
                s.line: s.to_baseline or s.ratio
                for s in others.values()
                if s.ratio and s.before == self.turns.first
            }
            ratios = {at: ratio for at, ratio in known.items() if ratio is not None}
            if ratios:
                best = max(ratios, key=lambda at: ratios[at].value)
                nearest = self._nearest(best, ratios[best])
        fastest = None
        if (
            change
            and (ratio := self.turns.ratio(change[-1].line, self.turns.first)) is not None
            and change[-1].status == "offered"
        ):
            fastest = (change[-1].line, ratio, self.run_command(change[-1].line))
        rest = [
            replace(s, to_baseline=self.turns.ratio(s.line, self.turns.first) if s.ratio else None)
            for s in others.values()
        ]
        if late := [step.title for step in rest if step.status == "not run"]:
            longer = 2 * math.ceil(self.config.budget)
            self.notes.append(f"Time was too short for {', '.join(late)}; --budget {longer} gives them more.")
        curves = [
            [x for x in self.turns.curve(self.turns.first, seed) if x is not None] for seed in (0, *SEEDS)
        ]
        length = min(map(len, curves))
        return TuneReport(
            script=shlex.join([self.command.target, *self.command.arguments]),
            facts=self.facts,
            step_seconds=self.turns.journal.joint().seconds((self.turns.first, 0)),
            floor=self.turns.floor,
            steps=(*same, *change, *rest),
            line=line,
            speedup=speedup,
            command=self.run_command(line),
            fastest=fastest,
            nearest=nearest,
            losses=tuple(tail_mean(c[:length]) for c in curves) if length >= LEAST_LOSS_STEPS else (),
            machine={"name": machine.name, "device": machine.device},
            wall_seconds=self._spent(),
            notes=tuple(self.notes),
        )

    def _judged(self, step: TuneStep) -> TuneStep:
        """A step that was taken, by all rounds of the run: what its interval does not hold apart from 1 is unproven."""
        ratio = self.turns.ratio(step.line, step.before)
        step = replace(step, ratio=ratio, to_baseline=self.turns.ratio(step.line, self.turns.first))
        if ratio is not None and ratio.low > 1.0:
            return step
        return replace(step, status="unproven", reason=UNPROVEN)

    def _nearest(self, line: str, ratio: Estimate) -> Nearest:
        gain, width, limit = (
            math.log(ratio.value),
            math.log(ratio.high / ratio.value),
            math.log1p(self.turns.floor),
        )
        longer = (width**2 - limit**2) / (gain**2 - limit**2) if gain > limit else math.inf
        budget = 1.5 * longer * self.config.budget if longer < MOST_LONGER else None
        return Nearest(plan=line, ratio=ratio, budget=budget)

    def run_command(self, line: str) -> str:
        """The command that runs the script under a line of settings."""
        command = self.command
        named = (["-m"] if command.module else []) + [command.target, *command.arguments]
        script = shlex.join(named)
        if command.procs > 1:
            launcher = f"torchrun --nproc-per-node {command.procs}"
            return f'{launcher} -m penstock run --plan "{line}" {script}' if line else f"{launcher} {script}"
        return f'penstock run --plan "{line}" {script}' if line else f"python {script}"
