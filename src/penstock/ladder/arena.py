"""Keeps the baseline, the best setting so far and a challenger built at once, so that they are timed in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from penstock.errors import ConfigError, ran_out_of_memory
from penstock.ladder import measure
from penstock.ladder.measure import Bench, Contender, Crew, LossRun
from penstock.ladder.result import Status
from penstock.ladder.rung import Setting
from penstock.ladder.subject import Subject
from penstock.ladder.team import Team

T = TypeVar("T")


class Arena:
    """The contenders that are built. The baseline and the best setting stay built between rungs, if memory allows."""

    def __init__(self, subject: Subject, seed: int, round_seconds: float, team: Team) -> None:
        self.subject = subject
        self.bench, self.team = Bench(subject), team
        self.seed = seed
        self.round_seconds = round_seconds
        self.baseline = subject.first
        self.best = subject.first
        self._built: dict[Setting, Contender] = {}
        self._step_seconds: dict[Setting, float] = {}

    def contender(self, setting: Setting) -> Contender:
        """The contender of a setting; built now if it is not there."""
        found = self._built.get(setting)
        if found is None or not found.alive:
            found = self._built[setting] = Contender(self._crew(setting), setting, self.seed)
            self._step_seconds[setting] = found.step_seconds
        return found

    def _crew(self, setting: Setting) -> Crew:
        return self.team if setting.plan.gpus > 1 else self.bench

    def close(self) -> None:
        """End the processes, if there are any."""
        self.team.end()

    def step_seconds(self, setting: Setting) -> float:
        """Seconds of one optimizer step, as last measured; the setting need not be built any more."""
        return self._step_seconds[setting]

    def challenge(self, setting: Setting) -> bool:
        """Build a challenger. False where it had to be alone: memory did not hold the others beside it."""
        return self._with_room(lambda: self.contender(setting))[1]

    def trained(self, setting: Setting, seed: int, steps: int) -> LossRun:
        """The loss run of a setting, beside the built contenders if memory allows."""
        crew = self._crew(setting)
        run: LossRun = self._with_room(lambda: crew.ask("trained", setting, seed, steps)[0])[0]
        return run

    def time(
        self, challenger: Setting, others: Sequence[Setting], rounds: int, *, together: bool
    ) -> dict[Setting, list[float]]:
        """Seconds per step of each setting, round by round, in which all take turns.

        Where they are not `together`, because memory did not hold all at once, the last figures of the others stand.
        """
        running = list(dict.fromkeys([challenger, *others])) if together else [challenger]
        contenders = [self.contender(setting) for setting in running]
        taken = dict(zip(running, measure.interleaved(contenders, rounds, self.round_seconds), strict=True))
        for contender in contenders:
            self._step_seconds[contender.setting] = contender.step_seconds
        return taken | {s: [self._step_seconds[s]] * rounds for s in others if s not in taken}

    def retire(self, setting: Setting) -> None:
        """Let go of a setting that is neither baseline nor best, and give its memory back."""
        if setting in (self.baseline, self.best):
            return
        gone = self._built.pop(setting, None)
        if gone is not None:
            gone.close()

    def accept(self, setting: Setting) -> None:
        """Make a setting the best; the former best makes room."""
        former, self.best = self.best, setting
        self.retire(former)

    def _with_room(self, work: Callable[[], T]) -> tuple[T, bool]:
        """Do some work; where a GPU's memory runs out, once more after all others had to go (then False)."""
        try:
            return work(), True
        except Exception as error:
            if self.subject.device.type != "cuda" or failure(error)[0] != "out of memory":
                raise
        # Only here, where the exception and the frames it held are gone, is its memory free.
        for contender in self._built.values():
            contender.close()
        self._built.clear()
        return work(), False


def failure(error: BaseException) -> tuple[Status, str]:
    """What an exception says about a rung: its status, and a line for the report."""
    lines = str(error).strip().splitlines()
    first = lines[0] if lines else type(error).__name__
    if ran_out_of_memory(error):
        return "out of memory", first
    if isinstance(error, ConfigError):
        return "unsupported", first
    return "failed", f"{type(error).__name__}: {first}"
