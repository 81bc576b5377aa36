"""Ways to do the same work, raced side by side, and the cells of a table, kept in a file as they are measured."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from penstock.report.record import environment

OURS = "penstock"
WARM_UPS = {"compiled": 3, "ours-compiled": 3}
"""Runs before a way is measured: torch compiles again where it meets a second size."""
Run = Callable[[], Any]
Makes = dict[str, Callable[[], Run | str]]
"""Of each way what prepares it: gives the work, or in words why there is none."""
PAUSE = 0.3
"""Seconds before each run: threads of CTranslate2 and ONNX Runtime spin for up to 0.2 s after their work."""
_TOLD = 300
"""Characters of an error that are kept."""


class Apart:
    """A way in a process of its own: beside CTranslate2's threads those of torch sleep and wake at every product, which
    takes a third more time.

    The process is forked, which is safe while this one computes with one thread.
    """

    def __init__(self, make: Callable[[], Run | str], warm_ups: int, threads: int) -> None:
        forked = multiprocessing.get_context("fork")
        self._line, there = forked.Pipe()
        self._process = forked.Process(target=_serve, args=(there, make, warm_ups, threads), daemon=True)
        self._process.start()
        there.close()
        self.missing: str | None = self._heard()
        """Why there is none, in words."""

    def _heard(self) -> Any:
        try:
            return self._line.recv()
        except EOFError:
            self._process.join()
            return f"its process ended with {self._process.exitcode}"

    def __call__(self) -> float:
        """Do the work once; its seconds."""
        time.sleep(PAUSE)
        self._line.send(None)
        found = self._heard()
        if not isinstance(found, float):
            raise RuntimeError(f"A way that had worked failed: {found}")
        return found

    def end(self) -> None:
        """Let it go."""
        self._process.terminate()  # others forked since hold its line too, and would keep it open
        self._process.join()


def _serve(line: Any, make: Callable[[], Run | str], warm_ups: int, threads: int) -> None:
    torch.set_num_threads(threads)
    try:
        run = make()
        if isinstance(run, str):
            line.send(run)
            return
        for _ in range(warm_ups):
            run()
    except ImportError as problem:
        line.send(f"{problem.name} is not installed")
        return
    except Exception as problem:  # whatever another library raises
        line.send(f"{type(problem).__name__}: {' '.join(str(problem).split())[:_TOLD]}")
        return
    line.send(None)
    while True:
        line.recv()
        start = time.perf_counter()
        run()
        line.send(time.perf_counter() - start)


def raced(ways: dict[str, Callable[[], float]], rounds: int) -> dict[str, Any]:
    """Seconds of each way in rounds whose order is reversed each time, and how many times faster ours is than each
    other: medians of the ratios within a round."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            times[name].append(ways[name]())
    found: dict[str, Any] = {
        name: {"seconds": statistics.median(every), "least": min(every), "most": max(every)}
        for name, every in times.items()
    }
    for name in set(ways) - {OURS}:
        ratios = [other / own for own, other in zip(times[OURS], times[name])]
        found[name]["penstock is faster by"] = statistics.median(ratios)
        found[name]["between"] = [min(ratios), max(ratios)]
    return found


class Cells:
    """The cells of a table by their keys. A cell that the file holds is not measured again, so that a table may be
    measured in parts, and a run that was broken off goes on."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.settings = {"rounds": given.rounds, "threads": given.threads}
        stored = given.output is not None and given.output.exists()
        self.cells: list[dict[str, Any]] = (
            json.loads(given.output.read_text(encoding="utf-8"))["cells"] if stored else []
        )

    def missing(self, keys: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Those keys of which there is no cell yet; with --again, all."""
        for key in keys:
            if self.given.again or not any(_is(cell, key) for cell in self.cells):
                yield key

    def race(self, key: dict[str, Any], makes: Makes) -> None:
        """Measure a cell, print it and write the file."""
        ways: dict[str, Apart] = {}
        without: dict[str, str] = {}
        for name, make in makes.items():
            if name in (OURS, *self.given.ways):
                way = Apart(make, WARM_UPS.get(name, 1), self.given.threads)
                if way.missing is None:
                    ways[name] = way
                elif name == OURS:
                    raise RuntimeError(way.missing)
                else:
                    without[name] = way.missing
        found = raced(dict(ways), self.given.rounds)
        for way in ways.values():
            way.end()
        told = [f"{name} {each['seconds']:.3f} s" for name, each in found.items()]
        told += [
            f"{each['penstock is faster by']:.2f}x {name}" for name, each in found.items() if name != OURS
        ]
        told += [f"no {name}: {why}" for name, why in without.items()]
        print(f"{' '.join(map(str, key.values()))}: {', '.join(told)}", flush=True)
        self.cells = [cell for cell in self.cells if not _is(cell, key)]
        about = environment()
        when = {"time": about["time"], "commit": about["commit"], "load_average": os.getloadavg()[1]}
        self.cells.append({**key, "ways": found, "without": without, **self.settings, **when})
        if self.given.output:
            record = {"environment": about, "cells": self.cells}
            self.given.output.parent.mkdir(parents=True, exist_ok=True)
            self.given.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _is(cell: dict[str, Any], key: dict[str, Any]) -> bool:
    return all(cell.get(name) == value for name, value in key.items())


def options(about: str | None, *, ways: str, models: str) -> argparse.ArgumentParser:
    """What scripts that race have in common."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=models, type=_words, help="with commas between them")
    parser.add_argument("--types", default="fp32,bf16,int8", type=_words)
    parser.add_argument("--ways", default=ways, type=_words)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--again", action="store_true", help="measure cells that the file holds, too")
    parser.add_argument("--output", type=Path, help="cells in it that are not measured now stay")
    return parser


def _words(text: str) -> list[str]:
    return text.split(",")


def require_known(folder: Path) -> None:
    """Refuse a folder that is not in transformers' names: it would load other weights, of other sizes."""
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    if kind.startswith("penstock_"):
        raise SystemExit(f"transformers has no such model, which was saved as {kind}.")


def in_onnx_runtime(path: Path, threads: int) -> Callable[[dict[str, torch.Tensor]], Any]:
    """An ONNX file as a function of tensors by name, in so many threads."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    return lambda feeds: session.run(None, {name: value.numpy() for name, value in feeds.items()})
