"""State of a run's output folder: whether a run may resume from it, and the files that a run writes."""

from __future__ import annotations

import filecmp
import logging
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from penstock import checkpoint
from penstock.boundary.files import own_file, write_text
from penstock.checkpoint import BackgroundSaver, Checkpoint, Snapshot
from penstock.checkpoint.background import copied
from penstock.checkpoint.commit import commit
from penstock.checkpoint.coordinator import collect, current_coordinator, main_first
from penstock.checkpoint.rewrite import folder_beside
from penstock.checkpoint.snapshot import Parts, take_apart
from penstock.config.load import from_dict, to_dict
from penstock.config.numerics import numerics_of
from penstock.config.plan import Effect, Plan, effect_of
from penstock.config.run import Lora, RunConfig
from penstock.errors import CheckpointError, ConfigError, PenstockError, SavedInterrupt, SavedRequeue
from penstock.launch.report import VARIABLE
from penstock.launch.signals import STOPS, Requests
from penstock.models.convert import save_pretrained
from penstock.models.lora import merged
from penstock.parallel import ParallelDims, whole_state
from penstock.parallel.agree import slowest
from penstock.train.lock import RunLock
from penstock.train.run_state import RunState

_log = logging.getLogger(__name__)

_OUTPUTS = (
    "checkpoints", "metrics.jsonl", "tensorboard", "tracker.json", "profile", "experts", "export",
    "pictures", "train.html",
)  # fmt: skip
# A link at one of these paths would otherwise only be noticed when it is written, perhaps hours later.
_WRITTEN = (
    *_OUTPUTS[1:], "run.toml", "names", "tokenizer", "export.tmp", "experts/loads.json",
    "experts/loads.html", "profile/trace.json", "profile/operators.txt",
)  # fmt: skip
# Settings without influence on results, so a resumed run may change them; the optimizer is `plan.algorithm`.
_FREE = (
    "output", "keep", "log_every", "wait_seconds", "checkpoint_every", "save_in_background", "machine", "device",
    "init_from", "upcycle_noise", "data.workers", "recipe.eval_every_epochs", "export_best", "recipe.patience",
    "recipe.longer", "recipe.optimizer",
)  # fmt: skip
# Settings that change which steps are taken, but not their results: allowed, and logged.
_LOGGED = ("recipe.spikes", "recipe.spike_deviations")
_LENGTH = ("recipe.steps", "recipe.epochs")


def requests_to_stop() -> Requests:
    """Requests to stop a training run; Ctrl-C too, but not under `penstock launch`, whose agent handles it."""
    return Requests((*STOPS, signal.SIGINT), interactive=VARIABLE not in os.environ)


def require_no_stop(stop: Requests, dims: ParallelDims) -> None:
    """Raise SavedRequeue on all ranks if one of them has been asked to stop before the first step, when there is
    nothing to save yet. All ranks must call this."""
    if signal_number := int(slowest(float(stop.signal or 0), dims)):
        raise stopped(signal_number, "before a step was done", "begins there again")


def stopped(number: int, when: str, then: str) -> SavedRequeue:
    """The error of a run stopped by signal `number`; `then` says what its command does the next time."""
    name = signal.Signals(number).name
    kind, by = (SavedInterrupt, "Ctrl-C") if number == signal.SIGINT else (SavedRequeue, name)
    return kind(f"Stopped by {by} {when}. The same command {then}.")


@contextmanager
def hold_output(output: Path, stop: Requests, dims: ParallelDims) -> Iterator[RunLock]:
    """Hold the output folder on rank 0 inside the context; it is made if missing. If rank 0 cannot hold it, or a rank
    is asked to stop while rank 0 waits, all ranks raise.
    """
    output.mkdir(parents=True, exist_ok=True)
    lock = RunLock(output)
    with ExitStack() as stack:

        def hold() -> bool:
            for name in _WRITTEN:
                own_file(output, name)
            if held := lock.hold():
                stack.push(lock)
            else:
                time.sleep(1.0)
            return held

        while not main_first(hold):
            require_no_stop(stop, dims)
        yield lock


def find_checkpoint(config: RunConfig, dims: ParallelDims, *, resume: bool) -> Checkpoint | None:
    """The checkpoint to resume from, verified by all ranks together; none of its tensors is read yet.

    Without `resume`, files of earlier runs are set aside. Raises ConfigError if `config` is for another run.
    """
    output = Path(config.output)
    if not resume:
        main_first(lambda: set_aside(*(output / name for name in _OUTPUTS)))
        return None
    checkpoint.clean(output / "checkpoints")
    stored = checkpoint.find(output / "checkpoints")
    if stored is None:
        return None
    # Read as a configuration, where settings that are newer than the checkpoint have their defaults.
    before = from_dict(RunConfig, stored.config, origin=f"the checkpoint of step {stored.step}")
    for change in changes(before, config):
        if dims.main:
            _log.warning("Resuming with a change: %s Results are no longer bit for bit the same.", change)
    return stored


def restore_newest(state: RunState, stored: Checkpoint) -> Checkpoint:
    """Restore `state` from `stored` or, if that does not hold the state of this run, from the newest earlier checkpoint
    that does. Returns the checkpoint that was used; raises CheckpointError if none can be used. All ranks must call
    this."""
    folder, refused = stored.path.parent, list[Path]()
    while True:
        try:
            collect(partial(state.restore, stored))
        except CheckpointError as problem:
            older = checkpoint.find(folder, below=stored.step)
            if older is None:
                raise
            _log.warning("%s The checkpoint before it is tried.", problem)
            refused.append(stored.path)
            stored = older
            continue
        if refused:
            main_first(partial(checkpoint.settle, folder, refused, stored.path.name))
        return stored


def set_aside(*paths: Path) -> None:
    """Rename files and folders, if there are any, to the first free `NAME.before-K`, so that nothing is deleted."""
    for path in paths:
        if path.exists():
            number = 1
            while (target := path.with_name(f"{path.stem}.before-{number}{path.suffix}")).exists():
                number += 1
            path.rename(target)


def changes(before: RunConfig, now: RunConfig) -> list[str]:
    """Differences between a resumed run and the run it continues, as sentences for the log. Raises ConfigError, which
    lists both values of each setting whose change makes it a different run."""
    old, new = _flat(to_dict(before)), _flat(to_dict(now))
    if {old.get("data.source"), new.get("data.source")} == {"auto", "digits"}:  # two words for the same data
        old["data.source"] = new["data.source"]
    names = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    effects = {name: _effect(name, (before.plan, now.plan), old.get(name), new.get(name)) for name in names}
    if "init_from" in effects and now.task == "preferences":  # its loss uses these weights
        effects["init_from"] = "model"
    if now.recipe.longer != "refuse":
        effects |= dict.fromkeys(effects.keys() & _LENGTH, "rounding")
    names = [name for name in names if effects[name] != "nothing"]
    refused = [name for name in names if effects[name] == "model"]
    if refused:
        was = "{} is {!r}, but the checkpoint was made with {!r}."
        sentences = [was.format(name, new.get(name), old.get(name)) for name in refused]
        if not set(_LENGTH).isdisjoint(refused):
            sentences.append(
                "To train for longer, choose what the learning rate does then: --recipe.longer stretch, or restart."
            )
        sentences.append(
            "Restore the old values to resume, start again with --no-resume, or choose another --output."
        )
        raise ConfigError(sentences)
    return [f"{name} was {old.get(name)!r} and is now {new.get(name)!r}." for name in names]


def _effect(name: str, plans: tuple[Plan, Plan], *values: Any) -> Effect:
    """Effect of a changed setting on the results of a run that is resumed from a checkpoint."""
    if not name.startswith("plan."):
        return "nothing" if name in _FREE else "rounding" if name in _LOGGED else "model"
    effect = effect_of(name.removeprefix("plan."), *values)
    if effect == "batch":
        return "rounding" if plans[0].global_batch == plans[1].global_batch else "model"
    if effect == "precision":
        return "precision" if _stored_types(plans[0]) == _stored_types(plans[1]) else "model"
    return effect


def _stored_types(plan: Plan) -> tuple[object, ...]:
    """The types of the tensors that a checkpoint holds."""
    types = numerics_of(plan)
    return types.weights, types.masters, types.moments, types.scales


def _flat(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{path}{key}.")
        else:
            flat[f"{path}{key}"] = value
    return flat


_SECONDS = 10.0
"""Least seconds between checkpoints, unless `checkpoint_every` is set."""


class Saves:
    """The checkpoints of one run. All ranks create one and make the same calls."""

    def __init__(self, folder: Path, config: RunConfig, dims: ParallelDims) -> None:
        self.folder = folder
        self.newest_step = 0
        """The step that was saved last, or resumed from."""
        self._dims, self._config = dims, config
        self._time = time.monotonic()
        self._held: Parts | None = None
        self._saver = BackgroundSaver(folder, keep=config.keep) if config.save_in_background else None

    def save(self, snapshot: Snapshot, *, best: int, wait: bool) -> Path:
        """Commit a snapshot; unless `wait`, in the background if the run saves so. The checkpoint of step `best` is
        kept, however old it is; a held snapshot of it is committed first. Returns the snapshot's folder. Raises
        EnvironmentProblem or CheckpointError if this save failed, or the background save before it."""
        keep = self._config.keep
        if self._held is not None and self._held.step == best != snapshot.step:
            self.wait()
            commit(self.folder, self._held, keep=keep, best=best, coordinator=current_coordinator())
        self._held = None
        if self._saver and not wait:
            self._saver.best = best
            self._saver.start(snapshot)
        else:
            checkpoint.save(self.folder, snapshot, keep=keep, best=best)
        self.newest_step, self._time = snapshot.step, time.monotonic()
        return self.folder / f"step-{snapshot.step}"

    def too_soon(self) -> bool:
        """Whether the last checkpoint is so recent that another would cost more time than it could save."""
        recent = float(time.monotonic() - self._time < _SECONDS)
        return not self._config.checkpoint_every and bool(slowest(recent, self._dims))

    def hold(self, snapshot: Snapshot) -> None:
        """Keep a copy of the best step so far in host memory; it is written with the next checkpoint."""
        self._held = copied(take_apart(snapshot, current_coordinator().rank), {})

    def find(self) -> Checkpoint | None:
        """The newest checkpoint that can be trusted."""
        self.wait()
        return checkpoint.find(self.folder)

    def wait(self) -> None:
        """Wait for a save in progress; raises its error."""
        if self._saver:
            self._saver.wait()

    def close(self) -> None:
        """Let a save in progress finish; if it fails, the log has its error."""
        if self._saver:
            with suppress(PenstockError, RuntimeError):
                self._saver.close()


def export(model: Any, output: Path, dims: ParallelDims, lora: Lora, card: str) -> Path:
    """Write the model, with merged adapters, as a Hugging Face folder, and its `card`; an earlier folder is set aside,
    unless its files are the same. All ranks must call this."""
    folder, partial = output / "export", own_file(output, "export.tmp")
    weights = whole_state(model, dims)

    def write() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        save_pretrained(model, partial, weights=merged(weights, lora, model), beside=folder_beside(output))
        write_text(partial / "README.md", card)
        if _same_files(partial, folder):
            shutil.rmtree(partial)
        else:
            set_aside(folder)
            partial.rename(folder)

    main_first(write)
    return folder


def _same_files(one: Path, other: Path) -> bool:
    """Whether two folders hold the same files."""
    first, second = (
        {path.relative_to(root) for path in root.rglob("*") if path.is_file()} for root in (one, other)
    )
    return first == second and filecmp.cmpfiles(one, other, first, shallow=False)[1:] == ([], [])
