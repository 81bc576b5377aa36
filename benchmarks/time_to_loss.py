"""Steps and seconds to one validation loss, with AdamW and with Muon, each at its best learning rate.

    python benchmarks/time_to_loss.py --output benchmarks/results/time_to_loss_cpu.json

Each job is a preset with its own data. After a short warm-up the learning rate is constant, so that nobody has to know
beforehand how many steps there will be, and what is evaluated are averages of the weights. The rates of `RATES` are
tried with seed 0, and a try ends when it has taken as many steps as the best before it; the best rate then runs with
the other seeds. A run ends at the first of its evaluations, every few steps on the same samples, that reaches the
target.

Seconds are those of the processor in steps alone, on one thread: others may use the machine at the same time. Runs that
the file has are not made again, and --runs says how many are made before the program ends; it then returns 3.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from penstock.build import Built, build
from penstock.config.recipes import load_run
from penstock.config.run import Recipe
from penstock.data.loader import Loader
from penstock.optim import learning_rate, set_learning_rate
from penstock.planner.prediction import predict
from penstock.probe import machine_for
from penstock.report.record import environment
from penstock.tasks import task_of
from penstock.train.evaluate import evaluate

OPTIMIZERS = ("adamw", "muon")
RATES = (2e-3, 4e-3, 1e-3)
"""From the middle, so that the first try is a good one; while the best is the first or last, half or twice of it is
tried too."""
SEEDS = (0, 1, 2, 3, 4)
TURNS = 15
"""Steps of each optimizer that are timed beside a prediction."""


class Job(NamedTuple):
    """A preset, and the figure of its evaluation that a run is to reach."""

    figure: str
    target: float
    above: bool
    """Whether more is better."""
    steps: int
    """Steps after which a run has failed."""
    every: int
    """Steps between evaluations."""
    batches: int
    """Batches of an evaluation."""
    size: int
    """Samples of a batch."""

    def reached(self, value: float) -> bool:
        """Whether a run ends here."""
        return value >= self.target if self.above else value <= self.target


JOBS = {
    "vit-digits": Job("top1", 0.98, True, 2000, 25, 100, 64),
    "gpt-tiny": Job("loss", 2.8, False, 400, 10, 16, 8),
    "marian-tiny": Job("loss", 0.2, False, 1200, 10, 6, 32),
    # Below where a loss stays that knows only how frequent words are.
    "bert-tiny": Job("loss", 3.0, False, 600, 10, 32, 8),
}


class Start(NamedTuple):
    """A run before its first step: what trains, its recipe, and the batches of both splits."""

    built: Built
    recipe: Recipe
    loader: Callable[[bool], Loader]
    """Of training, without end, or of the validation split."""


def started(
    name: str, optimizer: str, rate: float, seed: int, fields: dict[str, Any] | None = None, **recipe: Any
) -> Start:
    """A job's model under an optimizer, with other fields of the model, or another recipe than the benchmark's."""
    job = JOBS[name]
    config = load_run(overrides={"model": name, **(fields or {})})
    task = task_of(config.model, config.task)
    train, val = (task.open(config.data, config.model, split) for split in ("train", "val"))
    model = task.fit(config.model, train)
    usual = {"schedule": "constant", "warmup_steps": 20, "warmup_share": None, "ema_decay": 0.95}
    learned = replace(config.recipe, optimizer=optimizer, lr=rate, **(recipe or usual))
    plan = replace(config.plan, optimizer="fused", micro_batch=job.size)
    built = build(model, plan, recipe=learned, loss=task, seed=seed)

    def loader(endless: bool) -> Loader:
        source = train if endless else val
        prepare = task.prepare(source, model, augment=learned.augment if endless else None, seed=seed)
        return Loader(
            source, prepare, batch=plan.micro_batch, seed=seed if endless else 0, device=built.device, workers=0,
            rank=0, world=1, endless=endless, group=plan.micro_batch,
        )  # fmt: skip

    return Start(built, learned, loader)


def stepped(start: Start, total: int) -> Iterator[float]:
    """The processor's seconds of each step of a run that its schedule has end after `total`."""
    batches = start.loader(True)
    for step in range(total):
        set_learning_rate(start.built.optimizer, learning_rate(step, start.recipe, total))
        batch = next(batches)
        began = time.process_time()
        start.built.step([batch])
        yield time.process_time() - began


def trained(name: str, optimizer: str, rate: float, seed: int, most: int) -> dict[str, Any]:
    """One run until the target, or until it has taken `most` steps."""
    job, start = JOBS[name], started(name, optimizer, rate, seed)
    curve, seconds = [], []
    for took in islice(stepped(start, job.steps), most):
        seconds.append(took)
        if len(seconds) % job.every == 0:
            value = figure(job, start.built, start.loader(False))
            curve.append([len(seconds), round(value, 5)])
            if job.reached(value):
                break
    return {
        "job": name, "optimizer": optimizer, "lr": rate, "seed": seed, "reached": job.reached(curve[-1][1]),
        "steps": len(seconds), "seconds": sum(seconds), "seconds_per_step": statistics.median(seconds),
        "curve": curve,
    }  # fmt: skip


def seconds_in_turn(name: str) -> dict[str, float]:
    """Seconds of a step with each optimizer, which take turns in one process, so that neighbours slow both: the lower
    quartile, as a probe of the machine takes it."""
    starts = {one: started(name, one, RATES[0], 0) for one in OPTIMIZERS}
    batches = {one: start.loader(True) for one, start in starts.items()}
    seconds: dict[str, list[float]] = {one: [] for one in OPTIMIZERS}
    for _ in range(TURNS):
        for one, start in starts.items():
            batch = next(batches[one])
            began = time.process_time()
            start.built.step([batch])
            seconds[one].append(time.process_time() - began)
    return {one: statistics.quantiles(each[1:], n=4)[0] for one, each in seconds.items()}


def figure(job: Job, built: Built, samples: Loader) -> float:
    """The job's figure over the first batches of its validation split."""
    task: Any = built.loss
    with samples, built.inference():
        first = islice(samples, job.batches)
        record = evaluate(task, built.model, first).record()
    return float(record[job.figure])


def following(runs: list[dict[str, Any]], name: str, optimizer: str) -> tuple[float, int, int] | None:
    """Rate, seed and most steps of the next run of a job; None where all are made."""
    mine = [run for run in runs if (run["job"], run["optimizer"]) == (name, optimizer)]
    tried = {run["lr"]: run for run in mine if run["seed"] == 0}
    done = [run["steps"] for run in tried.values() if run["reached"]]
    best = best_rate(mine) if mine else RATES[0]
    beyond = {min(tried, default=best): best / 2, max(tried, default=best): best * 2}.get(best)
    for rate in (*RATES, *([] if beyond is None or len(tried) < len(RATES) else [beyond])):
        if rate not in tried:
            return rate, 0, min(done, default=JOBS[name].steps)
    seeds = {run["seed"] for run in mine if run["lr"] == best}
    return next(((best, seed, JOBS[name].steps) for seed in SEEDS if seed not in seeds), None)


def best_rate(mine: list[dict[str, Any]]) -> float:
    """The rate that took fewest steps with seed 0; where none reached the target, that which came nearest."""
    job = JOBS[mine[0]["job"]]

    def rank(run: dict[str, Any]) -> tuple[float, float]:
        last = run["curve"][-1][1]
        return run["steps"] if run["reached"] else math.inf, -last if job.above else last

    return float(min((run for run in mine if run["seed"] == 0), key=rank)["lr"])


def table(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Per job and optimizer: the best rate, and what its seeds took; and Muon's share of AdamW's. Medians are over all
    seeds: None where those that did not reach the target are in the middle, and Muon's share is then at most this."""
    rows: dict[str, Any] = {}
    for name in JOBS:
        for optimizer in OPTIMIZERS:
            mine = [run for run in runs if (run["job"], run["optimizer"]) == (name, optimizer)]
            if not mine:
                continue
            best = [run for run in mine if run["lr"] == best_rate(mine)]
            order = sorted(best, key=lambda run: (not run["reached"], run["steps"]))
            reached, middle = [run for run in order if run["reached"]], order[len(order) // 2]
            rows.setdefault(name, {})[optimizer] = {
                "lr": best[0]["lr"], "seeds": len(best), "reached": len(reached),
                "steps": middle["steps"] if middle["reached"] else None,
                "steps_of_each": [run["steps"] for run in reached], "seconds": middle["seconds"],
                "seconds_per_step": statistics.median(run["seconds_per_step"] for run in best),
            }  # fmt: skip
        if len(rows.get(name, {})) == len(OPTIMIZERS):
            adamw, muon = (rows[name][optimizer] for optimizer in OPTIMIZERS)
            steps = [row["steps"] or JOBS[name].steps for row in (adamw, muon)]
            share = {"steps": steps[1] / steps[0], "seconds": muon["seconds"] / adamw["seconds"]}
            rows[name]["muon/adamw"] = share | {"at_most": adamw["steps"] is None}
    return rows


NAMES = {"adamw": "AdamW", "muon": "Muon"}


def lines(stored: dict[str, Any]) -> list[str]:
    """The rows of docs/measured.md: what each job took that both optimizers have run, and then the step of each job
    beside its prediction."""
    took, steps = [], []
    for name in JOBS:
        job, row = Job(**stored["jobs"][name]), stored["table"].get(name, {})
        target = f"{job.figure} {job.target:g}"
        for optimizer, title in NAMES.items():
            seconds, forecast = (
                stored[key][name][optimizer] for key in ("step_seconds", "predicted_step_seconds")
            )
            error = f"{100 * (forecast / seconds - 1):+.0f} %"
            steps.append(f"| {name} | {title} | {1e3 * seconds:.0f} | {1e3 * forecast:.0f} | {error} |")
            if not (share := row.get("muon/adamw")):
                continue
            one, shares, most = row[optimizer], " | ", "≤ " if share["at_most"] else ""
            missed = one["seeds"] - one["reached"]
            each = [*map(str, one["steps_of_each"]), *([f"{missed} not in {job.steps}"] if missed else [])]
            if optimizer == "muon":
                shares = f"{most}{share['steps']:.2f} | {most}{share['seconds']:.2f}"
            took.append(
                f"| {name}, {target} | {title} | {one['lr']:g} | {', '.join(each)} | {one['seconds']:.0f} | {shares} |"
            )
    return took + steps


def predicted(names: Iterable[str]) -> dict[str, dict[str, float]]:
    """Seconds of a step as the planner has them, by job and optimizer."""
    machine, found = machine_for("cpu"), {}
    for name in names:
        config = load_run(overrides={"model": name})
        task = task_of(config.model, config.task)
        source = task.open(config.data, config.model, "train")
        full = task.fullness(source, task.fit(config.model, source), JOBS[name].size)
        plan = replace(config.plan, optimizer="fused", micro_batch=JOBS[name].size)
        plans = {one: replace(plan, algorithm=one) for one in OPTIMIZERS}
        found[name] = {
            one: predict(full.model, machine, plan, real=full.real, words=full.words).iteration_seconds
            for one, plan in plans.items()
        }
    return found


def parser_for(description: str | None, names: Iterable[str]) -> argparse.ArgumentParser:
    """The options of a benchmark that makes the missing runs of a file; `names` are what --only chooses from."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=list(names), help="may be given again")
    parser.add_argument("--runs", type=int, default=1 << 30, help="runs that are made before it ends")
    parser.add_argument("--output", type=Path, required=True, help="runs in it are not made again")
    return parser


def main() -> int:
    parser = parser_for(__doc__, JOBS)
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="seeds at the best learning rate")
    parser.add_argument(
        "--predict",
        action="store_true",
        help="store steps of both optimizers in turn beside their predictions, and make no run",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    stored = json.loads(options.output.read_text()) if options.output.exists() else {}
    runs, left = stored.get("runs", []), 0 if options.predict else options.runs
    if options.predict:
        names = options.only or JOBS
        before = stored.setdefault("step_seconds", {})
        for name in names:  # others can only lengthen steps
            both = [seconds_in_turn(name), *([before[name]] if name in before else [])]
            before[name] = min(both, key=lambda seconds: sum(seconds.values()))
        stored.setdefault("predicted_step_seconds", {}).update(predicted(names))
    for name in options.only or JOBS:
        for optimizer in OPTIMIZERS:
            while (following_run := following(runs, name, optimizer)) and following_run[1] < options.seeds:
                if not left:
                    return write(options.output, stored, runs, code=0 if options.predict else 3)
                left -= 1
                rate, seed, most = following_run
                runs.append(trained(name, optimizer, rate, seed, most))
                print({key: value for key, value in runs[-1].items() if key != "curve"}, flush=True)
                write(options.output, stored, runs)
    return write(options.output, stored, runs)


def write(path: Path, stored: dict[str, Any], runs: list[dict[str, Any]], code: int = 0) -> int:
    """Store all runs and their table; returns `code`."""
    jobs = {name: job._asdict() for name, job in JOBS.items()}
    written = stored | {"jobs": jobs, "table": table(runs), "runs": runs, "environment": environment()}
    path.write_text(json.dumps(written, indent=1) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
