"""Steps of models that are split over processes: predicted beside measured, with the bubbles of pipelines.

    OMP_NUM_THREADS=1 python benchmarks/predicted_layouts.py --procs 2 \\
        --output benchmarks/results/predicted_layouts_cpu.json

It starts that many processes on this machine, each with one thread or a GPU of its own. In each round they probe the
machine at the same time, take steps under each layout in turn, and probe again. Predictions use the mean of both
probes, so each process's share of the machine is what was measured. Time is wall-clock time. A bubble is the ranks'
mean idle share of a pipeline's makespan in one step.
"""

from __future__ import annotations

import argparse
import gc
import json
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
from penstock.config.model import DecoderConfig, EncoderConfig, ModelConfig, ViTConfig, preset
from penstock.config.plan import Plan
from penstock.config.run import Recipe
from penstock.parallel.dims import ParallelDims
from penstock.parallel.join import joined, local_device
from penstock.planner.prediction import predict
from penstock.planner.stages import stage_costs
from penstock.probe import probe, resolve_device
from penstock.report.record import environment
from penstock.schedules import Measured, schedule_of, simulate
from penstock.schedules.schedule import Action
from penstock.schedules.simulate import Span
from penstock.step.pipeline import Pipeline
from penstock.tasks.image_classification import ImageClassification
from predicted_own_runs import step_seconds

SCHEDULES = ("schedule=gpipe", "schedule=1f1b", "schedule=interleaved virtual=2", "schedule=zero_bubble")
LINES = {
    2: (
        "micro_batch=2 dp=2",
        "micro_batch=2 dp=2 sharding=fsdp",
        "micro_batch=4 tp=2",
        "micro_batch=4 tp=2 sp=true",
        "micro_batch=4 cp=2",
        *(f"micro_batch=1 accumulate=4 pp=2 {one}" for one in SCHEDULES),
    ),
    4: (
        "micro_batch=2 dp=4",
        "micro_batch=4 dp=2 tp=2",
        "micro_batch=1 accumulate=4 tp=2 pp=2 sp=true schedule=1f1b",
        "micro_batch=1 accumulate=4 dp=2 pp=2 schedule=1f1b",
        *(f"micro_batch=1 accumulate=8 pp=4 {one}" for one in SCHEDULES),
    ),
}
ALWAYS = "optimizer=fused host_memory=keep"


def models() -> dict[str, ModelConfig]:
    """Small enough for steps below two seconds on one core, and large enough that products take most of them."""
    gpt, bert = preset("gpt2"), preset("bert-base")
    assert isinstance(gpt, DecoderConfig)
    assert isinstance(bert, EncoderConfig)
    sizes = {"width": 512, "depth": 8, "heads": 8, "mlp_width": 2048, "vocabulary": 8192, "sequence": 256}
    return {
        "gpt of 8 blocks": replace(gpt, **sizes, max_positions=256, dropout=0.0),
        "bert of 8 blocks": replace(bert, **sizes, max_positions=256, dropout=0.0),
        "vit-s16": preset("vit-s16"),
    }


class Given(ImageClassification):
    """Cross entropy of every output, of batches that hold inputs and targets."""

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        return tuple(batch[:-1])

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return F.cross_entropy(outputs.float().reshape(-1, outputs.shape[-1]), batch[-1].flatten())


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
    run = Measured.of(
        [
            [Span(at, Action.parse(word), start, end) for word, start, end in told[at * each]]
            for at in range(plan.pp)
        ]
    )
    return float(run.bubble_fraction)


def measured(config: ModelConfig, plan: Plan, dims: ParallelDims, device: torch.device) -> dict[str, Any]:
    """One round of one layout."""
    torch.manual_seed(0)
    built = build(config, plan, device=device, recipe=Recipe(), loss=Given(), dims=dims)
    batches = [micro_batch(config, plan.micro_batch, device)] * plan.accumulate
    took = step_seconds(built, batches, device)
    idle = [one for _ in range(5) if (one := bubble(built, batches)) is not None]
    del built
    gc.collect()
    return {"seconds": took, "bubble": statistics.median(idle) if idle else None}


def worker(options: argparse.Namespace) -> None:
    """One rank: measures all layouts in rounds; rank 0 prints each round as JSON."""
    device = local_device(resolve_device(options.device))
    distributed.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    world, first = distributed.get_world_size(), distributed.get_rank() == 0
    for _ in range(options.rounds):
        machines, found = [probe(device, quick=True)], []
        for name, config in models().items():
            for line in LINES[world]:
                if options.only and options.only not in f"{name}: {line}":
                    continue
                plan = Plan.parse(f"{line} {ALWAYS}")
                if plan.cp > 1 and isinstance(config, ViTConfig):
                    continue  # 197 tokens
                with joined(plan, device) as dims:
                    found.append((name, config, plan, measured(config, plan, dims, device)))
                if first:
                    print(f"{name}: {line}: {found[-1][3]['seconds']:.3f} s", file=sys.stderr, flush=True)
        machines.append(probe(device, quick=True))
        if not first:
            continue
        for name, config, plan, one in found:
            said = [predict(config, machine, plan) for machine in machines]
            costs = stage_costs(config, machines[1], plan) if plan.pp > 1 else None
            idle = None if costs is None else float(simulate(schedule_of(plan), costs).bubble_fraction)
            predicted = {
                "predicted": sum(each.iteration_seconds for each in said) / 2,
                "predicted_bubble": idle,
                "parts": said[1].seconds,
            }
            print(json.dumps({"model": name, "plan": plan.line(), **one, **predicted}), flush=True)
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
        "rounds": len(rounds),
        "predicted_parts_last_round": rounds[-1]["parts"],
    }
    if rounds[0]["bubble"] is not None:
        found["bubble"] = {
            "measured": statistics.median(one["bubble"] for one in rounds),
            "predicted": statistics.median(one["predicted_bubble"] for one in rounds),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--procs", type=int, choices=tuple(LINES), default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", help="layouts whose model or Plan contains this, such as pp=2")
    parser.add_argument("--output", type=Path, help="what it holds of other numbers of processes stays")
    parser.add_argument("--rank", action="store_true", help="be one of the processes")
    options = parser.parse_args()
    if options.rank:
        worker(options)
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(options.procs), __file__, "--rank", *sys.argv[1:]]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    rounds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            one = json.loads(line)
            rounds.setdefault((one["model"], one["plan"]), []).append(one)
    cases = [case(seen) for seen in rounds.values()]
    for one in cases:
        took, idle = one["step_seconds"], one.get("bubble")
        words = f"; bubble {idle['measured']:.1%}, predicted {idle['predicted']:.1%}" if idle else ""
        print(
            f"{one['model']:<17}{one['plan']:<88}{1e3 * took['measured']:8.1f} ms, predicted "
            f"{1e3 * took['predicted']:8.1f} ({one['step_error']['median']:+.1%}){words}"
        )
    off = statistics.median(abs(one["step_error"]["median"]) for one in cases)
    print(f"{len(cases)} layouts on {options.procs} processes: median error {off:.1%}")
    if options.output:
        earlier = json.loads(options.output.read_text(encoding="utf-8")) if options.output.exists() else {}
        earlier[f"{options.procs} processes"] = {"cases": cases, "environment": environment()}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(earlier, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
