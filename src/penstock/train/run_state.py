"""All state that a run's future depends on, random generators included: how checkpoints save and restore it."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock import checkpoint
from penstock.build import Built
from penstock.checkpoint import Checkpoint, Snapshot
from penstock.checkpoint.coordinator import collect
from penstock.config.load import to_dict
from penstock.config.model import stacks
from penstock.config.run import RunConfig
from penstock.data import Loader
from penstock.errors import ConfigError, NumericError
from penstock.models.convert import load_weights
from penstock.models.convert.upcycle import Upcycling, starts_equal
from penstock.optim.tensors import local
from penstock.parallel import ParallelDims
from penstock.train.evaluate import Evaluation
from penstock.train.loss_monitor import REMEDY, LossMonitor
from penstock.train.meters import LoadMeter

_log = logging.getLogger(__name__)
_PROGRESS = ("loss", "evaluated_at", "best_step", "worse", "total", "began")
"""Fields of `RunState` that checkpoints hold as they are."""


@dataclass(slots=True)
class RunState:
    """A run's state on one rank: the model, its data, and the number of steps done."""

    config: RunConfig
    dims: ParallelDims
    built: Built
    loader: Loader
    monitor: LossMonitor
    step: int = 0
    """Number of optimizer steps done."""
    loss: float = math.nan
    """Mean training loss of the last logged steps."""
    evaluated_at: int = 0
    evaluation: Evaluation | None = None
    best: Evaluation | None = None
    """The best evaluation so far; `best_step` is its step."""
    best_step: int = 0
    worse: int = 0
    """Number of evaluations since the best one."""
    total: int = 0
    """Number of steps planned for the run."""
    began: int = 0
    """The step at which the learning-rate schedule began; it begins again if a run is prolonged with `restart`."""
    loads: LoadMeter = field(init=False)

    def __post_init__(self) -> None:
        self.loads = LoadMeter(
            self.built.model, self.dims, self.built.step.add_up, self.loader.source.label_names
        )

    def judge(
        self, evaluation: Evaluation, merit: Callable[[Mapping[str, float]], tuple[float, ...]]
    ) -> bool:
        """Store the evaluation of this step. Returns whether it is the best so far."""
        self.evaluation, self.evaluated_at = evaluation, self.step
        better = self.best is None or merit(evaluation.metrics) > merit(self.best.metrics)
        if better:
            self.best, self.best_step = evaluation, self.step
        self.worse = 0 if better else self.worse + 1
        return better

    @property
    def lost_patience(self) -> bool:
        """Whether the run must end, because too many evaluations in a row were no better than the best."""
        return 0 < self.config.recipe.patience <= self.worse

    def snapshot(self) -> Snapshot:
        """The current state, by reference: nothing is copied. All ranks must call it. Raises NumericError for weights
        that are not finite, which a checkpoint must not hold."""
        built, step = self.built, self.step
        collect(lambda: require_finite(built.model, step))
        weights = {"weights": built.model.state_dict()}
        if built.ema is not None:
            weights["ema"] = built.ema.state_dict()
        return Snapshot(
            step=step,
            weights=weights,
            state={
                "optimizer": checkpoint.by_name(built.optimizer.state_dict()),
                "scaler": built.scaler.state_dict() if built.scaler else None,
                "watch": self.monitor.state_dict(),
                "loader": self.loader.state_dict(),
                "random": collect(lambda: random_state(built.device)),
                "loads": self.loads.state(),
                "progress": {
                    **{name: getattr(self, name) for name in _PROGRESS},
                    "evaluation": self.evaluation.record() if self.evaluation else None,
                    "best": self.best.record() if self.best else None,
                },
            },
            config=to_dict(self.config),
            plan=self.config.plan.line(),
        )

    def restore(self, stored: Checkpoint, *, rewinding: bool = False) -> None:
        """Restore the state of a `snapshot`, except the stream of samples when `rewinding`. Each rank reads its own
        part, also if another number of ranks saved it. Not collective. Raises CheckpointError if the checkpoint does
        not hold the state of this run; part of the state has then been changed."""
        built = self.built
        with checkpoint.trusted(stored.path):
            state = self.load_weights(stored).state
            built.optimizer.load_state_dict(
                checkpoint.by_index(state["optimizer"], built.optimizer.state_dict())
            )
            if built.scaler:
                built.scaler.load_state_dict(state["scaler"])
            self.monitor.load_state_dict(state["watch"], rewinding=rewinding)
            if not rewinding:
                self.loader.load_state_dict(state["loader"])
            self.loads.restore(state.get("loads"))
            before = state["progress"]
            self.step, self.loss, self.evaluated_at = stored.step, before["loss"], before["evaluated_at"]
            self.evaluation = Evaluation.of_record(before["evaluation"]) if before["evaluation"] else None
            self.best = Evaluation.of_record(before["best"]) if before.get("best") else None
            self.best_step, self.worse = before.get("best_step", 0), before.get("worse", 0)
            prolonged = before.get("total", self.total) != self.total
            restarts = prolonged and self.config.recipe.longer == "restart"
            self.began = self.step if restarts else before.get("began", 0)
            # Last, because building and loading may have drawn from them.
            self._restore_random(state["random"])

    def _restore_random(self, states: list[dict[str, Any]]) -> None:
        """Restore this rank's generators from `states`, the `random_state` of each rank that saved. If the number of
        ranks has changed, all ranks but 0 are seeded from seed, rank and step instead; their random draws then differ
        from an uninterrupted run's, as with another seed."""
        rank = self.dims.random_rank
        if len(states) == self.dims.size or rank == 0:
            set_random_state(states[rank], self.built.device)
        else:
            seed_random(self.config.seed, rank, self.step)

    def load_weights(self, stored: Checkpoint) -> Snapshot:
        """Load a checkpoint's weights, and averages if there are any. Returns all that it holds for this rank."""
        built, dims = self.built, self.dims
        # Tied weights have several names, and are read under each.
        parameters = dict(built.model.named_parameters(remove_duplicate=False))
        names = {*built.model.state_dict(), *parameters} if dims.pp > 1 else None
        loaded = stored.load(parameters, rank=dims.rank, world=dims.size, held=names)
        built.model.load_state_dict(loaded.weights["weights"])
        if built.ema is not None:
            built.ema.load_state_dict(loaded.weights["ema"])
        return loaded

    def require_within(self, total: int) -> None:
        """Raise ConfigError if the run has already done more than `total` steps."""
        if self.step > total:
            raise ConfigError(
                f"The run has done {self.step} steps already, and recipe.steps or recipe.epochs allow {total}; allow "
                "more, or choose another --output."
            )

    def start_from(self, path: str) -> None:
        """Load the weights in `path`; parameters that they do not fit are initialised again, and reported."""
        config = self.config
        upcycling = Upcycling(noise=config.upcycle_noise, seed=config.seed)
        loaded = load_weights(self.built.model, path, new_head=True, upcycling=upcycling)
        if config.upcycle_noise and not loaded.upcycled:
            _log.warning("upcycle_noise changes nothing: no experts were made of the weights of %s.", path)
        elif loaded.upcycled and not all(starts_equal(each) for each in stacks(config.model) if each.experts):
            _log.warning(
                "The outputs of a token's experts do not add up to the former perceptron's, so the loss starts higher. "
                "They do with router_normalised and several experts per token, without expert_dropout and "
                "sample_capacity."
            )
        if self.built.ema:
            weights = self.built.model.named_parameters()
            self.built.ema.load_state_dict({name: w for name, w in weights if w.is_floating_point()})
        _log.warning("Starting from %s: %s", path, loaded)


def require_finite(model: nn.Module, step: int) -> None:
    """Raise NumericError with the names of weights that are not finite after `step`, which the loss would show one step
    later. Waits for the device. A rank checks only its own part of sharded weights."""
    bad = [name for name, value in model.state_dict().items() if not local(value).isfinite().all()]
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise NumericError(
            f"After step {step} weights are not finite: {', '.join(bad[:3])}{more}. They were not saved. {REMEDY}"
        )


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of all random generators that a step may use, as a tree of tensors and numbers."""
    cuda = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {
        "torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate(), **cuda,
    }  # fmt: skip


def seed_random(seed: int, rank: int = 0, step: int = 0) -> None:
    """Seed all generators: on rank 0 with `seed` itself; on every other rank, and on a rank that resumes at `step`
    without its earlier state, with a seed made of all three."""
    if rank or step:
        seed = int(np.random.SeedSequence([seed, rank, step]).generate_state(1, np.uint64)[0])
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore the generators from a `random_state`."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


@contextmanager
def own_random(device: torch.device) -> Iterator[None]:
    """Allow generators to be seeded and used inside; afterwards they have their earlier states again."""
    before = random_state(device)
    try:
        yield
    finally:
        set_random_state(before, device)
