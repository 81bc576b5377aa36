"""At which steps a run evaluates, saves and logs: plain arithmetic, the same after every resume."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.run import RunConfig
from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Calendar:
    """Steps are counted from 1; step `n` is the one after which `n` optimizer steps have been done."""

    samples: int
    """Training samples of one epoch."""
    batch: int
    """Samples of one optimizer step, over all ranks."""
    total: int
    log_every: int
    checkpoint_every: int
    """0: at the end of each epoch."""
    eval_every_epochs: float

    @classmethod
    def of(cls, config: RunConfig, samples: int) -> Calendar:
        """The calendar of a run over `samples` training samples.

        Raises:
            ConfigError: the run would have no steps.
        """
        recipe, batch = config.recipe, config.plan.global_batch
        total = recipe.steps if recipe.steps is not None else round(recipe.epochs * samples / batch)
        if total < 1:
            raise ConfigError(
                f"The run has no steps: recipe.epochs {recipe.epochs} of {samples} samples at {batch} a step. "
                f"Raise recipe.epochs, set recipe.steps, or lower plan.micro_batch or plan.accumulate."
            )
        return cls(
            samples=samples,
            batch=batch,
            total=total,
            log_every=config.log_every,
            checkpoint_every=config.checkpoint_every,
            eval_every_epochs=recipe.eval_every_epochs,
        )

    def epoch(self, step: int) -> float:
        """Epochs done after `step`."""
        return step * self.batch / self.samples

    def evaluates(self, step: int) -> bool:
        """Whether `step` completes a multiple of `eval_every_epochs`, or the run."""
        return step == self.total or self._completes(step, self.eval_every_epochs)

    def saves(self, step: int) -> bool:
        """Whether a checkpoint follows `step`."""
        if step == self.total:
            return True
        if self.checkpoint_every:
            return step % self.checkpoint_every == 0
        return self._completes(step, 1.0)

    def logs(self, step: int) -> bool:
        """Whether numbers are read off the device after `step`."""
        return step % self.log_every == 0 or self.evaluates(step) or self.saves(step)

    def _completes(self, step: int, epochs: float) -> bool:
        return int(self.epoch(step) / epochs) > int(self.epoch(step - 1) / epochs)
