"""What compression costs on tasks that are trained here, over several seeds, beside the spread between the seeds.

    export OMP_NUM_THREADS=1
    python benchmarks/compress_tasks.py --runs runs/tasks --output benchmarks/results/compress_tasks_cpu.json

A cell is a task, a seed and a part. Each first trains the task's model with this seed (`TASKS`), students that of seed
0, which teaches all of them.

    int8      the same model after `penstock compress --quantise int8`
    student   a smaller model that learns from it, and its twin that learns from the data alone, both in as few steps
    recipe    the model pruned to a third of its latency, taught by the original, and in int8 where that is faster

Points are 100 times the share of right answers; of language models a point is 1 % of perplexity. Cells that the file
holds are not made again, and a run that was stopped resumes from its checkpoints: the same command goes on. Points do
not depend on what else the machine does; the latencies of `recipe` do, so each has the load average beside it.

Two tasks need packages that `real_texts.py` says how to get; name their unpacked folders:

    export PENSTOCK_SENTENCES=vaderSentiment-3.3.2 PENSTOCK_MAILS=package
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.compress.data import points, task_data
from penstock.config.load import from_dict, read_file
from penstock.config.run import RunConfig
from penstock.report.record import environment
from quantise import measured
from real_texts import READERS, write_tables
from text_jobs import run


@dataclass(frozen=True, slots=True)
class Case:
    """One task."""

    train: str
    """Command that trains the model, with TEXTS for the folder of its tables; a seed and an output are added."""
    bound: float
    """Most points that int8 is to lose on average."""
    student: str = ""
    """Command that trains a smaller model in fewer steps; none: no student is trained."""
    taught: str = ""
    """Options of the student with a teacher, beside the teacher's name."""
    recipe: str = ""
    """Options of `penstock compress`; none: the whole recipe is left out."""


_TUNED = (
    "penstock train bert-base --from MINILM --task sentences --data pairs:TEXTS --data.group_by_length true "
    "--model.sequence 64 --recipe.lr 2e-4 "
    "--recipe.freeze tokens,types,encoder.places,encoder.embedding_norm,encoder.blocks.[0-3]"
)
"""Trains the last two of six blocks, and the head."""
_TAUGHT = "--recipe.temperature 1 --recipe.teacher_attention 1"
_WHOLE = "--target 3x --quantise int8 --quantise.speed true --quantise.drop 0.5"
TASKS = {
    "vit-digits": Case(
        "penstock train vit-digits --recipe.epochs 20", 0.3,
        "penstock train vit-digits --recipe.epochs 8 --model.depth 2 --model.mlp_width 96",
        "--recipe.teacher_weight 0.9 --recipe.teacher_hidden 1",
        f"{_WHOLE} --distil.epochs 40",
    ),
    "gpt-tiny": Case(
        "penstock train gpt-tiny", 1.0,
        "penstock train gpt-tiny --recipe.steps 120 --model.depth 1 --model.mlp_width 128", _TAUGHT,
        f"{_WHOLE} --distil.steps 700 --distil.temperature 1 --distil.attention 1",
    ),
    "marian-tiny": Case(
        "penstock train marian-tiny", 0.1,
        "penstock train marian-tiny --recipe.steps 450 --model.encoder.depth 1 --model.decoder.depth 1 "
        "--model.encoder.mlp_width 64 --model.decoder.mlp_width 64", _TAUGHT,
        f"{_WHOLE} --distil.steps 900",
    ),
    "minilm": Case(
        "penstock train bert-base --from MINILM --task pairs --data numbers:en", 0.2,
        recipe=f"{_WHOLE} --distil.epochs 3",
    ),
    "sentences": Case(f"{_TUNED} --recipe.steps 100", 0.5),
    "mails": Case(f"{_TUNED} --recipe.steps 60", 0.5),
}  # fmt: skip
Row = dict[str, Any]


def trained(command: str, output: Path, seed: int) -> float:
    """Points of the last evaluation of a run, which is made or continued if it is not complete."""
    records = run(f"{command} --seed {seed}", output)
    return points([record for record in records if record["event"] == "evaluation"][-1])


def int8(task: str, original: Path, seed: int) -> Row:
    """Points before and after int8 with a scale for each token."""
    settings = from_dict(RunConfig, read_file(original / "run.toml"), origin=str(original))
    data = task_data(original, settings.data, task=settings.task)
    row: Row = measured(task, original, data, ["int8"])["ways"]["int8"]
    return {name: row[name] for name in ("before", "after", "lost", "bytes_before", "bytes_after", "layers")}


def student(task: str, original: Path, seed: int) -> Row:
    """Points of a student and of its twin without a teacher."""
    case, runs = TASKS[task], original.parent
    teacher = f"--recipe.teacher {shlex.quote(str(original))}"
    taught = trained(f"{case.student} {teacher} {case.taught}", runs / f"{task}-{seed}-student", seed)
    alone = trained(case.student, runs / f"{task}-{seed}-twin", seed)
    return {"student": taught, "twin": alone, "gained": taught - alone}


def recipe(task: str, original: Path, seed: int) -> Row:
    """Points and latency of the original and of what the whole recipe leaves of it."""
    output = original.with_name(f"{original.name}-recipe")
    words = [*shlex.split(TASKS[task].recipe), "--seed", str(seed), "--output", str(output)]
    subprocess.run([sys.executable, "-m", "penstock", "compress", str(original), *words], check=True)
    rows = json.loads((output / "compress.json").read_text(encoding="utf-8"))["rows"]
    first, last = rows[0], rows[-1]
    before, after = points(first["metrics"]), points(last["metrics"])
    return {
        "before": before, "after": after, "lost": before - after,
        "times_as_fast": first["seconds"] / last["seconds"], "load_average": os.getloadavg()[1],
        "steps": [
            {name: row.get(name) for name in ("title", "parameters", "bytes", "seconds", "predicted_seconds", "words")}
            for row in rows
        ],
    }  # fmt: skip


def command_of(task: str, runs: Path) -> str:
    """Command that trains a task's model. Tables of real texts are written first, from the package that a variable of
    the environment names.

    Raises SystemExit where that is not set, or is not the folder of this package.
    """
    folder = runs / "texts" / task
    if task in READERS and not (folder / "val.tsv").exists():
        variable = f"PENSTOCK_{task.upper()}"
        if not os.environ.get(variable):
            raise SystemExit(
                f"Set {variable} to the folder of an unpacked package, by `{READERS[task].command}`."
            )
        write_tables(task, Path(os.environ[variable]), folder)
    return TASKS[task].train.replace("TEXTS", shlex.quote(str(folder)))


PARTS: dict[str, Callable[[str, Path, int], Row]] = {"int8": int8, "student": student, "recipe": recipe}


def summary(cells: list[Row]) -> dict[str, Any]:
    """By part and task the mean over seeds, and the deviation between seeds that it is compared with."""
    table: dict[str, Any] = {}
    for part, task in dict.fromkeys((cell["part"], cell["task"]) for cell in cells):
        rows = [cell for cell in cells if (cell["part"], cell["task"]) == (part, task)]

        def of(name: str, rows: list[Row] = rows) -> list[float]:
            return [row[name] for row in rows]

        base, change = ("twin", "gained") if part == "student" else ("before", "lost")
        noise = statistics.stdev(of(base)) if len(rows) > 1 else None
        entry = {"seeds": len(rows), base: statistics.mean(of(base)), "deviation_between_seeds": noise}
        entry |= {change: statistics.mean(of(change)), "least": min(of(change)), "most": max(of(change))}
        if part == "int8":
            entry["bound"] = TASKS[task].bound
        if part == "student" and noise:
            entry["deviations_gained"] = statistics.mean(of(change)) / noise
        if part == "recipe":
            entry["times_as_fast"] = statistics.median(of("times_as_fast"))
        table[f"{task}, {part}"] = entry
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--task", action="append", choices=[*TASKS], help="may be given again; none: all")
    parser.add_argument("--part", action="append", choices=[*PARTS], help="may be given again; none: all")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="cells in it stay")
    options = parser.parse_args()
    stored = options.output is not None and options.output.exists()
    cells: list[Row] = json.loads(options.output.read_text())["cells"] if stored else []
    known = {(cell["task"], cell["part"], cell["seed"]) for cell in cells}
    commands = {task: command_of(task, options.runs) for task in options.task or TASKS}
    for part in options.part or PARTS:
        for task in commands:
            for seed in range(options.seeds):
                needs = {"int8": True, "student": TASKS[task].student, "recipe": TASKS[task].recipe}
                if (task, part, seed) in known or not needs[part]:
                    continue
                of_seed = 0 if part == "student" else seed
                original = options.runs / f"{task}-{of_seed}"
                trained(commands[task], original, of_seed)
                row = {"task": task, "part": part, "seed": seed, **PARTS[part](task, original, seed)}
                cells.append(row)
                print(json.dumps(row), flush=True)
                if options.output:
                    record = {"summary": summary(cells), "cells": cells, "environment": environment()}
                    options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
