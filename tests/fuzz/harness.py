"""Runs a door's cases in a process of its own, as often as it takes to get through them."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzz.child import BLOCK
from helpers.forked import run_python

TESTS = Path(__file__).parents[1]


@dataclass
class Outcome:
    """How the cases of a door ended."""

    cases: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    """Processor seconds of the slowest case."""
    largest: int = 0
    """Bytes by which the process grew at most in one case."""
    failures: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """As the page of faults shows them."""
        ended = dict(sorted(self.ended.items()))
        return {
            "cases": self.cases,
            "let in": ended.pop("let in", 0),
            "refused": ended,
            "slowest seconds": round(self.slowest, 3),
            "largest growth in MB": round(self.largest / 1e6, 1),
            "tracebacks, hangs or floods": len(self.failures),
        }


def fuzz(door: str, cases: int, *, stop_after: int = 5) -> Outcome:
    """Run `cases` cases of a door. Stops after some failures."""
    outcome = Outcome()
    block, last = 0, -(-cases // BLOCK)
    while block < last and len(outcome.failures) < stop_after:
        block = _run([door, "--from", str(block), "--to", str(last)], outcome) + 1
    return outcome


def run_case(door: str, name: str, file: Path, *options: str) -> Outcome:
    """Run one stored case."""
    outcome = Outcome()
    _run([door, "--name", name, "--case", str(file), *options], outcome)
    return outcome


def _run(arguments: list[str], outcome: Outcome) -> int:
    """Start one child and read what it reports. Returns the last block that it finished or died in."""
    with tempfile.TemporaryDirectory(prefix="penstock-fuzz-") as folder:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
            "PENSTOCK_CACHE": f"{folder}/cache",
        }
        code, reported, errors = run_python(
            ["-m", "fuzz.child", *arguments], Path(folder), env=environment, cwd=folder, timeout=7200.0
        )
        block = 0
        for line in reported.splitlines():
            block = max(block, _take(json.loads(line), outcome))
        if code == 0:
            return block
        return max(block, _took_down(Path(folder), code, errors[-1500:], outcome))


def _take(document: dict[str, Any], outcome: Outcome) -> int:
    if "failed" in document:
        outcome.failures.append(
            f"block {document['block']}, made from {document['name']!r}: {document['failed']}\n"
            f"  input: {_short(document['hex'])}"
        )
    else:
        outcome.cases += sum(document["ended"].values())
        outcome.ended.update(document["ended"])
        outcome.slowest = max(outcome.slowest, document["seconds"])
        outcome.largest = max(outcome.largest, document["bytes"])
    return int(document["block"])


def _took_down(folder: Path, code: int, errors: str, outcome: Outcome) -> int:
    """Note the case that ended its process."""
    file = folder / "room" / "case.bin"
    head, _, data = file.read_bytes().partition(b"\n") if file.exists() else (b"", b"", b"")
    number, _, name = head.decode(errors="replace").partition(" ")
    if code == -signal.SIGALRM:
        how = "It hangs."
    else:
        how = f"The process ended with {code}: {errors}"
    outcome.failures.append(f"block {number}, made from {name!r}: {how}\n  input: {_short(data.hex())}")
    outcome.ended["failed"] += 1
    outcome.cases += 1
    return int(number or 1 << 30)  # without a case, no block can be run


def _short(text: str) -> str:
    return text if len(text) <= 4000 else f"{text[:4000]}… ({len(text) // 2:,} bytes)"
