"""Write the answers of the planner's page, docs/planner.md: python tools/planner_table.py FILE.

Each is the fastest of all layouts of a model on so many GPUs. That takes about a minute of one core; the site's build
keeps the file until something changes that it depends on.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from penstock import PRESETS, load_machine
from penstock.config.model import title
from penstock.errors import PenstockError
from penstock.planner import search

# What a run of each is: the tokens of GPT-3's and Llama 3's papers, and 90 epochs of ImageNet-1k.
MODELS = {"vit-h14": 90 * 1.28e6, "llama3-8b": 15e12, "gpt-175b": 300e9}
MACHINES = ("a100-80g", "h100", "h200", "b200", "mi300x")
SMALL = bool(os.environ.get("PENSTOCK_SMALL_TABLE"))
"""Whether only a few of the answers are wanted, as a test of the site does."""
GPUS = (8,) if SMALL else (1, 8, 64, 256, 1024, 4096)
BATCHES = (1024,) if SMALL else (256, 1024, 4096)


def table() -> dict[str, Any]:
    """Every answer, with what the sliders are labelled with."""
    asked = [(m, c, g, b) for m in MODELS for c in MACHINES for g in GPUS for b in BATCHES]
    with ProcessPoolExecutor() as processes:
        answers = dict(
            zip(("|".join(map(str, one)) for one in asked), processes.map(answer, asked, chunksize=4))
        )
    models = {}
    for name, run in MODELS.items():
        tokens = 0 if name.startswith("vit") else PRESETS[name].graph.lengths[0]
        words = f"{run / 1e12:g} trillion tokens" if run >= 1e12 else f"{run / 1e9:g} billion tokens"
        models[name] = {
            "words": title(PRESETS[name]), "tokens": tokens, "run": run / (tokens or 1),
            "run_words": words if tokens else "90 epochs of ImageNet-1k",
        }  # fmt: skip
    return {"models": models, "machines": MACHINES, "gpus": GPUS, "batches": BATCHES, "answers": answers}


def answer(asked: tuple[str, str, int, int]) -> tuple[float, float, int, str] | None:
    """Seconds of a step, MFU, bytes on the fullest device and the Plan of the fastest layout; none if none fits."""
    model, machine, gpus, batch = asked
    try:
        best = search(PRESETS[model], load_machine(machine), gpus, global_batch=batch, keep=1)[0]
    except PenstockError:
        return None
    return round(best.iteration_seconds, 5), round(best.mfu, 4), best.memory_bytes, best.plan.line()


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(table()), encoding="utf-8")
