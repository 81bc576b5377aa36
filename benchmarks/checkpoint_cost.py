"""The cost of a checkpoint: how long training waits for it, in the foreground and in the background.

    python benchmarks/checkpoint_cost.py --output benchmarks/results/checkpoint_cost_cpu.json

A stack of linear layers with AdamW in fp32 (12 bytes per parameter in a checkpoint) trains on one thread. A
round saves once in each way, and the order rotates: `penstock.checkpoint.save`; `BackgroundSaver`; and as
reference `torch.distributed.checkpoint.save` with its defaults, which computes no checksum, reads nothing
back, and writes in place, with pickled metadata. Our time includes pruning older checkpoints; the reference's
are removed outside its time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from penstock import checkpoint
from penstock.checkpoint import BackgroundSaver, Snapshot, by_name
from penstock.report.record import environment


class Run:
    """A model in training."""

    def __init__(self, parameters: int) -> None:
        width = 2048
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(round(parameters / width**2))))
        named = list(self.model.named_parameters())
        group = {"params": [p for _, p in named], "param_names": [n for n, _ in named]}
        self.optimizer = torch.optim.AdamW([group], lr=1e-6, fused=True)
        self.x = torch.randn(16, width)
        self.step = 0

    def train(self) -> float:
        """One step; its seconds."""
        started = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.step += 1
        return time.perf_counter() - started

    def snapshot(self) -> Snapshot:
        return Snapshot(
            self.step,
            {"weights": self.model.state_dict()},
            {"optimizer": by_name(self.optimizer.state_dict())},
            {},
        )


def timed(name: str, action: Callable[[], Any]) -> dict[str, float]:
    """Wall-clock time, and processor time of all threads; the latter says more on a busy machine."""
    wall, processor = time.perf_counter(), time.process_time()
    action()
    return {
        f"{name}_seconds": time.perf_counter() - wall,
        f"{name}_processor_seconds": time.process_time() - processor,
    }


def foreground(run: Run, folder: Path, saver: BackgroundSaver) -> dict[str, float]:
    return timed("foreground_stop", lambda: checkpoint.save(folder / "ours", run.snapshot()))


def background(run: Run, folder: Path, saver: BackgroundSaver) -> dict[str, float]:
    started = time.perf_counter()
    found = timed("background_stop", lambda: saver.start(run.snapshot()))
    beside = []
    while saver.busy:
        beside.append(run.train())
    saver.wait()
    found["background_total_seconds"] = time.perf_counter() - started
    found["step_seconds_beside_a_save"] = statistics.median(beside)
    found["steps_beside_a_save"] = len(beside)
    return found


def reference(run: Run, folder: Path, saver: BackgroundSaver) -> dict[str, float]:
    theirs = folder / "theirs"
    state = {"model": run.model.state_dict(), "optimizer": by_name(run.optimizer.state_dict())["state"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that this is one process
        found = timed(
            "dcp_as_it_comes_stop",
            lambda: dcp.save(state, storage_writer=dcp.FileSystemWriter(theirs), no_dist=True),
        )
    shutil.rmtree(theirs)
    return found


WAYS = (foreground, background, reference)


def once(run: Run, folder: Path, saver: BackgroundSaver, first: int) -> dict[str, float]:
    """One round: a save in each way, each after three steps of training; the first way rotates."""
    found: dict[str, float] = {"step_seconds": statistics.median(run.train() for _ in range(3))}
    for number in range(len(WAYS)):
        run.train()
        found |= WAYS[(first + number) % len(WAYS)](run, folder, saver)
    path = folder / "ours" / f"step-{checkpoint.steps(folder / 'ours')[-1]}"
    found |= timed("verify", lambda: checkpoint.verify(path, keep_cached=False))
    found |= timed("verify_and_load", lambda: checkpoint.load(path))
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--parameters", type=float, default=100e6)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument(
        "--folder", type=Path, help="on the disk to measure; default: the temporary folder"
    )
    arguments.add_argument("--output", type=Path)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    run = Run(int(given.parameters))
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        saver = BackgroundSaver(folder / "ours")
        first = once(run, folder, saver, 0)  # allocates the copies, warms the rest
        rounds = [once(run, folder, saver, number) for number in range(given.rounds)]
        saver.close()
        newest = folder / "ours" / f"step-{checkpoint.steps(folder / 'ours')[-1]}"
        size = checkpoint.verify(newest).bytes
    medians = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
    result = {
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "bytes": size,
        "median": medians,
        "first_background_stop_seconds": first["background_stop_seconds"],
        "foreground_bytes_per_second": size / medians["foreground_stop_seconds"],
        "background_over_foreground_stop": medians["background_stop_seconds"]
        / medians["foreground_stop_seconds"],
        "load_average": os.getloadavg(),
        "rounds": rounds,
    }
    text = json.dumps(environment() | {"results": result}, indent=2)
    print(text)
    if given.output:
        given.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
