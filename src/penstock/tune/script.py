"""A script as contenders: under each setting it is a separate process, which makes some optimizer steps per turn."""

from __future__ import annotations

import math
import shlex
from dataclasses import replace
from pathlib import Path

from penstock.boundary.files import own_file
from penstock.config.model import changes
from penstock.config.plan import Plan
from penstock.ladder.contender import Contenders, LossRun, Timing
from penstock.ladder.result import Forecast
from penstock.ladder.rung import Setting
from penstock.ladder.settings import TuneConfig, option
from penstock.ladder.statistics import FEWEST
from penstock.tune.process import ScriptCommand, ScriptEnded, ScriptProcess

WARM_UP, LONGEST_WARM_UP = 3, 8
"""Least and most warm-up steps, which are not timed; they go on while successive steps differ by more than half."""
UNEVEN = 1.5
MOST_STEPS = 64
"""Most steps of a turn."""
LOSS_STEPS = 48
"""Most steps whose losses are compared."""
LOSS_SHARE = 0.05
"""Share of the budget that the unchanged script may take per seed for these steps."""


class Script(Contenders):
    """`Contenders` of a script. `copy` of a setting is added to the seeds that the script sets."""

    unit = "steps"
    control_rounds, control_share = 8, 0.15
    """Fewer rounds than for a model, because the twin's steps also provide losses; a larger share, because starting and
    warming up a script takes longer than its steps."""
    loss_runs = False
    most_rounds = 14
    """Half as many as for a model: each rung races by itself, and there may be twenty."""
    shorter = "and so do shorter steps through the script's own arguments"

    def __init__(self, command: ScriptCommand, config: TuneConfig) -> None:
        self.command, self.config = command, config
        self.folder = Path(config.output)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.title = shlex.join([command.target, *command.arguments])
        self._named = f"-m {self.title}" if command.module else self.title
        self.first = script_setting("")
        self.length = math.inf
        """Number of optimizer steps of the script; known once it has ended."""
        self.started = 0
        self.open: dict[Setting, ScriptContender] = {}
        self.losses: dict[Setting, list[float | None]] = {}
        """Losses of the first steps of each setting."""
        self.alone: dict[str, float] = {}
        """Predicted speeds of lines with one rung, relative to the first setting."""

    def contend(self, setting: Setting) -> ScriptContender:
        """Start the script under a setting and warm it up. Raises ScriptEnded."""
        self.open[setting] = ScriptContender(self, setting)
        return self.open[setting]

    def trained(self, setting: Setting, seed: int, steps: int) -> LossRun:
        """Losses of the steps that were timed; empty if a loss is not a scalar."""
        losses = self.losses.get(replace(setting, copy=seed), [])[:steps]
        scalar_losses = [loss for loss in losses if loss is not None]
        return LossRun(scalar_losses if len(scalar_losses) == len(losses) else [], [])

    def forecast(
        self, setting: Setting, before: Setting, by: str = "samples", corrected: float | None = None
    ) -> Forecast | None:
        """The forecast from the planner's speeds of the single rungs."""
        speed, previous = self._predicted(setting), self._predicted(before)
        if speed is None or previous is None:
            return None
        return Forecast(to_previous=speed / previous, to_baseline=speed, corrected=speed)

    def _predicted(self, setting: Setting) -> float | None:
        """Product of the speeds of a line's rungs; None if the line includes anything else."""
        first = {*(self.first.line or "").split()}
        unknown = words = {*(setting.line or "").split()} - first
        speed = 1.0
        for line, gain in self.alone.items():
            rung_words = {*line.split()} - first
            if rung_words and rung_words <= words:
                speed, unknown = speed * gain, unknown - rung_words
        return None if unknown else speed

    def train_command(self, setting: Setting) -> str:
        """The command that runs the script with a setting."""
        run = f'penstock run --plan "{setting.line}" {self._named}' if setting.line else self._named
        if self.command.procs > 1:
            return f"torchrun --nproc-per-node {self.command.procs} {'-m ' * bool(setting.line)}{run}"
        return run if setting.line else f"python {run}"

    @property
    def tune_command(self) -> str:
        """The command that repeats this tuning."""
        options = [
            option(n.replace("_", "-"), v) for n, v in changes(TuneConfig(), self.config) if n != "output"
        ]
        return " ".join(["penstock tune", *options, self._named])

    def end(self) -> None:
        for contender in [*self.open.values()]:
            contender.close()


class ScriptContender:
    """The script under one setting. If it ends during measurements it is started again."""

    def __init__(self, script: Script, setting: Setting) -> None:
        self.script, self.setting = script, setting
        self.compile_seconds: float | None = None
        self.step_seconds = math.inf
        self._memory: int | None = None
        self._process: ScriptProcess | None = None
        self._start()

    @property
    def alive(self) -> bool:
        return self._process is not None

    @property
    def process(self) -> ScriptProcess:
        """The running process, warmed up."""
        if self._process is None:
            self._start()
        assert self._process is not None
        return self._process

    def timed(self, least_seconds: float) -> Timing:
        """Time one turn. Raises ScriptEnded."""
        steps = min(MOST_STEPS, max(1, math.ceil(least_seconds / self.step_seconds)))
        if self.script.length - self.process.steps < max(1, steps // 4):
            self.close()  # and begin again
        count = min(steps, self.script.length - self.process.steps)
        seconds = self._turn(max(1, int(count)))
        if seconds is None:
            return self.timed(least_seconds)
        self.step_seconds = seconds
        return Timing(seconds, None)

    def lengthen(self) -> None:
        """Make further steps, up to the number over which losses are compared, if time allows."""
        steps_made = self.process.steps
        affordable = int(LOSS_SHARE * self.script.config.budget / self.step_seconds)
        wanted = int(min(LOSS_STEPS - steps_made, affordable, self.script.length - steps_made - 1))
        if wanted > 0:
            self._turn(wanted)

    def _turn(self, steps: int) -> float | None:
        """Seconds per step over `steps` steps; None if the script reached its end during them. Raises ScriptEnded if it
        failed, or is too short to be timed."""
        process = self.process
        try:
            seconds = process.turn(steps)
        except ScriptEnded as end:
            self._note()
            self.close()
            if end.status != "ended" or end.steps < LONGEST_WARM_UP + FEWEST:
                raise
            self.script.length = min(self.script.length, end.steps)
            return None
        self._note()
        return seconds

    def memory(self) -> list[int]:
        return [] if self._memory is None else [self._memory]

    def close(self) -> None:
        """End its process."""
        process, self._process = self._process, None
        if self.script.open.get(self.setting) is self:
            del self.script.open[self.setting]
        if process is not None:
            process.close()

    def _start(self) -> None:
        self.script.started += 1
        log = own_file(self.script.folder, f"{self.script.started}.log")
        line, config = self.setting.line or "", self.script.config
        process = ScriptProcess(self.script.command, line, self.setting.copy, log, config.timeout)
        try:
            taken = [process.first_step()]
            while len(taken) < WARM_UP or (
                len(taken) < LONGEST_WARM_UP and max(taken[-2:]) > UNEVEN * min(taken[-2:])
            ):
                taken.append(process.turn(1))
        except BaseException:
            process.close()
            raise
        self._process = process
        self.script.open[self.setting] = self
        self.step_seconds = min(taken[-2:])
        if self.setting.plan.compile != "none" and self.compile_seconds is None:
            self.compile_seconds = max(0.0, sum(taken) - len(taken) * self.step_seconds)
        self._note()

    def _note(self) -> None:
        """Store the losses, from the process with the most steps, and the memory."""
        process = self.process
        if len(process.losses) >= len(self.script.losses.get(self.setting, [])):
            self.script.losses[self.setting] = [*process.losses]
        self._memory = process.memory or self._memory


def script_setting(line: str) -> Setting:
    """The Setting of a script that is run under a line of settings."""
    return Setting(model=None, plan=Plan.parse(line), line=line)
