"""`penstock demo`: tune a small Vision Transformer, train it on real images, and say what to type next."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from penstock.boundary.files import read_text
from penstock.errors import ExitCode
from penstock.report.demo_figure import Rise, demo_figure

MODEL, BATCH = "vit-digits", 64
TOKENS, GPUS, SAMPLES = 300e9, 1024, 1536
"""GPT-3's training (Brown et al. 2020: 300 billion tokens), at the batch and on the GPUs of Narayanan et al. (2021)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What the ladder found, in the words that the demo ends with."""

    plan: str
    rises: tuple[Rise, ...]
    """The baseline, then what was kept."""
    predicted: float
    """Of the ratio of the last to the first."""
    within_noise: bool | None
    """Whether the loss is the baseline's but for what another seed changes; none where no losses were run."""
    machine: str


def demo(
    *,
    output: Annotated[Path, Parameter(help="Folder of everything that is written.")] = Path("runs/demo"),
    budget: Annotated[float, Parameter(help="Seconds for the ladder.")] = 120.0,
    epochs: Annotated[float, Parameter(help="How often training sees each image.")] = 40.0,
) -> int:
    """Tune a small Vision Transformer, train it on real images, and say what to type next: about four minutes.

    The images are handwritten digits, which come with Penstock. Nothing is downloaded. A demo that is complete only
    shows its end again; remove its folder to run it anew.
    """
    record = output / "demo.json"
    if record.exists():
        print(f"This demo is complete; remove {output} to run it anew.")
        print(json.loads(read_text(record, "The demo's record", limit=1 << 20))["end"])
        return int(ExitCode.DONE)
    start = time.monotonic()
    words = ["ladder", MODEL, "--batch", str(BATCH), "--quick", "--budget", f"{budget:g}"]
    if code := _run([*words, "--output", str(output / "ladder")]):
        return code
    found = tuned(
        json.loads(read_text(output / "ladder" / "ladder.json", "The ladder's result", limit=1 << 26))
    )
    top1 = _trained(found, output / "train", epochs)
    lines = [result_line(found, top1), f"Plan: {found.plan}", "", *gpt3_lines()]
    end = "\n".join(["", *lines, "", *next_lines(output)])
    print(end)
    title = f"A Vision Transformer on handwritten digits: {found.machine}"
    (output / "demo.svg").write_text(demo_figure(title, found.rises, lines[:2]), encoding="utf-8")
    values = dataclasses.asdict(found) | {"top1": top1, "end": end, "seconds": time.monotonic() - start}
    from penstock.report.record import environment

    record.write_text(json.dumps(values | {"environment": environment()}, indent=1) + "\n", encoding="utf-8")
    return int(ExitCode.DONE)


def _run(words: list[str]) -> int:
    """A command as a reader would type it, in a process of its own, so that it measures as it would there."""
    print(f"\n$ penstock {shlex.join(words)}", flush=True)
    code = subprocess.run([sys.executable, "-m", "penstock", *words], check=False).returncode
    if code:
        print("penstock: the demo stopped here; the message above says why.", file=sys.stderr)
    return code


def tuned(report: dict[str, Any]) -> Tuned:
    """What of a ladder.json the demo shows."""
    kept = [rung for rung in report["rungs"] if rung["status"] in ("baseline", "kept")]
    first, last = kept[0], kept[-1]
    speed = first["samples_per_second"]["median"]
    rises = tuple(
        Rise(
            title=rung["title"], ratio=ratio["median"], low=ratio["low"], high=ratio["high"],
            predicted=rung["forecast"]["to_baseline"], images_per_second=speed * ratio["median"],
        )
        for rung in kept
        for ratio in [rung["to_baseline"]]
    )  # fmt: skip
    noise, difference = report["noise"], last["loss_difference"]
    within = None if noise is None or difference is None else abs(difference) <= 2 * noise["deviation"]
    return Tuned(
        plan=report["plan"], rises=rises, predicted=last["forecast"]["to_baseline"], within_noise=within,
        machine=report["machine"]["name"],
    )  # fmt: skip


def _trained(found: Tuned, output: Path, epochs: float) -> float:
    """Train with the Plan that was found; returns the share of validation images that are recognised."""
    from penstock.config.recipes import load_run
    from penstock.train import train
    from penstock.train.display import display_for

    settings = {
        "plan": found.plan, "recipe.epochs": epochs, "recipe.lr": 2e-3, "recipe.warmup_steps": 60,
        "output": str(output),
    }  # fmt: skip
    options = " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in settings.items())
    print(f"\n$ penstock train {MODEL} {options}", flush=True)
    # A run that was stopped half-way may have had another Plan.
    result = train(
        load_run(overrides={"model": MODEL, **settings}), resume=False, display=display_for(sys.stdout)
    )
    return float(result.evaluation.top1)


def result_line(found: Tuned, top1: float) -> str:
    """What the demo is for, in a line."""
    first, last = found.rises[0], found.rises[-1]
    loss = {
        True: "same loss within noise",
        False: "another loss, outside the noise of seeds",
        None: "losses not compared",
    }[found.within_noise]
    return (
        f"baseline {first.images_per_second:,.0f} images/s → Plan {last.images_per_second:,.0f} images/s "
        f"({last.ratio:.2f}×), {loss}; {100 * top1:.1f} % top-1; predicted {found.predicted:.2f}×"
    )


def gpt3_lines() -> list[str]:
    """The planner's answer for GPT-3, in two lines."""
    from penstock import PRESETS, load_machine
    from penstock.config.model import sequences
    from penstock.planner import search

    model = PRESETS["gpt-175b"]
    best = search(model, load_machine("a100-80g"), GPUS, global_batch=SAMPLES, keep=1)[0]
    plan, days = best.plan, best.days(TOKENS / sequences(model)[0])
    return [
        f"GPT-3 on {GPUS:,} A100 GPUs, computed here in a second: {best.iteration_seconds:.1f} s a step, "
        f"{days:.0f} days for {TOKENS / 1e9:.0f} billion tokens, MFU {best.mfu:.0%},",
        f"with tp={plan.tp} pp={plan.pp} dp={plan.dp} micro_batch={plan.micro_batch} and "
        f"{best.memory_bytes / 2**30:.0f} GiB on the fullest GPU.",
    ]  # fmt: skip


def next_lines(output: Path) -> list[str]:
    """What to type next, with what makes it work in this shell."""
    activate = Path(sys.prefix) / "bin" / "activate"
    known = shutil.which("penstock") is not None or not activate.exists()
    rows = {
        "penstock ladder vit-s16": "the same for a larger model",
        "penstock ladder --model mine:factory": "for yours: docs/how-to/own-model.md",
        "penstock run --precision O1 train.py": "mixed precision for your script, unchanged",
        f"penstock plan gpt-175b --machine a100-80g --gpus {GPUS}": "before you rent",
    }
    wide = max(map(len, rows))
    return [
        f"Written: {output / 'ladder' / 'ladder.html'} (what each optimisation gains), {output / 'train'} (the model)",
        "What to type next:",
        *([] if known else [f"  . {activate}"]),
        *(f"  {command:<{wide}}  {what}" for command, what in rows.items()),
    ]
