"""A script as contenders: under each setting it is a process of its own, which makes some optimizer steps at a turn.

Free of torch, which only those processes load.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import replace
from pathlib import Path

from penstock.boundary.files import own_file
from penstock.config.plan import Plan
from penstock.ladder.contender import Contenders, LossRun, Timing
from penstock.ladder.result import Forecast
from penstock.ladder.rung import Setting
from penstock.ladder.statistics import FEWEST
from penstock.tune.process import ScriptCommand, ScriptEnded, ScriptProcess
from penstock.tune.settings import TuneConfig

WARM_UP, LONGEST_WARM_UP = 3, 8
"""Steps that are not timed: at the least, and as long as successive ones differ by more than half."""
UNEVEN = 1.5
MOST_STEPS = 64
"""Steps of a turn at the most."""
LOSS_STEPS = 48
"""Steps whose losses are compared at the most."""
LOSS_SHARE = 0.05
"""Share of the time that a seed of the script as it is may take for that."""


class Script(Contenders):
    """`Contenders` of a script. A setting's copy is added to the seeds that the script sets."""

    unit = "steps"
    control_rounds, control_share = 8, 0.15
    """Fewer rounds than of a model, for the twin's steps are also those of the losses, and a larger share, for starting
    a script and warming it up take longer than its steps."""
    loss_runs = False
    most_rounds = 14
    """Half as many as of a model: each rung is raced by itself, and there may be twenty."""
    shorter = "and so do shorter steps by the script's own arguments"

    def __init__(self, command: ScriptCommand, config: TuneConfig) -> None:
        self.command, self.config = command, config
        self.folder = Path(config.output)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.title = shlex.join([command.target, *command.arguments])
        self.first = script_setting("")
        self.length = math.inf
        """Optimizer steps of the script, once it has ended."""
        self.started = 0
        self.open: dict[Setting, ScriptContender] = {}
        self.losses: dict[Setting, list[float | None]] = {}
        """The losses of the first steps of each setting."""
        self.alone: dict[str, float] = {}
        """The planner's speeds of lines with one rung, to the first."""

    def contend(self, setting: Setting) -> ScriptContender:
        """Start and warm up. Raises ScriptEnded."""
        self.open[setting] = ScriptContender(self, setting)
        return self.open[setting]

    def trained(self, setting: Setting, seed: int, steps: int) -> LossRun:
        """Losses of steps that were timed; none where a loss is no scalar."""
        losses = self.losses.get(replace(setting, copy=seed), [])[:steps]
        known = [loss for loss in losses if loss is not None]
        return LossRun(known if len(known) == len(losses) else [], [])

    def forecast(
        self, setting: Setting, before: Setting, by: str = "samples", corrected: float | None = None
    ) -> Forecast | None:
        """From the planner's speeds of its rungs, each alone."""
        speed, previous = self._predicted(setting), self._predicted(before)
        if speed is None or previous is None:
            return None
        return Forecast(to_previous=speed / previous, to_baseline=speed, corrected=speed)

    def _predicted(self, setting: Setting) -> float | None:
        """The product over the rungs of a line; None where something else is part of it."""
        first = {*(self.first.line or "").split()}
        left = words = {*(setting.line or "").split()} - first
        speed = 1.0
        for line, gain in self.alone.items():
            own = {*line.split()} - first
            if own and own <= words:
                speed, left = speed * gain, left - own
        return None if left else speed

    def train_command(self, setting: Setting) -> str:
        """The command that runs the script."""
        line, command = setting.line, self.command
        script = shlex.join([*(["-m"] * command.module), command.target, *command.arguments])
        if command.procs > 1:
            launcher = f"torchrun --nproc-per-node {command.procs}"
            return f'{launcher} -m penstock run --plan "{line}" {script}' if line else f"{launcher} {script}"
        return f'penstock run --plan "{line}" {script}' if line else f"python {script}"

    def end(self) -> None:
        for contender in [*self.open.values()]:
            contender.close()


class ScriptContender:
    """The script under one setting. If it ends while it is measured it begins again."""

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
        """Its process, warm."""
        if self._process is None:
            self._start()
        assert self._process is not None
        return self._process

    def timed(self, least_seconds: float) -> Timing:
        """Seconds per step of one turn. Raises ScriptEnded."""
        steps = min(MOST_STEPS, max(1, math.ceil(least_seconds / self.step_seconds)))
        left = min(steps, self.script.length - self.process.steps)
        if left < max(1, steps // 4):
            self.close()
            left = min(steps, self.script.length - self.process.steps)
        try:
            self.step_seconds = self.process.turn(max(1, int(left)))
        except ScriptEnded as end:
            self._note()
            self.close()
            if end.status != "ended" or end.steps < LONGEST_WARM_UP + FEWEST:
                raise
            self.script.length = min(self.script.length, end.steps)
            return self.timed(least_seconds)
        self._note()
        return Timing(self.step_seconds, None)

    def lengthen(self) -> None:
        """Make as many steps as losses are compared over, if time allows."""
        made = self.process.steps
        affordable = int(LOSS_SHARE * self.script.config.budget / self.step_seconds)
        wanted = int(min(LOSS_STEPS - made, affordable, self.script.length - made - 1))
        if wanted > 0:
            try:
                self.process.turn(wanted)
            except ScriptEnded as end:
                self._note()
                self.close()
                self.script.length = min(self.script.length, end.steps)
                if end.status != "ended":
                    raise
        self._note()

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
        """Keep the losses, the longest of its processes, and the memory."""
        if self._process is None:
            return
        if len(self._process.losses) >= len(self.script.losses.get(self.setting, [])):
            self.script.losses[self.setting] = [*self._process.losses]
        self._memory = self._process.memory or self._memory


def script_setting(line: str) -> Setting:
    """A script under a line of settings."""
    return Setting(model=None, plan=Plan.parse(line), line=line)
