"""The steps at which a run evaluates, saves and logs: plain arithmetic, the same after every resume."""

from __future__ import annotations

from penstock.config.run import EPOCHS, RunConfig
from penstock.errors import ConfigError


class Calendar:
    """The calendar of a run over `samples` training samples. Steps are counted from 1; step `n` is the one after which
    `n` optimizer steps have been done.

    Raises:
        ConfigError: the run would have no steps.
    """

    def __init__(self, config: RunConfig, samples: int) -> None:
        recipe = config.recipe
        self.samples = samples
        """Training samples of one epoch."""
        self.batch = config.plan.global_batch
        """Samples of one optimizer step, over all ranks."""
        self.total = recipe.total_steps(samples, self.batch)
        self._config = config
        if self.total < 1:
            raise ConfigError(
                f"The run has no steps: recipe.epochs {recipe.epochs or EPOCHS:g} of {samples} samples at "
                f"{self.batch} a step. Raise recipe.epochs, set recipe.steps, or lower plan.micro_batch or "
                "plan.accumulate."
            )

    def epoch(self, step: int) -> float:
        """Epochs done after `step`."""
        return step * self.batch / self.samples

    def evaluates(self, step: int) -> bool:
        """Whether `step` completes a multiple of `eval_every_epochs`, or the run."""
        return step == self.total or self._completes(step, self._config.recipe.eval_every_epochs)

    def saves(self, step: int) -> bool:
        """Whether a checkpoint follows `step`."""
        if step == self.total:
            return True
        if self._config.checkpoint_every:
            return step % self._config.checkpoint_every == 0
        return self._completes(step, 1.0)

    def logs(self, step: int) -> bool:
        """Whether numbers are read off the device after `step`."""
        return step % self._config.log_every == 0 or self.evaluates(step) or self.saves(step)

    def _completes(self, step: int, epochs: float) -> bool:
        return int(self.epoch(step) / epochs) > int(self.epoch(step - 1) / epochs)
