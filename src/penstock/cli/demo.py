"""`penstock demo`: tune two small Transformers, train one on real images, and say what to type next."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from penstock.boundary.files import own_file, require_folder, shown, write_text
from penstock.boundary.trees import Bounds, read_tree
from penstock.errors import DataError, ExitCode
from penstock.report.figures import Bar, waterfall

MODEL, BATCH = "vit-digits", 64
FEW = "matmul,memory,half-bf16,optimizer-contiguous,masters,attention-plain"
"""Rungs for the images on a CPU: few, and none that compiles, so that the time is for rounds and intervals narrow."""
SKIPPED = "batch,image,compress,whole-half"
"""Rungs left out on a GPU, where rounds are short: they change results, and the demo's promise is the same loss."""
PADDED, PADDED_RUNGS = "penstock.ladder.padded:bert", "padding,optimizer-contiguous,masters"
PADDED_SHARE = 0.45
"""Share of the budget for BERT on padded texts."""
_LARGE = Bounds(bytes=1 << 24, values=1_000_000, infinite=True)
TOKENS, GPUS, SAMPLES = 300e9, 1024, 1536
"""GPT-3's training (Brown et al. 2020: 300 billion tokens), at the batch and on the GPUs of Narayanan et al. (2021)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rise:
    """One bar: a setting, and how many times the baseline's speed it reaches."""

    title: str
    ratio: float
    low: float
    high: float
    predicted: float | None
    """Ratio that the planner predicted before it was measured."""
    images_per_second: float
    proven: bool = True
    """Whether its own gain is beyond the noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The ladder's result, as the demo's last lines show it."""

    plan: str
    rises: tuple[Rise, ...]
    """The baseline, then the rungs of the Plan."""
    predicted: float
    """Predicted ratio of the last speed to the first."""
    within_noise: bool | None
    """Whether the loss is the baseline's but for what another seed changes; none where no losses were run."""
    machine: str
    unit: str = "images"
    nothing: str = ""
    """Words for it, where no Plan is faster than the baseline beyond the noise."""


def demo(
    *,
    output: Annotated[Path, Parameter(help="Folder for all files.")] = Path("runs/demo"),
    budget: Annotated[float, Parameter(help="Seconds for both ladders.")] = 120.0,
    epochs: Annotated[float, Parameter(help="Passes over the images in training.")] = 50.0,
) -> int:
    """Tune two small models, train one on real images, and suggest what to type next.

    Takes about four minutes and downloads nothing. The images are handwritten digits, which come with Penstock. The
    other model is transformers' BERT, untrained, on padded texts. Once the demo is complete, it only shows its results
    again; remove its folder to repeat it.
    """
    path = own_file(output, "demo.json")
    if path.exists():
        lines = read_tree(path, "The demo's record", bounds=_LARGE).get("lines")
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            raise DataError(f"The demo's record {shown(path)} has no lines to show. Remove {shown(output)}.")
        print(f"This demo is complete; remove {output} to run it again.")
        _end(lines, output)
        return int(ExitCode.DONE)
    require_folder(output)
    start = time.monotonic()
    padded = importlib.util.find_spec("transformers") is not None
    share = 1 - PADDED_SHARE if padded else 1.0
    digits = [MODEL, "--batch", str(BATCH), "--budget", f"{share * budget:g}", *_digit_rungs()]
    if code := _climb(digits, output / "ladder"):
        return code
    result = _result(output / "ladder")
    texts = [f"{NO_TRANSFORMERS} and remove {output}."]
    if padded:
        words = ["--model", PADDED, "--budget", f"{PADDED_SHARE * budget:g}", "--rungs", PADDED_RUNGS]
        if code := _climb(words, output / "padded"):
            return code
        texts = padded_lines(_result(output / "padded"))
    top1 = _train_top1(result, output / "train", epochs)
    from penstock.report.record import environment

    record = dataclasses.asdict(result) | {
        "top1": top1, "lines": [result_line(result, top1), f"Plan: {result.plan}", "", *texts, "", *gpt3_lines()],
        "seconds": time.monotonic() - start, "environment": environment(),
    }  # fmt: skip
    write_text(own_file(output, "demo.svg"), picture(record))
    write_text(path, json.dumps(record, indent=1) + "\n")
    _end(record["lines"], output)
    return int(ExitCode.DONE)


NO_TRANSFORMERS = (
    "BERT on padded texts was left out, because it needs transformers: for it, pip install 'penstock[hf]'"
)


def _digit_rungs() -> list[str]:
    """The options that choose rungs for the images, by the device that the ladder takes."""
    from penstock.probe import resolve_device

    return ["--rungs", FEW] if resolve_device("auto").type == "cpu" else ["--skip", SKIPPED]


def _climb(words: list[str], output: Path) -> int:
    return _run(["ladder", *words, "--quick", "--output", str(output)])


def _result(folder: Path) -> Tuned:
    return tuned(read_tree(folder / "ladder.json", "The ladder's result", bounds=_LARGE))


def picture(record: dict[str, Any]) -> str:
    """The picture of a demo's record, as an SVG file."""
    title = f"A small Vision Transformer on handwritten digits: {record['machine']}"
    return demo_figure(title, [Rise(**rise) for rise in record["rises"]], record["lines"][:2])


def demo_figure(title: str, rises: Sequence[Rise], notes: Sequence[str]) -> str:
    """The picture as an SVG file; the first rise is the baseline. Raises ValueError without any."""
    if not rises:
        raise ValueError("A demo's picture needs at least the baseline.")
    bars = [
        Bar(
            label=rise.title, state=("kept" if rise.proven else "unproven") if index else "baseline",
            value=rise.ratio, low=rise.low, high=rise.high, predicted=rise.predicted if index else None,
            floor=rises[index - 1].ratio if index else None,
            note=f"   {rise.images_per_second:,.0f} images/s",
        )
        for index, rise in enumerate(rises)
    ]  # fmt: skip
    label = "speed relative to the baseline"
    return waterfall(bars, title=title, x_label=label, heading=title, notes=notes, alone=True) + "\n"


def _end(lines: list[str], output: Path) -> None:
    print("\n".join(["", *lines, "", *next_lines(output)]))


def _run(words: list[str]) -> int:
    """A command as a reader would type it, in a process of its own, so that it measures as it would there."""
    print(f"\n$ penstock {shlex.join(words)}", flush=True)
    code = subprocess.run([sys.executable, "-m", "penstock", *words], check=False).returncode
    if code:
        print("penstock: the demo stopped here; the message above says why.", file=sys.stderr)
    return code


def tuned(report: dict[str, Any]) -> Tuned:
    """The part of a ladder.json that the demo shows: the path to the best Plan with the same results."""
    best = report["same"]
    path = [rung for rung in report["rungs"] if rung["name"] in ("baseline", *best["rungs"])]
    speed = best["samples_per_second"]["value"] / best["speedup"]["value"]
    rises = tuple(
        Rise(
            title=rung["title"], ratio=ratio["value"], low=ratio["low"], high=ratio["high"],
            predicted=rung["forecast"]["to_baseline"], images_per_second=speed * ratio["value"],
            proven=rung["status"] != "unproven",
        )
        for rung in path
        for ratio in [rung["to_baseline"]]
        if ratio
    )  # fmt: skip
    nearest = report["nearest"]
    return Tuned(
        plan=best["plan"], rises=rises, predicted=best["predicted"], within_noise=best["within_noise"],
        machine=report["machine"]["name"], unit=report["unit"],
        nothing=_nothing(nearest) if nearest else "",
    )  # fmt: skip


def _nothing(nearest: dict[str, Any]) -> str:
    from penstock.ladder.result import Estimate, Nearest
    from penstock.ladder.tables import beyond_words

    return beyond_words(Nearest(**{**nearest, "ratio": Estimate(**nearest["ratio"])}))


def _train_top1(result: Tuned, output: Path, epochs: float) -> float:
    """Train with the Plan that the ladder chose; returns the share of validation images that are recognised."""
    from penstock.config.recipes import load_run
    from penstock.train import train
    from penstock.train.display import display_for

    settings = {"plan": result.plan, "recipe.epochs": epochs, "checkpoint_every": 500, "output": str(output)}
    options = " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in settings.items())
    print(f"\n$ penstock train {MODEL} {options}", flush=True)
    # A run that was stopped half-way may have had another Plan.
    run = train(
        load_run(overrides={"model": MODEL, **settings}), resume=False, display=display_for(sys.stdout)
    )
    assert run.evaluation is not None  # digits have a validation split
    return float(run.evaluation.top1)


def result_line(result: Tuned, top1: float) -> str:
    """The demo's result in one line."""
    return f"{speed_line(result)}; {100 * top1:.1f} % top-1; predicted {result.predicted:.2f}×"


def padded_lines(result: Tuned) -> list[str]:
    """The result for BERT on padded texts, in two lines."""
    return [
        f"transformers' BERT, padded texts: {speed_line(result)}; predicted {result.predicted:.2f}×",
        f"Plan: {result.plan}",
    ]


def speed_line(result: Tuned) -> str:
    """A ladder's result in words: what was gained, and what that does to the loss."""
    first, last = result.rises[0], result.rises[-1]
    if result.nothing:
        speed = f"{first.images_per_second:,.0f} {result.unit}/s"
        return f"baseline {speed}: {result.nothing} here, so the plain Plan stands"
    loss = {
        True: "same loss within noise",
        False: "another loss, outside the noise of seeds",
        None: "losses not compared"
        if computes_otherwise(result.plan)
        else "the same but for the order of sums",
    }[result.within_noise]
    return (
        f"baseline {first.images_per_second:,.0f} {result.unit}/s → Plan {last.images_per_second:,.0f} {result.unit}/s "
        f"({last.ratio:.2f}×), {loss}"
    )


def computes_otherwise(plan: str) -> bool:
    """Whether a Plan computes in other types than the baseline."""
    from penstock.config.plan import Plan

    return Plan.parse(plan).precision != "O0"


def gpt3_lines() -> list[str]:
    """The planner's answer for GPT-3, in two lines."""
    from penstock import PRESETS, load_machine
    from penstock.planner import search

    model = PRESETS["gpt-175b"]
    best = search(model, load_machine("a100-80g"), GPUS, global_batch=SAMPLES, keep=1)[0]
    plan, days = best.plan, best.days(TOKENS / model.graph.lengths[0])
    return [
        f"GPT-3 on {GPUS:,} A100 GPUs, computed here in a second: {best.iteration_seconds:.1f} s a step, "
        f"{days:.0f} days for {TOKENS / 1e9:.0f} billion tokens, MFU {best.mfu:.0%},",
        f"with tp={plan.tp} pp={plan.pp} dp={plan.dp} micro_batch={plan.micro_batch} and "
        f"{best.memory_bytes / 2**30:.0f} GiB on the fullest GPU.",
    ]  # fmt: skip


def next_lines(output: Path) -> list[str]:
    """Commands to try next, and how to make them work in this shell."""
    activate = Path(sys.prefix) / "bin" / "activate"
    on_path = shutil.which("penstock") is not None or not activate.exists()
    rows = {
        "penstock ladder vit-s16": "the same for a larger model",
        "penstock ladder --model mine:factory": "for yours: docs/how-to/own-model.md",
        "penstock tune train.py": "the fastest settings for your script, unchanged",
        f"penstock plan gpt-175b --machine a100-80g --gpus {GPUS}": "before you rent",
    }
    wide = max(map(len, rows))
    return [
        f"Written: {output / 'ladder' / 'ladder.html'} (what each optimisation gains), {output / 'train'} (the model)",
        "What to type next:",
        *([] if on_path else [f"  . {activate}"]),
        *(f"  {command:<{wide}}  {gain}" for command, gain in rows.items()),
    ]
