"""A training program in a few lines, to test the launcher by: `python -m helpers.toy_run FOLDER STEPS FAULT…`

Each step is an all-reduce over gloo and a note in FOLDER; the checkpoint is the number of the step, saved at every
fifth and when SIGTERM or SIGUSR1 asked for it. Faults strike once each, whatever life it is:

- `kill:R:S`  rank R dies of SIGKILL after step S
- `stop:R:S`  rank R is stopped (SIGSTOP) after step S
- `raise:R:S` rank R raises after step S
- `code:R:S:C` rank R exits with code C after step S
- `slow:MS`   every step takes so many milliseconds (no fault)
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
from torch import distributed

from penstock.launch.heartbeat import beat

_asked = False


def main(folder: Path, steps: int, faults: list[str]) -> int:
    """Run from the checkpoint to `steps`; 75 where asked to stop."""
    signal.signal(signal.SIGTERM, _note)
    signal.signal(signal.SIGUSR1, _note)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank, world = distributed.get_rank(), distributed.get_world_size()
    (folder / f"pid.{os.getpid()}").touch()
    checkpoint = folder / "checkpoint"
    step = int(checkpoint.read_text()) if checkpoint.exists() else 0
    pause = next((int(fault.partition(":")[2]) for fault in faults if fault.startswith("slow:")), 0)
    while step < steps:
        ballot = torch.tensor([1.0, float(_asked)])
        distributed.all_reduce(ballot)
        assert ballot[0] == world
        step += 1
        beat(step)
        time.sleep(pause / 1000)
        if rank == 0:
            with (folder / "steps").open("a") as notes:
                notes.write(f"{step} {world} {os.environ['TORCHELASTIC_RESTART_COUNT']}\n")
        _strike(folder, faults, rank, step)
        if step % 5 == 0 or ballot[1]:
            _save(checkpoint, step, rank)
        if ballot[1]:
            return 75
    distributed.barrier()
    return 0


def _note(number: int, frame: FrameType | None) -> None:
    global _asked
    _asked = True


def _save(checkpoint: Path, step: int, rank: int) -> None:
    if rank == 0:
        partial = checkpoint.with_suffix(".part")
        partial.write_text(str(step))
        partial.replace(checkpoint)
    distributed.barrier()


def _strike(folder: Path, faults: list[str], rank: int, step: int) -> None:
    for number, fault in enumerate(faults):
        kind, *values = fault.split(":")
        if kind == "slow" or [rank, step] != [int(value) for value in values[:2]]:
            continue
        try:
            (folder / f"struck.{number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "raise":
            raise ValueError(f"only on rank {rank}")
        elif kind == "code":
            sys.exit(int(values[2]))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
