"""Tune two small models, train one on real images, and say what to type next: `make demo`.

Takes about three minutes and downloads nothing. The images are handwritten digits, which come with Penstock; the other
model is transformers' BERT on padded texts. Both ladders search for Plans with the same results.

    python examples/demo.py --output runs/demo --budget 120
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from penstock import PRESETS, Plan, load_machine, search

MODEL = "vit-digits"
# On a CPU few rungs, and none that compiles, so that the time is for rounds. On a GPU rounds are short, and only rungs
# that change results are left out.
ON_CPU = ["--rungs", "matmul,memory,half-bf16,optimizer-contiguous,masters,attention-plain"]
ON_GPU = ["--skip", "batch,image,compress,whole-half"]
PADDED = ["--model", "padded_texts:bert", "--rungs", "padding,optimizer-contiguous,masters"]
TOKENS, GPUS, SAMPLES = 300e9, 1024, 1536  # of GPT-3, as Narayanan et al. (2021) trained it
NEXT = f"""
What to type next:
  penstock ladder vit-s16                                  the same for a larger model
  penstock ladder --model mine:factory                     for yours: docs/how-to/own-model.md
  penstock tune train.py                                   the fastest settings for your script, unchanged
  penstock plan gpt-175b --machine a100-80g --gpus {GPUS}    before you rent"""


def run(*words: str) -> None:
    """A command as a reader would type it; ends the demo where it fails."""
    print(f"\n$ penstock {shlex.join(words)}", flush=True)
    here = str(Path(__file__).parent)
    paths = os.pathsep.join(path for path in (here, os.environ.get("PYTHONPATH", "")) if path)
    done = subprocess.run(
        [sys.executable, "-m", "penstock", *words], check=False, env={**os.environ, "PYTHONPATH": paths}
    )
    if done.returncode:
        sys.exit(f"The demo stopped here, with code {done.returncode}; the message above says why.")


def result(folder: Path) -> tuple[str, str]:
    """A ladder's result in words, and the Plan that it found."""
    report: dict[str, Any] = json.loads((folder / "ladder.json").read_text())
    best = report["same"]
    last, ratio = best["samples_per_second"]["value"], best["speedup"]["value"]
    first = f"baseline {last / ratio:,.0f} {report['unit']}/s"
    if report["nearest"]:
        return f"{first}: nothing is faster beyond the noise here, so the plain Plan remains", best["plan"]
    same = (
        "the same but for the order of sums"
        if Plan.parse(best["plan"]).precision == "O0"
        else "losses not compared"
    )
    loss = {True: "same loss within noise", False: "another loss, outside the noise of seeds", None: same}
    words = f"{last:,.0f} {report['unit']}/s ({ratio:.2f}×), {loss[best['within_noise']]}"
    return f"{first} → Plan {words}; predicted {best['predicted']:.2f}×", best["plan"]


def gpt3() -> str:
    """The planner's answer for GPT-3."""
    model = PRESETS["gpt-175b"]
    best = search(model, load_machine("a100-80g"), GPUS, global_batch=SAMPLES, keep=1)[0]
    plan, days = best.plan, best.days(TOKENS / model.graph.lengths[0])
    return (
        f"GPT-3 on {GPUS:,} A100 GPUs, computed here in a second: {best.iteration_seconds:.1f} s a step, "
        f"{days:.0f} days for {TOKENS / 1e9:.0f} billion tokens, MFU {best.mfu:.0%},\nwith tp={plan.tp} pp={plan.pp} "
        f"dp={plan.dp} micro_batch={plan.micro_batch} and {best.memory_bytes / 2**30:.0f} GiB on the fullest GPU."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/demo"), help="a folder that does not exist yet"
    )
    parser.add_argument("--budget", type=float, default=75.0, help="seconds for both ladders")
    parser.add_argument("--epochs", type=float, default=30.0, help="passes over the images in training")
    given = parser.parse_args()
    summary = given.output / "demo.txt"
    if summary.exists():
        print(f"{summary.read_text()}\nThis demo is complete; remove {given.output} to run it again.")
        return
    rungs = ON_GPU if torch.cuda.is_available() else ON_CPU
    seconds = {"digits": 0.55 * given.budget, "padded": 0.45 * given.budget}
    ladder = ["--quick", "--output"]
    run(
        "ladder",
        MODEL,
        "--batch",
        "64",
        *rungs,
        "--budget",
        f"{seconds['digits']:g}",
        *ladder,
        str(given.output / "ladder"),
    )
    run("ladder", *PADDED, "--budget", f"{seconds['padded']:g}", *ladder, str(given.output / "padded"))
    (words, plan), (padded, padded_plan) = result(given.output / "ladder"), result(given.output / "padded")
    run(
        "train",
        MODEL,
        "--plan",
        plan,
        "--recipe.epochs",
        f"{given.epochs:g}",
        "--output",
        str(given.output / "train"),
    )
    texts = f"transformers' BERT, padded texts: {padded}\nPlan: {padded_plan}"
    summary.write_text(f"{words}\nPlan: {plan}\n\n{texts}\n\n{gpt3()}\n")
    print(
        f"\n{summary.read_text()}\nWritten: {given.output / 'ladder' / 'ladder.html'}, {given.output / 'train'}{NEXT}"
    )


if __name__ == "__main__":
    main()
