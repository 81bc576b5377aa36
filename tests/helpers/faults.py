"""Faults at chosen instants of a training run: `python -m helpers.faults CONFIG FAULT…`

Each fault is one life of the run that CONFIG (a file of RunConfig settings) describes; the next life resumes it:

- `step:N`  SIGKILL right after step N's computation, before anything of it is logged or saved
- `fsync:N` SIGKILL in place of the N-th fsync of this life: in the middle of a save
- `time:S`  SIGKILL after S seconds
- `term:N`  SIGTERM after step N
- `full:N`  after step N no file may grow past 8 kB, so that the kernel cuts what is written off, as a full disk does
- `none`    no fault
- `flip:P`  no life, but one bit flipped in the middle of file P, relative to the run's output
- `cut:P`   no life, but the last byte of file P cut off
- `in:P`    no life, but those that follow are of the run that file P describes

One line per life says how it ended: `exit 0`, `signal 9` …. Lives are forked from this process before it has
computed anything, so that torch is imported once and no thread is forked.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any


def _kill(number: signal.Signals = signal.SIGKILL) -> None:
    os.kill(os.getpid(), number)


def _fill_the_disk() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _after_step(wanted: int, act: Callable[[], None]) -> None:
    from penstock.train import loop

    run: Any = loop._Run
    original = run._train_step

    def step(self: Any) -> None:
        original(self)
        if self.step == wanted:
            act()

    run._train_step = step


def _at_fsync(wanted: int) -> None:
    original = os.fsync
    count = 0

    def fsync(handle: Any) -> None:
        nonlocal count
        count += 1
        if count == wanted:
            _kill()
        original(handle)

    vars(os)["fsync"] = fsync


def _arm(fault: str) -> None:
    kind, _, value = fault.partition(":")
    if kind == "step":
        _after_step(int(value), _kill)
    elif kind == "term":
        _after_step(int(value), partial(_kill, signal.SIGTERM))
    elif kind == "full":
        _after_step(int(value), _fill_the_disk)
    elif kind == "fsync":
        _at_fsync(int(value))
    elif kind == "time":
        threading.Timer(float(value), _kill).start()
    elif kind != "none":
        raise ValueError(f"There is no fault {fault!r}.")


def _live(config: Path, fault: str) -> int:
    """One life, in a child. Returns the exit code of the command line."""
    import torch

    from penstock.config.load import load
    from penstock.config.run import RunConfig
    from penstock.errors import PenstockError
    from penstock.train import train

    torch.set_num_threads(1)
    _arm(fault)
    try:
        train(load(RunConfig, file=config))
    except PenstockError as error:
        sys.stderr.write(f"{error}\n")
        return int(error.exit_code)
    return 0


def _output(config: Path) -> Path:
    from penstock.config.load import load
    from penstock.config.run import RunConfig

    return Path(load(RunConfig, file=config).output)


def _damage(file: Path, *, flip: bool) -> None:
    content = bytearray(file.read_bytes())
    if flip:
        content[len(content) // 2] ^= 8
    file.write_bytes(content if flip else content[:-1])


def main(config: Path, faults: list[str]) -> None:
    """Live through `faults` one after the other."""
    from penstock.train import loop  # noqa: F401  # imported once, before the forks

    for fault in faults:
        kind, _, where = fault.partition(":")
        if kind in ("flip", "cut"):
            _damage(_output(config) / where, flip=kind == "flip")
            continue
        if kind == "in":
            config = Path(where)
            continue
        child = os.fork()
        if child == 0:
            code = 70
            try:
                code = _live(config, fault)
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


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
