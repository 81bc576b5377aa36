"""Runs of `penstock train` that faults strike at chosen instants, and what they come to. Dropout is on throughout.

`python -m helpers.doomed WAY …` is one of three programs:

`ranks CONFIG FAULT…` trains as CONFIG says, for ranks under `penstock launch`. In the folder `struck` beside CONFIG
each fault leaves a note and never strikes again. Those of the first kind strike one by one, the next in the life after:

- `kill:R:N`  SIGKILL of rank R after N steps of a life
- `stop:R:N`  SIGSTOP likewise
- `raise:R:N` an exception likewise
- `poison:R:S:K:V` rank R's gradients become V (`nan` or `inf`) for K steps from step S on, in every life
- `heed`      in every life, obey files `order.R` beside CONFIG that are put there while it runs: `raise`, or `nan` for
  a step of rank R whose gradients are poisoned
- `samples`   every rank adds a line to `samples.R` for every step: the life (by its MASTER_PORT),
  the step, and the numbers of its samples
- `still:R`   rank R stands still in its next evaluation, once
- `slow:MS`   every step takes so many milliseconds longer
- `slowsync:MS` every fsync does

Beside CONFIG every process leaves a `pid.N`, every rank its process id in `rank.R`, and rank 0 a line of `tally` for
every step: the time, its own process id, the step.

`lives CONFIG FAULT…` is one process that lives once for each fault, each life resuming the one before. One line per
life says how it ended: `exit 0`, `signal 9` …. Lives are forked before anything was computed, so that torch is imported
once and no thread is forked:

- `step:N`  SIGKILL right after step N's computation, before anything of it is logged or saved
- `fsync:N` SIGKILL in place of the N-th fsync of this life: in the middle of a save
- `time:S`  SIGKILL after S seconds
- `term:N`  SIGTERM after step N
- `full:N`  after step N no file may grow past 8 kB, so that the kernel cuts what is written off, as a full disk does
- `none`    no fault
- `flip:P`  no life, but one bit flipped in the middle of file P, relative to the run's output
- `cut:P`   no life, but the last byte of file P cut off

`toy FOLDER STEPS FAULT…` is a training program in a few lines, to test the launcher by. Each step is an all-reduce over
gloo and a note in FOLDER; the checkpoint is the number of the step, saved at every fifth and when SIGTERM or SIGUSR1
asked for it. Its faults are `kill:R:S`, `stop:R:S`, `raise:R:S` and `code:R:S:C` (rank R exits with code C) after step
S, once each, whatever life it is, and `slow:MS`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed

from helpers.agents import Agent
from helpers.spawn import spawn
from helpers.toy import desk
from penstock.config.load import dump_toml, load
from penstock.config.plan import Plan
from penstock.config.run import Augment, Recipe, RunConfig
from penstock.errors import PenstockError
from penstock.launch.heartbeat import beat

Act = Callable[[], Any]
STEPS = 60
PLANS = {
    "ddp": Plan(micro_batch=16, dp=2, optimizer="fused"),
    "fsdp": Plan(micro_batch=16, dp=2, sharding="fsdp", optimizer="fused"),
}
TWO = ("--procs", "2")
TOY = ("-m", "helpers.doomed", "toy")


class Tally(NamedTuple):
    """One step that was taken."""

    seconds: float
    """`time.time()` at its end."""
    pid: int
    """Of rank 0: every life has another."""
    step: int


# -- runs, and what they came to


def config_in(folder: Path, plan: Plan, *, steps: int = STEPS, job: str = "vit", **changes: Any) -> RunConfig:
    """A run of a job of `jobs` in `folder`, saved every four steps."""
    from helpers.jobs import settings  # imports all models, which the toy has no use for

    recipe = Recipe(
        steps=steps, lr=3e-3, warmup_steps=4, ema_decay=0.9, eval_every_epochs=1000.0,
        augment=Augment(crop_scale_min=0.6, mixup=0.3, label_smoothing=0.1),
    )  # fmt: skip
    config = RunConfig(
        **settings(job, folder), recipe=recipe, plan=plan, machine=desk(folder), output=str(folder / "run"),
        device="cpu", seed=3, checkpoint_every=4, log_every=2,
    )  # fmt: skip
    return replace(config, **changes)


def written(config: RunConfig) -> Path:
    """`config` as a file beside its output."""
    file = Path(config.output).parent / "config.toml"
    file.write_text(dump_toml(config), encoding="utf-8")
    return file


def launched(
    config: RunConfig, *faults: str, options: tuple[str, ...] = (), name: str = "log", forked: bool = True
) -> Agent:
    """An agent whose ranks train as `config` says, doomed by `faults`."""
    log = Path(config.output).parent / name
    return Agent(*options, "--", *program(config, *faults), log=log, forked=forked)


def program(config: RunConfig, *faults: str) -> tuple[str, ...]:
    """What such an agent starts."""
    return ("-m", "helpers.doomed", "ranks", str(written(config)), *faults)


def finished(config: RunConfig, *faults: str, world: int = 2) -> None:
    """Train as `config` says to the end on `world` forked ranks, which start in a tenth of the time of an agent's.
    What an agent does is not tested so.
    """
    codes = spawn(ranks, world, written(config), list(faults), group=False, timeout=240)
    assert codes == [0] * world


def tally(config: RunConfig) -> list[Tally]:
    """Every step that was taken, in order, whatever became of it."""
    file = Path(config.output).parent / "tally"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [Tally(float(when), int(pid), int(step)) for when, pid, step in (line.split() for line in lines)]


def samples(config: RunConfig) -> list[list[int]]:
    """The numbers of the samples of every step of the run as it stands, sorted, of all ranks together. A step that was
    taken again counts as it was taken last.
    """
    folder = Path(config.output).parent
    ranks = [
        [line.split() for line in file.read_text().split("\n")[:-1]]
        for file in sorted(folder.glob("samples.*"))
    ]
    lives = {int(step): life for life, step, *_ in ranks[0]}  # the last that rank 0 took the step in
    found: dict[int, list[int]] = {step: [] for step in sorted(lives)}
    for lines in ranks:
        for life, step, *numbers in lines:
            if lives.get(int(step)) == life:
                found[int(step)] += map(int, numbers)
    return [sorted(numbers) for numbers in found.values()]


def losses(config: RunConfig) -> list[float]:
    """The loss of every step of the run as it stands."""
    from helpers.runs import losses_of

    return losses_of(config.output)


def same_end(config: RunConfig, other: RunConfig) -> None:
    """Hold that two runs had the same losses and came to the same weights, bit for bit."""
    assert json.dumps(losses(config)) == json.dumps(losses(other))
    same_tensors(config, other, "export/model.safetensors")


def same_tensors(config: RunConfig, other: RunConfig, name: str) -> None:
    """Hold that a file of both runs has equal tensors."""
    from safetensors.torch import load_file

    ours, theirs = (load_file(Path(c.output) / name) for c in (config, other))
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert value.equal(theirs[key]), f"{name}: {key}"


# -- what strikes


def _raise() -> None:
    raise ValueError(f"only on rank {os.environ['RANK']}")


_ACTS: dict[str, Act] = {
    "kill": partial(signal.raise_signal, signal.SIGKILL),
    "stop": partial(signal.raise_signal, signal.SIGSTOP),
    "raise": _raise,
}


def _fill_the_disk() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _around_every_step(act: Callable[[Any], Any], *, before: bool = False) -> None:
    """Call `act` with the run after each of its steps, or before."""
    from penstock.train import loop

    run: Any = loop._Run
    original = run._train_step

    def step(self: Any) -> None:
        if before:
            act(self)
        original(self)
        if not before:
            act(self)

    run._train_step = step


def _at_step(wanted: int, act: Act) -> None:
    _around_every_step(lambda run: act() if run.step == wanted else None)


def _after_steps(count: int, act: Act) -> None:
    taken: list[int] = []

    def count_down(run: Any) -> None:
        taken.append(run.step)
        if len(taken) == count:
            act()

    _around_every_step(count_down)


def _before_fsync(act: Callable[[int], Any]) -> None:
    """Call `act` with the number of each fsync, from 1."""
    original = os.fsync
    count = 0

    def fsync(handle: Any) -> None:
        nonlocal count
        count += 1
        act(count)
        original(handle)

    vars(os)["fsync"] = fsync


def poison(first: int, count: int, value: float) -> None:
    """Make this rank's gradients `value` in `count` steps from step `first` on (from 1), before they are averaged."""
    poison_when(lambda step: first <= step < first + count, value)


def poison_when(due: Callable[[int], bool], value: float) -> None:
    """Make this rank's gradients `value` in every step (from 1) that is `due`, before they are averaged."""
    from penstock.step.train_step import Accumulate

    runner: Any = Accumulate
    taken: list[int] = []
    original_loss = runner._one

    def note(run: Any) -> None:
        taken[:] = [run.step + 1]

    def accumulate(self: Any, *arguments: Any) -> Any:
        if not taken or not due(taken[0]):
            return original_loss(self, *arguments)
        plain = self.loss

        def poisoned(model: Any, batch: Any) -> Any:
            loss = plain(model, batch)
            if torch.is_grad_enabled():
                loss.register_hook(lambda gradient: gradient * value)
            return loss

        self.loss = poisoned
        try:
            return original_loss(self, *arguments)
        finally:
            self.loss = plain

    _around_every_step(note, before=True)
    runner._one = accumulate


def _heed(order: Path) -> None:
    poisoned: set[int] = set()

    def obey(run: Any) -> None:
        if not order.exists():
            return
        what = order.read_text()
        order.unlink()
        if what == "nan":
            poisoned.add(run.step + 1)
        else:
            _ACTS[what]()

    poison_when(poisoned.__contains__, float("nan"))
    _around_every_step(obey)


def _stand_still(note: Path) -> None:
    from penstock.train import loop

    module: Any = loop
    original = module.evaluate

    def evaluate(*arguments: Any, **options: Any) -> Any:
        if not note.exists():
            note.touch()
            threading.Event().wait()
        return original(*arguments, **options)

    module.evaluate = evaluate


def _append(file: Path, words: Callable[[Any], str]) -> None:
    """Add a line to `file` after each step of a run."""

    def note(run: Any) -> None:
        with file.open("a") as lines:
            lines.write(f"{words(run)}\n")

    _around_every_step(note)


def _samples_of(run: Any) -> str:
    numbers = [int(number) for batch in run.batches for number in batch.ids]
    return f"{os.environ['MASTER_PORT']} {run.step} {' '.join(map(str, numbers))}"


# -- ranks


def _arm(config: Path, faults: list[str]) -> None:
    """Have the faults strike in this process."""
    rank = int(os.environ.get("RANK", "0"))
    notes = config.parent / "struck"
    notes.mkdir(exist_ok=True)
    single = [fault for fault in faults if fault.partition(":")[0] in _ACTS]
    done = len(list(notes.iterdir()))
    if done < len(single):
        kind, whose, after = single[done].split(":")
        _after_steps(int(after), lambda: _strike(kind, int(whose) == rank, notes / str(done)))
    for fault in faults:
        kind, *values = fault.split(":")
        if kind == "poison" and int(values[0]) == rank:
            poison(int(values[1]), int(values[2]), float(values[3]))
        elif kind == "still" and int(values[0]) == rank:
            _stand_still(notes / "still")
        elif kind == "heed":
            _heed(config.parent / f"order.{rank}")
        elif kind == "samples":
            _append(config.parent / f"samples.{rank}", _samples_of)
        elif kind == "slow":
            _around_every_step(partial(_pause, int(values[0]) / 1000))
        elif kind == "slowsync":
            _before_fsync(partial(_pause, int(values[0]) / 1000))


def _strike(kind: str, mine: bool, note: Path) -> None:
    if mine:
        note.touch()
        _ACTS[kind]()


def _pause(seconds: float, _: Any) -> None:
    time.sleep(seconds)


def ranks(config: Path, faults: list[str]) -> int:
    """Train as a rank, doomed."""
    from penstock.cli import main as command

    rank = os.environ.get("RANK", "0")
    (config.parent / f"pid.{os.getpid()}").touch()
    (config.parent / f"rank.{rank}").write_text(str(os.getpid()))
    if rank == "0":
        _append(config.parent / "tally", lambda run: f"{time.time():.3f} {os.getpid()} {run.step}")
    torch.set_num_threads(1)
    _arm(config, faults)
    return command(["train", "--config", str(config)])


# -- lives


def lives(config: Path, faults: list[str]) -> int:
    """Live through `faults` one after the other."""
    from penstock.train import loop  # noqa: F401  # imported once, before the forks

    for fault in faults:
        kind, _, where = fault.partition(":")
        if kind in ("flip", "cut"):
            _damage(Path(load(RunConfig, file=config).output) / where, flip=kind == "flip")
            continue
        child = os.fork()
        if child == 0:
            code = 70
            try:
                code = _live(config, kind, where)
            except BaseException:  # the parent must not see a second copy of itself go on
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        ended = (
            f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"
        )
        sys.stdout.write(f"{fault} {ended}\n")
        sys.stdout.flush()
    return 0


def _live(config: Path, kind: str, value: str) -> int:
    """One life, in a child. Returns the exit code of the command line."""
    from penstock.train import train

    torch.set_num_threads(1)
    kill = _ACTS["kill"]
    arms: dict[str, Callable[[], Any]] = {
        "step": lambda: _at_step(int(value), kill),
        "term": lambda: _at_step(int(value), partial(os.kill, os.getpid(), signal.SIGTERM)),
        "full": lambda: _at_step(int(value), _fill_the_disk),
        "fsync": lambda: _before_fsync(lambda number: kill() if number == int(value) else None),
        "time": lambda: threading.Timer(float(value), partial(os.kill, os.getpid(), signal.SIGKILL)).start(),
        "none": lambda: None,
    }
    arms[kind]()
    try:
        train(load(RunConfig, file=config))
    except PenstockError as error:
        sys.stderr.write(f"{error}\n")
        return int(error.exit_code)
    return 0


def _damage(file: Path, *, flip: bool) -> None:
    content = bytearray(file.read_bytes())
    if flip:
        content[len(content) // 2] ^= 8
    file.write_bytes(content if flip else content[:-1])


# -- the toy


def toy(folder: Path, steps: int, faults: list[str]) -> int:
    """Run from the checkpoint to `steps`; 75 where asked to stop."""
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: asked.append(1))
    distributed.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank, world = distributed.get_rank(), distributed.get_world_size()
    (folder / f"pid.{os.getpid()}").touch()
    checkpoint = folder / "checkpoint"
    step = int(checkpoint.read_text()) if checkpoint.exists() else 0
    pause = next((int(fault.partition(":")[2]) for fault in faults if fault.startswith("slow:")), 0)
    while step < steps:
        ballot = torch.tensor([1.0, float(bool(asked))])
        distributed.all_reduce(ballot)
        assert ballot[0] == world
        step += 1
        beat(step)
        time.sleep(pause / 1000)
        if rank == 0:
            with (folder / "steps").open("a") as notes:
                notes.write(f"{step} {world} {os.environ['TORCHELASTIC_RESTART_COUNT']}\n")
        _strike_toy(folder, faults, rank, step)
        if step % 5 == 0 or ballot[1]:
            if rank == 0:
                part = checkpoint.with_suffix(".part")
                part.write_text(str(step))
                part.replace(checkpoint)
            distributed.barrier()
        if ballot[1]:
            return 75
    distributed.barrier()
    return 0


def _strike_toy(folder: Path, faults: list[str], rank: int, step: int) -> None:
    for number, fault in enumerate(faults):
        kind, *values = fault.split(":")
        note = folder / f"struck.{number}"
        if kind == "slow" or [rank, step] != [int(value) for value in values[:2]] or note.exists():
            continue
        if kind == "code":
            note.touch()
            sys.exit(int(values[2]))
        _strike(kind, True, note)


def steps_in(folder: Path) -> list[list[int]]:
    """Step, world and life of every step of the toy, in order."""
    file = folder / "steps"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [[int(word) for word in line.split()] for line in lines]


if __name__ == "__main__":
    _way, _where, *_faults = sys.argv[1:]
    if _way == "toy":
        sys.exit(toy(Path(_where), int(_faults[0]), _faults[1:]))
    sys.exit({"ranks": ranks, "lives": lives}[_way](Path(_where), _faults))
