"""Finds the fastest settings for a script: one rung after the other, kept only where it is faster beyond the noise.

The script as it is, the fastest so far and the one that is tried are processes of their own, which take turns of some
optimizer steps. Free of torch, which only those processes load.
"""

from __future__ import annotations

import math
import shlex
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.config import rules
from penstock.config.fused import FUSED, FusedName
from penstock.config.load import from_dict
from penstock.config.machine import Machine
from penstock.config.numerics import numerics_of
from penstock.config.plan import Plan
from penstock.errors import ConfigError, OutOfMemory
from penstock.ladder.judge import DEVIATIONS, NO_GAIN, TOLERANCES, UNPROVEN, tail_mean
from penstock.ladder.result import Estimate, Nearest
from penstock.ladder.rung import PlanChange, Rung, Setting, Situation, group_of
from penstock.ladder.rungs import choose
from penstock.ladder.statistics import FEWEST, FLOOR, SMALL, Journal, Verdict, verdict
from penstock.tune.facts import Facts
from penstock.tune.process import ScriptCommand, ScriptEnded, ScriptProcess
from penstock.tune.result import TuneReport, TuneStep

TUNED = (
    "padding", "optimizer-fused", "optimizer-foreach", "matmul", "half-bf16", "half-fp16", "attention-plain",
    "attention-flash", "attention-efficient", "attention-cudnn", "compile-blocks", "compile-whole",
    "fuse-residual_norm", "fuse-bias_activation", "fuse-all", "loss-chunked", "experts-loop", "memory", "int8", "fp8",
)  # fmt: skip
"""Rungs of the ladder that can be put on a script from outside, in the order in which they are tried: what leaves work
out comes first, what changes results last."""
CHANGES_RESULTS = ("int8", "fp8")
_SCRIPT_OWN = ("master",)
"""Settings of rungs that mean nothing for a script."""
_SDPA = Rung(
    name="attention-sdpa",
    place=590,
    title="torch's attention",
    why="Attention is one call of torch's, which keeps no scores in memory, in place of products and a softmax.",
    apply=PlanChange({"attention": "sdpa"}),
)
_RECOMPUTE = "recompute=early"
_OFFLOAD = Rung(
    name="offload",
    place=50,
    title="activations on the host",
    why="What blocks keep for the backward pass waits in host memory meanwhile, in place of being computed again.",
    apply=PlanChange({"recompute": "none", "offload": "activations"}),
)
"""Tried where a script runs out of memory without recomputation."""
WARM_UP, LONGEST_WARM_UP = 3, 8
"""Steps that are not timed: at the least, and as long as successive ones differ by more than half."""
UNEVEN = 1.5
MOST_STEPS = 64
"""Steps of a turn at the most."""
CONTROL_ROUNDS, MOST_ROUNDS = 8, 14
LOSS_STEPS, LEAST_LOSS_STEPS = 48, 8
"""Steps whose losses are compared, at the most and at the least."""
LOSS_SHARE = 0.05
"""Share of the time that a seed of the script as it is may take for that."""
SEEDS = (1, 2)
"""Numbers added to the seeds of the script as it is, to see how much chance changes its loss."""
UNPREDICTED = ("padding", "attention", "fuse", "loss", "experts")
"""Groups of rungs that compute other operators than were recorded of the script as it is."""
LAST_RACE = 0.15
"""Share of the time that is kept for the last race."""
PAIRED = 0.85
"""Speed from which a rung that does not pay alone is tried once more, together with others or on top of them."""
MOST_LONGER = 50.0

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneConfig:
    """The settings of tuning a script."""

    budget: float = 300.0
    """Seconds for everything."""
    rounds: int = 7
    """The least rounds before a difference under 5 % is believed."""
    round_seconds: float = 0.3
    """The least time of one turn."""
    rungs: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    output: str = "runs/tune"
    """Folder of what the processes write, and of the report."""
    timeout: float = 300.0
    """Seconds for the longest silence of a script, such as up to its first step."""


def tune(command: ScriptCommand, config: TuneConfig, tell: Tell = lambda words: None) -> TuneReport:
    """Find the fastest settings for a script. `tell` is called with what comes next.

    Raises:
        ConfigError: the script cannot be timed, with the reason.
        OutOfMemory: it runs out of memory as it is, and with recomputation too.
    """
    rungs = _chosen(config)
    tuning = _Tuning(command, config, tell)
    try:
        return tuning.run(rungs)
    finally:
        tuning.close()


def _chosen(config: TuneConfig) -> list[Rung]:
    """The rungs to try, in their order. Raises ConfigError for names that are none, or that scripts cannot have."""
    names = {rung.name: rung for rung in choose((), config.skip)}
    asked_names = {rung.name for rung in choose(config.rungs, config.skip)}
    if config.rungs and not asked_names & {*TUNED}:
        raise ConfigError(
            f"None of the rungs {', '.join(config.rungs)} can be put on a script from outside; these can: "
            f"{', '.join(TUNED)}."
        )
    chosen = [names[name] for name in TUNED if name in names and name in asked_names]
    at = next((i for i, rung in enumerate(chosen) if rung.name.startswith("attention-")), None)
    return chosen if at is None else [*chosen[:at], _SDPA, *chosen[at:]]


class _Tuning:
    """One tuning. `run` reads from top to bottom as what happens."""

    def __init__(self, command: ScriptCommand, config: TuneConfig, tell: Tell) -> None:
        self.command, self.config, self._say = command, config, tell
        self.folder = Path(config.output)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.start = time.perf_counter()
        self.first = ""
        """The line of the script as it is; recomputation where it runs out of memory without."""
        self.journal: Journal[tuple[str, int]] = Journal()
        self.floor = FLOOR
        self.notes: list[str] = []
        self.predicted: dict[str, float | None] = {}
        """The planner's speed of each rung alone."""
        self._processes: dict[tuple[str, int], ScriptProcess] = {}
        self._steps: dict[tuple[str, int], float] = {}
        """Seconds of a step, as last measured."""
        self._compiling: dict[str, float] = {}
        self._losses: dict[tuple[str, int], list[float | None]] = {}
        self._memory: dict[tuple[str, int], int | None] = {}
        self._starting = 0.0
        """Seconds from the start of a process until it is warm."""
        self._length = math.inf
        """Optimizer steps of the script, once it has ended."""
        self._turns = self._started = 0

    def run(self, rungs: Sequence[Rung]) -> TuneReport:
        """Find the fastest settings."""
        machine = self._look(rungs)
        if self.first:
            rungs = [_OFFLOAD, *rungs]
        path: list[TuneStep] = []
        others: dict[str, TuneStep] = {}
        end = self.start + (1 - LAST_RACE) * self.config.budget
        safe = [rung for rung in rungs if rung.name not in CHANGES_RESULTS]
        best = self._climb([[rung] for rung in safe], self.first, path, others, end)
        best = self._climb(self._together(safe, path, others), best, path, others, end)
        best = self._climb(self._undecided(safe, others, best), best, path, others, end)
        offered: list[TuneStep] = []
        fastest = self._climb(
            [[rung] for rung in rungs if rung.name in CHANGES_RESULTS], best, offered, others, end
        )
        self._race(list(dict.fromkeys([self.first, best, fastest])))
        return self._report(path, offered, others, machine)

    def close(self) -> None:
        """End all processes."""
        for key in list(self._processes):
            self._close(key)

    # -- the script as it is

    def _look(self, rungs: Sequence[Rung]) -> Machine:
        """Run the script as it is twice side by side, with other seeds in the second, and learn what it is."""
        self.tell("starting the script as it is")
        try:
            self._process((self.first, 0))
        except ScriptEnded as end:
            if end.status != "out of memory":
                raise ConfigError(self._untimed(end)) from None
            self.tell("it runs out of memory; trying it with recomputation")
            self.first = _RECOMPUTE
            try:
                self._process((self.first, 0))
            except ScriptEnded as again:
                raise OutOfMemory(
                    f"The script {self.command.target} runs out of memory as it is ({end.why}), and with {_RECOMPUTE} "
                    f"it does not run either: {again.why}. Give it a smaller batch."
                ) from None
            self.notes.append(
                f"The script runs out of memory as it is, so that all was measured with {_RECOMPUTE}."
            )
        baseline, twin = (self.first, 0), (self.first, SEEDS[0])
        self.tell("the same again, to see what differs by chance")
        try:
            rounds = 0
            while rounds < FEWEST or (rounds < CONTROL_ROUNDS and self._spent() < 0.15 * self.config.budget):
                self._play([baseline, twin])
                rounds += 1
            self.floor = self.journal.joint().noise_floor(baseline, twin)
            self._lengthen(twin)
            self.facts, known = self._processes[twin].facts()
            machine = from_dict(Machine, known, origin="the script's machine")
            self.situation = _situation(self.facts, machine)
            self.predicted = self._predictions(self._processes[twin], rungs)
            self._close(twin)
            other = (self.first, SEEDS[1])
            if self._affordable(1):
                self._process(other)
                self._lengthen(other)
                self._close(other)
        except ScriptEnded as end:
            raise ConfigError(self._untimed(end)) from None
        return machine

    def _predictions(self, process: ScriptProcess, rungs: Sequence[Rung]) -> dict[str, float | None]:
        """The planner's speed of each rung alone to the script as it is."""
        alone = {r.name: self._with(r, self.first) for r in rungs if group_of(r) not in UNPREDICTED}
        form = self.facts.form or ("foreach" if self.facts.device == "cuda" else "loop")
        plans = {
            name: line if "optimizer=" in line else f"{line} optimizer={form}"
            for name, (why, line) in alone.items()
            if not why
        }
        speeds = process.predicted(f"{self.first} optimizer={form}".strip(), list(plans.values()))
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
                self._keep([best])
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
            self._close((line, 0))
            status = ended.status if ended.status in ("unsupported", "out of memory", "failed") else "failed"
            return replace(step, status=status, reason=ended.why)
        outcome = self._verdict(line, best)
        different, allowed = self._difference(line)
        self._close((line, 0)) if outcome != "faster" else None
        ratio = self._ratio(line, best)
        step = replace(
            step, ratio=ratio, compile_seconds=self._compiling.get(line), loss_difference=different,
            allowed_difference=allowed, memory_bytes=self._memory.get((line, 0)), predicted=self.predicted.get(name),
        )  # fmt: skip
        self.tell(
            f"    {ratio.value:.2f}× ({ratio.low:.2f} to {ratio.high:.2f})" if ratio else "    not measured"
        )
        if not self._finite(line):
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
            named["recompute"] = _RECOMPUTE
        if all(named.get(name) == f"{name}={value}" for name, value in values.items()):
            return "it is there already", line
        why = _unfit(rung, facts, self.situation.machine)
        if not why and rung is not _SDPA:
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
        self._keep([best, line])
        for turn in range(MOST_ROUNDS):
            self._play([(best, 0), (line, 0)])
            enough = turn + 1 >= FEWEST and time.perf_counter() > end
            if enough or self._verdict(line, best) != "open":
                return

    def _race(self, lines: Sequence[str]) -> None:
        """Let the script as it is and the best take turns until the interval is within ±5 %, or the time is up."""
        if len(lines) == 1:
            return
        self.tell("the fastest against the script as it is")
        self._keep(lines)
        for turn in range(MOST_ROUNDS):
            ratios = [self._ratio(line, self.first) for line in lines[1:]]
            narrow = all(r is not None and r.high <= (1 + SMALL) * r.value for r in ratios)
            if (turn >= self.config.rounds and narrow) or (turn >= FEWEST and self._left() < 0):
                return
            try:
                self._play([(line, 0) for line in lines])
            except ScriptEnded as ended:
                self.notes.append(f"The last race ended early: {ended.why}.")
                return

    def _play(self, keys: Sequence[tuple[str, int]]) -> None:
        """One round, in which all take a turn; each round begins with another."""
        first = self._turns % len(keys)
        self._turns += 1
        self.journal.add({key: self._turn(key) for key in (*keys[first:], *keys[:first])})

    def _turn(self, key: tuple[str, int]) -> float:
        """Seconds per step of one turn. A script that is over begins again."""
        process = self._process(key)
        steps = min(MOST_STEPS, max(1, math.ceil(self.config.round_seconds / self._steps[key])))
        rest = int(min(self._length - process.steps, steps))
        if rest < max(1, steps // 4):
            self._close(key)
            process = self._process(key)
            rest = int(min(self._length - process.steps, steps))
        try:
            taken = process.turn(max(1, rest))
        except ScriptEnded as end:
            self._losses[key] = process.losses
            self._close(key)
            if end.status != "ended" or end.steps < LONGEST_WARM_UP + FEWEST:
                raise
            self._length = min(self._length, end.steps)
            return self._turn(key)
        self._steps[key], self._losses[key], self._memory[key] = taken, process.losses, process.memory
        return taken

    def _lengthen(self, key: tuple[str, int]) -> None:
        """Let a process make as many steps as losses are compared over, if time allows."""
        process = self._process(key)
        affordable = int(LOSS_SHARE * self.config.budget / self._steps[key])
        wanted = min(LOSS_STEPS - process.steps, affordable, self._length - process.steps - 1)
        if wanted > 0:
            with_end = process.steps + int(wanted)
            try:
                process.turn(int(wanted))
            except ScriptEnded as end:
                self._length = min(self._length, end.steps)
                if end.steps < with_end - 1 and end.status != "ended":
                    raise
                self._close(key)
                self._process(key)  # facts are asked of one that waits
        self._losses.setdefault(key, process.losses)
        if len(process.losses) > len(self._losses[key]):
            self._losses[key] = process.losses

    def _process(self, key: tuple[str, int]) -> ScriptProcess:
        """The process of a line and seed, started and warm. Raises ScriptEnded."""
        if key in self._processes:
            return self._processes[key]
        line, seed = key
        began = time.perf_counter()
        self._started += 1
        log = self.folder / f"{self._started}.log"
        process = ScriptProcess(self.command, line, seed, log, self.config.timeout)
        try:
            taken = [process.first_step()]
            while len(taken) < WARM_UP or (
                len(taken) < LONGEST_WARM_UP and max(taken[-2:]) > UNEVEN * min(taken[-2:])
            ):
                taken.append(process.turn(1))
        except BaseException:
            process.close()
            raise
        self._processes[key] = process
        self._steps[key] = min(taken[-2:])
        self._losses.setdefault(key, process.losses)
        if Plan.parse(line).compile != "none":
            self._compiling.setdefault(line, max(0.0, sum(taken) - len(taken) * self._steps[key]))
        self._starting = max(self._starting, time.perf_counter() - began - self._compiling.get(line, 0.0))
        return process

    def _keep(self, lines: Sequence[str]) -> None:
        """End the processes of all other lines."""
        for key in list(self._processes):
            if key[0] not in lines and key != (self.first, 0):
                self._close(key)

    def _close(self, key: tuple[str, int]) -> None:
        process = self._processes.pop(key, None)
        if process is not None:
            process.close()

    # -- what is known

    def _ratio(self, line: str, over: str) -> Estimate | None:
        return self.journal.joint().ratio((line, 0), (over, 0), self.floor)

    def _verdict(self, line: str, over: str) -> Verdict:
        ratio = self._ratio(line, over)
        return "open" if ratio is None else verdict(ratio, ratio.rounds, self.config.rounds)

    def _curve(self, line: str, seed: int = 0) -> list[float | None]:
        return self._losses.get((line, seed), [])[:LOSS_STEPS]

    def _difference(self, line: str) -> tuple[float | None, float | None]:
        """The loss of a line less the baseline's after the same steps, and what of that chance and rounding explain."""
        curves = [self._curve(line), *(self._curve(self.first, seed) for seed in (0, *SEEDS))]
        curves = [curve for curve in curves if curve]
        steps = min(len(curve) for curve in curves) if curves else 0
        if len(curves) < 2 + len(SEEDS) or steps < LEAST_LOSS_STEPS:
            return None, None
        known = [[loss for loss in curve[:steps] if loss is not None] for curve in curves]
        if any(len(curve) < steps for curve in known):
            return None, None  # the script's losses are no scalars
        tails = [tail_mean(curve) for curve in known]
        rounding = TOLERANCES[numerics_of(Plan.parse(line)).compute] * abs(tails[1])
        return tails[0] - tails[1], max(DEVIATIONS * statistics.stdev(tails[1:]), rounding)

    def _finite(self, line: str) -> bool:
        """Whether the losses of a line are numbers, or those of the script as it is are none either."""
        baseline = [loss for loss in self._curve(self.first) if loss is not None]
        own = [loss for loss in self._curve(line) if loss is not None]
        return all(map(math.isfinite, own)) or not all(map(math.isfinite, baseline))

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
        step = max(self.config.round_seconds, self._steps.get((best, 0), self._steps[self.first, 0]))
        compiling = max(self._compiling.values(), default=10.0) if compiles else 0.0
        needed = self._starting + compiling + 2 * rounds * step
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
        line, speedup, nearest = self.first, exact, None
        if same:
            total = self._ratio(same[-1].line, self.first)
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
                if s.ratio and s.before == self.first
            }
            ratios = {at: ratio for at, ratio in known.items() if ratio is not None}
            if ratios:
                best = max(ratios, key=lambda at: ratios[at].value)
                nearest = self._nearest(best, ratios[best])
        fastest = None
        if (
            change
            and (ratio := self._ratio(change[-1].line, self.first)) is not None
            and change[-1].status == "offered"
        ):
            fastest = (change[-1].line, ratio, self.run_command(change[-1].line))
        rest = [
            replace(s, to_baseline=self._ratio(s.line, self.first) if s.ratio else None)
            for s in others.values()
        ]
        if late := [step.title for step in rest if step.status == "not run"]:
            longer = 2 * math.ceil(self.config.budget)
            self.notes.append(f"Time was too short for {', '.join(late)}; --budget {longer} gives them more.")
        curves = [[x for x in self._curve(self.first, seed) if x is not None] for seed in (0, *SEEDS)]
        length = min(map(len, curves))
        return TuneReport(
            script=shlex.join([self.command.target, *self.command.arguments]),
            facts=self.facts,
            step_seconds=self.journal.joint().seconds((self.first, 0)),
            floor=self.floor,
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
        ratio = self._ratio(step.line, step.before)
        step = replace(step, ratio=ratio, to_baseline=self._ratio(step.line, self.first))
        if ratio is not None and ratio.low > 1.0:
            return step
        return replace(step, status="unproven", reason=UNPROVEN)

    def _nearest(self, line: str, ratio: Estimate) -> Nearest:
        gain, width, limit = math.log(ratio.value), math.log(ratio.high / ratio.value), math.log1p(self.floor)
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


def _situation(facts: Facts, machine: Machine) -> Situation:
    return Situation(
        machine=machine,
        micro_batch=1,
        splittable=False,
        switches={name: tuple(values) for name, values in facts.switches.items()},
        padding_share=facts.padding,
    )


def _unfit(rung: Rung, facts: Facts, machine: Machine) -> str:
    """Why a rung says nothing for this script, or nothing."""
    group, _, form = rung.name.partition("-")
    if group == "optimizer":
        return _unfit_form(form, facts)
    if not facts.model and group not in ("matmul", "memory"):
        return "no module was called with gradients, so that there is no model to change"
    if group == "half":
        dtype = form
        if facts.mixed:
            return f"its precision is the script's own business: {facts.mixed}"
        peaks = machine.peak_flops
        if machine.device == "cpu" and peaks.get(dtype, 0.0) <= peaks.get("fp32", math.inf):
            return f"this CPU has no units for {dtype}: it multiplies {dtype} no faster than fp32"
    if rung is _SDPA and not facts.eager:
        return "it calls torch's attention already, or has none of transformers"
    if rung is _OFFLOAD and facts.device == "cpu":
        return "on a CPU activations are in host memory already"
    if group in ("compile", "offload"):
        if facts.compiled:
            return "the script calls torch.compile itself"
        if (form == "blocks" or rung is _OFFLOAD) and not facts.blocks:
            return facts.no_blocks.partition(". ")[0]
    if group == "fuse":
        return _unfit_fused(rung, facts)
    if group in CHANGES_RESULTS:
        if facts.mixed:
            return f"its precision is the script's own business: {facts.mixed}"
        return facts.products.get("int8_all" if group == "int8" else "fp8_tensorwise", "")
    return ""


def _unfit_fused(rung: Rung, facts: Facts) -> str:
    """Why fused operators cannot be put on the model, or need not be tried together."""
    assert isinstance(rung.apply, PlanChange)
    names: tuple[FusedName, ...] = rung.apply.fields["fuse"]
    absent = [FUSED[name].title for name in names if not facts.fused.get(name)]
    if not absent:
        return ""
    where = facts.no_blocks.partition(". ")[0] or f"no place of the model is known for {' or '.join(absent)}"
    return where if len(absent) == len(names) else "one alone fits the model, and has a rung of its own"


def _unfit_form(form: str, facts: Facts) -> str:
    if facts.form == form:
        return f"the script's {facts.optimizer} is {form} already"
    if form == "foreach" and facts.device == "cpu":
        return "on a CPU torch has no kernels for many tensors at once"
    if form == "foreach" and not facts.form:
        return "torch chooses it on a GPU already"
    return next((why for name, why in facts.forms.items() if name == form), "")
