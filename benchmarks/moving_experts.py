"""Steps of ranks that serve a mixture while its experts move, beside the same steps while they stay.

    penstock launch --procs 2 -- benchmarks/moving_experts.py --output benchmarks/results/moving_experts_cpu.json

Ranks generate the same texts again and again: in turn experts stay, and go two by two to other ranks and back, in
pieces, with a switch of all ranks every thirty steps. A step has the same work in each round but for what other
programs on the machine take, so its time is the least of all rounds. Rank 0 takes wall time, and the processor's own
time of its process.
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

EVERY, WARM = 30, 3
"""Steps from one move to the next, and steps that are not timed."""


Times = list[tuple[float, float]]
"""Wall time and own time of each step of a round."""


class Shuttle(Balance):
    """Begins a move every so many steps, and switches as late as it can: two experts of a mixture change places."""

    moving = False
    step = 0
    turn = 0

    def orders(self, visits: Any, pieces: int, complete: bool) -> list[tuple[Any, ...]]:
        at, self.step = (self.step - WARM) % EVERY, self.step + 1
        if self._number is not None:
            return self._go_on(pieces, complete and at == EVERY - 2)
        if not self.moving or at or self.step <= WARM:
            return []
        number = self.turn % len(self.slots)
        first, *between, last = (list(held) for held in self.slots[number])
        first[0], last[0] = last[0], first[0]
        after = tuple(map(tuple, (first, *between, last)))
        self.turn += 1
        self._number, self._after, self._pieces, self._last = number, after, -1, self.clock()
        self._stalled = 0.0
        return [("begin", number, after)]


def run(led: Led, shuttle: Shuttle, texts: int, steps: int, *, moving: bool) -> Times:
    """Wall time and own time of each step of a round, from the third on."""
    shuttle.moving, shuttle.step = moving, 0
    decoding = Decoding(max_tokens=steps + WARM + 1, ignore_end=True)
    for number in range(texts):
        assert (
            led.admit(Request(ids=tuple(range(1 + number % 7, 9 + number % 7)), decoding=decoding))
            is not None
        )
    taken = []
    for step in range(WARM + steps):
        begun, own = time.perf_counter(), time.process_time()
        led.step()
        if step >= WARM:
            taken.append((time.perf_counter() - begun, time.process_time() - own))
    for slot in range(texts):
        led.release(slot)
    return taken


def summary(rounds: list[Times], still: list[Times], clock: int) -> dict[str, float]:
    """The least time of each step over the rounds: median and worst in milliseconds, and their ratio; the worst step
    over the same step of rounds in which experts stay; and the worst step of any round over the median."""
    least, least_still = (
        [min(times[clock] for times in step) for step in zip(*each)] for each in (rounds, still)
    )
    median = statistics.median(least)
    return {
        "median_ms": 1e3 * median,
        "worst_ms": 1e3 * max(least),
        "worst_step": least.index(max(least)) % EVERY,
        "worst_over_median": max(least) / median,
        "worst_over_same_step": max(a / b for a, b in zip(least, least_still, strict=True)),
        "worst_of_any_round_over_median": max(times[clock] for each in rounds for times in each) / median,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--slots", type=int, default=8, help="texts of each rank")
    parser.add_argument("--steps", type=int, default=60, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=32)
    parser.add_argument("--piece", type=int, default=1 << 18, help="bytes of a piece")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    ranks = launched()
    plan = Plan(dp=ranks, ep=ranks)
    room = asked.steps + 64
    sizes: dict[str, Any] = {
        "width": asked.width, "heads": 4, "kv_heads": 4, "head_features": None, "depth": 4,
        "mlp_width": 4 * asked.width, "experts": asked.experts, "experts_per_token": 2, "sequence": room,
    }  # fmt: skip
    base: Any = PRESETS["mixtral-tiny"]
    torch.manual_seed(0)
    model = create(replace(base, **sizes))
    with together(plan, torch.device("cpu")) as dims:
        found = loaded(model, plan, weights="auto", tokenizer=None, dims=dims)
        led = Led(Engine(found.model, slots=asked.slots, context=room), dims)
        assert led.rounds is not None
        assert led.mover is not None
        led.mover.piece_bytes = asked.piece
        if dims.rank:
            led.follow()
            return
        shuttle = led.balance = Shuttle(0, [hosts.slots for hosts in led.rounds.hosts], time.monotonic)
        taken: dict[str, list[Times]] = {"stay": [], "move": []}
        run(led, shuttle, asked.slots * ranks, asked.steps, moving=False)
        for turn in range(asked.rounds):
            for kind in list(taken)[:: -1 if turn % 2 else 1]:
                round_ = run(led, shuttle, asked.slots * ranks, asked.steps, moving=kind == "move")
                taken[kind].append(round_)
        led.dismiss()
        expert_bytes = led.rounds.hosts[0].expert_bytes
    result = {
        "environment": environment(), "ranks": ranks, "model": sizes, "piece_bytes": asked.piece,
        "expert_bytes": expert_bytes, "moves": shuttle.moves, "given_up": shuttle.given_up, "rounds": asked.rounds,
        "steps": {
            kind: {clock: summary(rounds, taken["stay"], i) for i, clock in enumerate(("wall", "process"))}
            for kind, rounds in taken.items()
        },
    }  # fmt: skip
    text = json.dumps(result, indent=1)
    print(text)
    if asked.output is not None:
        asked.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
