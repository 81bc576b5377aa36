"""`penstock train` with faults at chosen instants, for ranks under `penstock launch`:

`python -m helpers.doomed CONFIG FAULT…` trains as CONFIG says. In the folder `struck` beside CONFIG each fault
leaves a note and never strikes again. Faults of the first kind strike one by one, the next in the life after:

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
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

Act = Callable[[], None]


def _raise() -> None:
    raise ValueError(f"only on rank {os.environ['RANK']}")


_ACTS: dict[str, Act] = {
    "kill": partial(signal.raise_signal, signal.SIGKILL),
    "stop": partial(signal.raise_signal, signal.SIGSTOP),
    "raise": _raise,
}


def arm(config: Path, faults: list[str]) -> None:
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
            _note_samples(config.parent / f"samples.{rank}")
        elif kind == "slow":
            _after_every_step(partial(_pause, int(values[0]) / 1000))
        elif kind == "slowsync":
            _slow_sync(int(values[0]) / 1000)


def _strike(kind: str, mine: bool, note: Path) -> None:
    if mine:
        note.touch()
        _ACTS[kind]()


def _after_steps(count: int, act: Act) -> None:
    taken = 0

    def count_down(step: int) -> None:
        nonlocal taken
        taken += 1
        if taken == count:
            act()

    _after_every_step(count_down)


def _after_every_step(act: Callable[[int], Any]) -> None:
    from penstock.train import loop

    run: Any = loop._Run
    original = run._train_step

    def step(self: Any) -> None:
        original(self)
        act(self.step)

    run._train_step = step


def poison(first: int, count: int, value: float) -> None:
    """Make this rank's gradients `value` in `count` steps from step `first` on (from 1), before they are averaged."""
    poison_when(lambda step: first <= step < first + count, value)


def poison_when(due: Callable[[int], bool], value: float) -> None:
    """Make this rank's gradients `value` in every step (from 1) that is `due`, before they are averaged."""
    from penstock.step.runner import Accumulate
    from penstock.train import loop

    run: Any = loop._Run
    runner: Any = Accumulate
    taken: list[int] = []
    original_step, original_loss = run._train_step, runner._one

    def train_step(self: Any) -> None:
        taken[:] = [self.step + 1]
        original_step(self)

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

    run._train_step = train_step
    runner._one = accumulate


def _heed(order: Path) -> None:
    poisoned: set[int] = set()

    def obey(step: int) -> None:
        if not order.exists():
            return
        what = order.read_text()
        order.unlink()
        if what == "nan":
            poisoned.add(step + 1)
        else:
            _ACTS[what]()

    poison_when(poisoned.__contains__, float("nan"))
    _after_every_step(obey)


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


def _note_samples(file: Path) -> None:
    from penstock.train import loop

    run: Any = loop._Run
    original = run._train_step

    def step(self: Any) -> None:
        original(self)
        numbers = [int(number) for batch in self.batches for number in batch.ids]
        with file.open("a") as lines:
            lines.write(f"{os.environ['MASTER_PORT']} {self.step} {' '.join(map(str, numbers))}\n")

    run._train_step = step


def _note_steps(tally: Path) -> None:
    def note(step: int) -> None:
        with tally.open("a") as lines:
            lines.write(f"{time.time():.3f} {os.getpid()} {step}\n")

    _after_every_step(note)


def _pause(seconds: float, step: int) -> None:
    time.sleep(seconds)


def _slow_sync(seconds: float) -> None:
    original = os.fsync

    def fsync(handle: Any) -> None:
        time.sleep(seconds)
        original(handle)

    vars(os)["fsync"] = fsync


def main(config: Path, faults: list[str]) -> int:
    """Train, doomed."""
    from penstock.cli import main as command

    rank = os.environ.get("RANK", "0")
    (config.parent / f"pid.{os.getpid()}").touch()
    (config.parent / f"rank.{rank}").write_text(str(os.getpid()))
    if rank == "0":
        _note_steps(config.parent / "tally")
    torch.set_num_threads(1)
    arm(config, faults)
    return command(["train", "--config", str(config)])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
