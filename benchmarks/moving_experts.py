"""Steps of ranks that serve a mixture while its experts move, beside steps while they stay.

    penstock launch --procs 2 -- benchmarks/moving_experts.py --output benchmarks/results/moving_experts_cpu.json

Ranks generate texts without a pause. In turn experts stay for some steps, and then one after the other goes to another
rank and back, in pieces, with a switch of all ranks whenever one has come. Of each step rank 0 takes the wall time, and
the processor's own time of its process, which other work on the machine lengthens less. Where other work makes single
steps long at any time, the kinds of steps are compared by their medians: those that begin a move, have pieces under
way, or switch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.config.decoding import Decoding
from penstock.config.model import PRESETS
from penstock.config.plan import Plan
from penstock.decode.engine import Engine, Request
from penstock.infer.load import loaded
from penstock.infer.ranks import together
from penstock.models import create
from penstock.parallel import launched
from penstock.report.record import environment
from penstock.serve.balance import Balance
from penstock.serve.led import Led


class Shuttle(Balance):
    """Orders a move whenever none is under way: two experts of a mixture change places, and later back."""

    moving = False
    turn = 0
    kind = "stay"
    """The kind of the present step: `stay`, `begin`, `pieces` or `switch`."""

    def orders(self, visits: Any, pieces: int, complete: bool) -> list[tuple[Any, ...]]:
        if self._number is not None:
            found = self._go_on(pieces, complete)
            self.kind = "switch" if found else "pieces"
            return found
        if not self.moving:
            self.kind = "stay"
            return []
        self.kind = "begin"
        number = self.turn % len(self.slots)
        first, *between, last = (list(held) for held in self.slots[number])
        first[0], last[0] = last[0], first[0]
        after = tuple(map(tuple, (first, *between, last)))
        self.turn += 1
        self._number, self._after, self._pieces, self._last = number, after, -1, self.clock()
        self._stalled = 0.0
        return [("begin", number, after)]


def summary(times: list[float]) -> dict[str, float]:
    """Median, highest hundredth and worst, in milliseconds, and the worst over the median."""
    ordered = sorted(times)
    median = statistics.median(times)
    return {
        "steps": len(times),
        "median_ms": 1e3 * median,
        "99_percent_ms": 1e3 * ordered[int(0.99 * (len(ordered) - 1))],
        "worst_ms": 1e3 * ordered[-1],
        "worst_over_median": ordered[-1] / median,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--slots", type=int, default=8, help="texts of each rank")
    parser.add_argument("--phase", type=int, default=100, help="steps until the other phase comes")
    parser.add_argument("--phases", type=int, default=8)
    parser.add_argument("--piece", type=int, default=1 << 18, help="bytes of a piece")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    ranks = launched()
    plan = Plan(dp=ranks, ep=ranks)
    steps = asked.phase * asked.phases
    sizes: dict[str, Any] = {
        "width": asked.width, "heads": 4, "kv_heads": 4, "head_features": None, "depth": 4,
        "mlp_width": 4 * asked.width, "experts": asked.experts, "experts_per_token": 2, "sequence": steps + 64,
    }  # fmt: skip
    base: Any = PRESETS["mixtral-tiny"]
    torch.manual_seed(0)
    model = create(replace(base, **sizes))
    with together(plan, torch.device("cpu")) as dims:
        found = loaded(model, plan, weights="auto", tokenizer=None, dims=dims)
        engine = Engine(found.model, slots=asked.slots, context=steps + 64)
        balance = None
        led = Led(engine, dims)
        assert led.rounds is not None
        assert led.mover is not None
        led.mover.piece_bytes = asked.piece
        if dims.rank:
            led.follow()
            return
        balance = led.balance = Shuttle(0, [hosts.slots for hosts in led.rounds.hosts], time.monotonic)
        decoding = Decoding(max_tokens=steps + 20, ignore_end=True)
        for number in range(asked.slots * ranks):
            led.admit(Request(ids=tuple(range(1 + number % 7, 9 + number % 7)), decoding=decoding))
        for _ in range(10):
            led.step()
        taken: dict[str, dict[str, list[float]]] = {
            kind: {"wall": [], "process": []} for kind in ("stay", "begin", "pieces", "switch")
        }
        for step in range(steps):
            balance.moving = bool(step // asked.phase % 2)
            begun, own = time.perf_counter(), time.process_time()
            led.step()
            taken[balance.kind]["wall"].append(time.perf_counter() - begun)
            taken[balance.kind]["process"].append(time.process_time() - own)
        led.dismiss()
        bytes_moved = led.rounds.hosts[0].expert_bytes
    result = {
        "environment": environment(), "ranks": ranks, "model": sizes, "piece_bytes": asked.piece,
        "expert_bytes": bytes_moved, "moves": balance.moves, "given_up": balance.given_up,
        "steps": {kind: {clock: summary(times) for clock, times in both.items()} for kind, both in taken.items()},
    }  # fmt: skip
    text = json.dumps(result, indent=1)
    print(text)
    if asked.output is not None:
        asked.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
