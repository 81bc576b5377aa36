"""Steps of models that are split over processes: predicted beside measured, with the bubbles of pipelines.

    OMP_NUM_THREADS=1 python benchmarks/predicted_layouts.py --procs 2 --rounds 3 \\
        --output benchmarks/results/predicted_layouts_cpu.json

It starts that many processes on this machine for each round, each with one thread or a GPU of its own, and bound to a
core of its own where there are as many, as `penstock launch --bind-cores` does. They probe the machine at the same
time, take steps under each layout in turn, and probe again. A fixed product is timed around each probe and between
steps: predictions are scaled by how much slower it was among the steps, as in `predicted_own_runs.py`, and are the mean
of all processes' and both probes'. Time is wall-clock time. A bubble is the ranks' mean idle share of a pipeline's
makespan in one step.

Rounds that the output holds are kept, and those that are missing are measured: an interrupted run goes on with the same
command. Schedules are ordered by their simulated makespans, and by their measured steps over the yardstick then. Two of
them count as apart where their difference, on the median of rounds, is larger than its spread.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed

from penstock.build import Built, build
from penstock.config.machine import Machine
from penstock.config.model import DecoderConfig, EncoderConfig, ModelConfig, ViTConfig, preset
from penstock.config.plan import Plan
from penstock.config.run import Recipe
from penstock.launch.settings import own_cores, usable_cores
from penstock.parallel.dims import ParallelDims
from penstock.parallel.join import joined, local_device
from penstock.planner.prediction import predict, stage_costs
from penstock.probe import resolve_device
from penstock.report.record import environment
from penstock.schedules import play_shared, schedule_of
from penstock.schedules.schedule import Action
from penstock.step.pipeline import Pipeline
from penstock.tasks.image_classification import ImageClassification
from predicted_own_runs import Yardstick, probed, step_seconds

GPT, BERT, VIT = "gpt of 8 blocks", "bert of 8 blocks", "vit-s16"
SCHEDULES = ("schedule=gpipe", "schedule=1f1b", "schedule=interleaved virtual=2", "schedule=zero_bubble")
CASES = {
    2: (
        (GPT, "micro_batch=2 dp=2"),
        (GPT, "micro_batch=2 dp=2 sharding=fsdp"),
        (GPT, "micro_batch=4 tp=2"),
        (GPT, "micro_batch=4 tp=2 sp=true"),
        (GPT, "micro_batch=4 cp=2"),
        *((GPT, f"micro_batch=1 accumulate=4 pp=2 {one}") for one in SCHEDULES),
        (BERT, "micro_batch=4 cp=2"),
        (VIT, "micro_batch=2 dp=2 sharding=fsdp"),
        (VIT, "micro_batch=4 tp=2 sp=true"),
        *((VIT, f"micro_batch=1 accumulate=4 pp=2 {one}") for one in SCHEDULES),
    ),
    4: (
        (GPT, "micro_batch=1 dp=4"),
        (GPT, "micro_batch=2 dp=2 tp=2"),
        (GPT, "micro_batch=1 accumulate=4 tp=2 pp=2 sp=true schedule=1f1b"),
        (GPT, "micro_batch=1 accumulate=2 dp=2 pp=2 schedule=1f1b"),
        *((GPT, f"micro_batch=1 accumulate=4 pp=4 {one}") for one in SCHEDULES),
        (VIT, "micro_batch=2 dp=2 tp=2 sp=true"),
    ),
}
"""Of each number of processes, models and Plans."""
ALWAYS = "optimizer=fused host_memory=keep"
PRODUCTS = 16
"""Of a yardstick: about half a second."""
BUBBLES = 3
"""Steps of which a pipeline's bubble is measured."""


def models() -> dict[str, ModelConfig]:
    """Small enough for steps of about a second on two cores, and large enough that products take most of them."""
    gpt, bert = preset("gpt2"), preset("bert-base")
    assert isinstance(gpt, DecoderConfig)
    assert isinstance(bert, EncoderConfig)
    sizes = {"width": 384, "depth": 8, "heads": 6, "mlp_width": 1536, "vocabulary": 8192, "sequence": 256}
    return {
        GPT: replace(gpt, **sizes, max_positions=256, dropout=0.0),
        BERT: replace(bert, **sizes, max_positions=256, dropout=0.0),
        VIT: preset("vit-s16"),
    }


class Given(ImageClassification):
    """Cross entropy of every output, of batches that hold inputs and targets."""

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        return tuple(batch[:-1])

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return F.cross_entropy(outputs.float().reshape(-1, outputs.shape[-1]), batch[-1].flatten())

    def targets(self, batch: Any) -> int:
        return batch[-1].numel()


def micro_batch(config: ModelConfig, samples: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Drawn inputs and targets; every rank draws the same."""
    if isinstance(config, ViTConfig):
        images = torch.randn(samples, config.channels, config.image_size, config.image_size, device=device)
        return images, torch.randint(0, config.classes, (samples,), device=device)
    assert isinstance(config, DecoderConfig | EncoderConfig)
    tokens = torch.randint(0, config.vocabulary, (2, samples, config.sequence), device=device)
    return tokens[0], tokens[1]


def bubble(built: Built, batches: Sequence[Any]) -> float | None:
    """What a pipeline's ranks are idle in one step, as a share of its makespan; None without a pipeline."""
    runner, plan = built.step.runner, built.plan
    if not isinstance(runner, Pipeline):
        return None
    mine: list[tuple[Action, float, float]] = []
    distributed.barrier()
    runner.trace = mine
    built.step(list(batches))
    runner.trace = None
    told: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(told, [(str(action), start, end) for action, start, end in mine])
    each = len(told) // plan.pp
    # Processes of one machine share its clock.
    times = [(start, end) for at in range(plan.pp) for _, start, end in told[at * each]]
    makespan = max(end for _, end in times) - min(start for start, _ in times)
    return 1.0 - sum(end - start for start, end in times) / (plan.pp * makespan)


Mine = dict[str, float]
"""What one rank measured or predicts of one layout."""


def measured(
    config: ModelConfig, plan: Plan, dims: ParallelDims, device: torch.device, yardstick: Yardstick
) -> Mine:
    """One round of one layout."""
    torch.manual_seed(0)
    built = build(config, plan, device=device, recipe=Recipe(), loss=Given(), dims=dims)
    batches = [micro_batch(config, plan.micro_batch, device)] * plan.accumulate
    took, speed = step_seconds(built, batches, device, yardstick)
    found = {"seconds": took, "yardstick": speed, "yardsticks": took / speed}
    if plan.pp > 1:
        idle = [one for _ in range(BUBBLES) if (one := bubble(built, batches)) is not None]
        found["bubble"] = statistics.median(idle)
    del built
    gc.collect()
    return found


def predictions(config: ModelConfig, plan: Plan, machine: Machine, slower: float) -> Mine:
    """What the planner says of a step on a machine that is so much slower than it was when probed."""
    said = predict(config, machine, plan).iteration_seconds
    found = {"predicted": slower * said, "as_probed": said}
    if plan.pp > 1:
        costs = stage_costs(config, machine, plan)
        played = play_shared(schedule_of(plan), costs, max(1.0, machine.alone_speedup))
        found |= {
            "simulated": played.makespan,
            "predicted_bubble": played.bubble_fraction,
        }
    return found


def mean(rows: Sequence[Mine]) -> Mine:
    return {name: statistics.mean(row[name] for row in rows) for name in rows[0]}


def worker(options: argparse.Namespace) -> None:
    """One rank of one round: measures the chosen layouts; rank 0 prints what was found as JSON."""
    device = local_device(resolve_device(options.device))
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if device.type == "cpu" and ranks <= len(usable_cores()):
        os.sched_setaffinity(0, own_cores(rank, ranks))
    distributed.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    world, first = distributed.get_world_size(), distributed.get_rank() == 0
    yardstick = Yardstick(device, PRODUCTS)
    machines, found = [probed(device, yardstick, precise=False)], []
    for name, line in (CASES[world][index] for index in options.cases):
        config, plan = models()[name], Plan.parse(f"{line} {ALWAYS}")
        with joined(plan, device) as dims:
            found.append((name, plan, measured(config, plan, dims, device, yardstick)))
        if first:
            print(f"{name}: {line}: {found[-1][2]['seconds']:.3f} s", file=sys.stderr, flush=True)
    machines.append(probed(device, yardstick, precise=False))
    for name, plan, mine in found:
        config = models()[name]
        said = [predictions(config, plan, machine, mine["yardstick"] / then) for machine, then in machines]
        every: list[Any] = [None] * world
        distributed.all_gather_object(every, mine | mean(said))
        parts = predict(config, machines[1][0], plan).seconds
        if first:
            print(json.dumps({"model": name, "plan": plan.line(), **mean(every), "parts": parts}), flush=True)
    distributed.destroy_process_group()


def case(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The JSON of one layout."""
    errors = [one["predicted"] / one["seconds"] - 1 for one in rounds]
    found = {
        "model": rounds[0]["model"],
        "plan": rounds[0]["plan"],
        "step_seconds": {
            "measured": statistics.median(one["seconds"] for one in rounds),
            "predicted": statistics.median(one["predicted"] for one in rounds),
        },
        "step_error": {"median": statistics.median(errors), "min": min(errors), "max": max(errors)},
        "rounds": [
            {name: value for name, value in one.items() if name != "parts" or one is rounds[-1]}
            for one in rounds
        ],
    }
    if "bubble" in rounds[0]:
        found["bubble"] = {
            "measured": statistics.median(one["bubble"] for one in rounds),
            "predicted": statistics.median(one["predicted_bubble"] for one in rounds),
        }
    return found


def apart(one: dict[str, Any], other: dict[str, Any], what: str) -> float:
    """By how much `one` takes longer, on the median of rounds; 0 where that is less than its spread."""
    ratios = [a[what] / b[what] - 1 for a, b in zip(one["rounds"], other["rounds"])]
    found = round(statistics.median(ratios), 9)
    return found if len(ratios) > 1 and abs(found) > max(ratios) - min(ratios) else 0.0


def orders(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The schedules of each model's pipelines from the fastest on, measured and simulated."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in cases:
        plan = Plan.parse(one["plan"])
        if plan.pp > 1:
            alike = replace(plan, schedule="1f1b", virtual=1).line()
            groups.setdefault((one["model"], alike), []).append(one)
    found = []
    for (name, alike), group in groups.items():
        if len(group) < 2:
            continue
        ranked = {
            what: sorted(group, key=lambda one: statistics.median(each[what] for each in one["rounds"]))
            for what in ("yardsticks", "simulated")
        }
        against = [
            f"{schedule(one)} before {schedule(other)}"
            for one, other in itertools.permutations(group, 2)
            if apart(one, other, "yardsticks") < 0 < apart(one, other, "simulated")
        ]
        found.append(
            {
                "model": name,
                "plan": alike,
                "measured": [schedule(one) for one in ranked["yardsticks"]],
                "simulated": [schedule(one) for one in ranked["simulated"]],
                "apart": [
                    bool(apart(one, other, "yardsticks"))
                    for one, other in itertools.pairwise(ranked["yardsticks"])
                ],
                "against_the_simulated_order": against,
                "agrees": not against if min(len(one["rounds"]) for one in group) > 1 else None,
            }
        )
    return found


def schedule(one: dict[str, Any]) -> str:
    return Plan.parse(one["plan"]).schedule


def show(cases: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]], procs: int) -> None:
    for one in cases:
        took, idle = one["step_seconds"], one.get("bubble")
        words = f"; bubble {idle['measured']:.1%}, predicted {idle['predicted']:.1%}" if idle else ""
        print(
            f"{one['model']:<17}{one['plan']:<88}{1e3 * took['measured']:8.1f} ms, predicted "
            f"{1e3 * took['predicted']:8.1f} ({one['step_error']['median']:+.1%}){words}"
        )
    for one in found:
        told = one["measured"][0]
        for name, differs in zip(one["measured"][1:], one["apart"]):
            told += f" {'<' if differs else '='} {name}"
        verdict = {True: "agrees", False: "does not agree", None: "one round tells no noise"}[one["agrees"]]
        print(
            f"{one['model']}: {one['plan']}: measured {told}; simulated {' '.join(one['simulated'])}: {verdict}"
        )
    off = statistics.median(abs(one["step_error"]["median"]) for one in cases)
    print(f"{len(cases)} layouts on {procs} processes: median error {off:.1%}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--procs", type=int, choices=tuple(CASES), default=2)
    parser.add_argument("--rounds", type=int, default=3, help="that each layout shall have in the end")
    parser.add_argument("--only", default="", help="layouts whose model or Plan contains this, such as pp=2")
    parser.add_argument("--output", type=Path, help="what it holds stays")
    parser.add_argument("--cases", type=json.loads, help="be one of the processes, and measure these once")
    return parser.parse_args()


def one_round(options: argparse.Namespace, cases: list[int]) -> list[dict[str, Any]]:
    """What the processes found of the cases of these numbers."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(options.procs), __file__]
    command += ["--device", options.device, "--cases", json.dumps(cases)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main() -> None:
    options = arguments()
    if options.cases is not None:
        worker(options)
        return
    kept: dict[str, Any] = {}
    if options.output and options.output.exists():
        kept = json.loads(options.output.read_text(encoding="utf-8"))
    here = f"{options.procs} processes"
    stored = {(one["model"], one["plan"]): one["rounds"] for one in kept.get(here, {}).get("cases", [])}
    keys = [(name, Plan.parse(f"{line} {ALWAYS}").line()) for name, line in CASES[options.procs]]
    rounds = {key: stored.get(key, []) for key in keys}
    chosen = [i for i, (name, line) in enumerate(CASES[options.procs]) if options.only in f"{name}: {line}"]
    while wanted := [i for i in chosen if len(rounds[keys[i]]) < options.rounds]:
        fewest = min(len(rounds[keys[i]]) for i in wanted)
        print(f"round {fewest + 1} of {options.rounds}", flush=True)
        for one in one_round(options, [i for i in wanted if len(rounds[keys[i]]) == fewest]):
            rounds[one["model"], one["plan"]].append(one)
        if options.output:
            write(options, kept, here, rounds)
    cases = [case(seen) for key, seen in rounds.items() if seen and keys.index(key) in chosen]
    show(cases, orders(cases), options.procs)


def write(options: argparse.Namespace, kept: dict[str, Any], here: str, rounds: dict[Any, Any]) -> None:
    cases = [case(seen) for seen in rounds.values() if seen]
    kept[here] = {"cases": cases, "orders": orders(cases)}
    kept["environment"] = environment()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
