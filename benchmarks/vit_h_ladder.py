"""The rungs of Meta AI's ladder for ViT-H/16 on one device: images and FLOPs a second of each, rounds interleaved.

    python benchmarks/vit_h_ladder.py --output benchmarks/results/vit_h_ladder_h200.json

`tools/published.py` has the rungs, and puts what was measured beside the published and the predicted figures. On one
device nothing is sharded: the rung of FSDP is its larger batch alone. Half precision is bf16, which is as fast as fp16:
an optimizer that loops cannot skip a step that overflows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.build import Built, build
from penstock.config.model import ViTConfig
from penstock.config.plan import Plan
from penstock.errors import ran_out_of_memory
from penstock.ladder.measure import wait
from penstock.planner.describe import describe
from penstock.report.record import environment

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
from published import RUNGS


def rung(model: ViTConfig, line: str, images: int) -> tuple[ViTConfig, Plan]:
    """A rung's model, and its Plan on one device."""
    words = [word for word in line.split() if not word.startswith("sharding=")]
    plan = Plan.parse(" ".join(words).replace("dtype=fp16", "dtype=bf16"))
    return model, replace(plan, micro_batch=images)


def seconds(built: Built, batch: Any, device: torch.device, steps: int) -> float:
    """Seconds of a step."""
    wait(device)
    start = time.perf_counter()
    for _ in range(steps):
        built.step([batch])
    wait(device)
    return (time.perf_counter() - start) / steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps of one timing")
    parser.add_argument(
        "--small", action="store_true", help="two narrow blocks and two images, to try the script"
    )
    options = parser.parse_args()
    device = torch.device(options.device)
    times: dict[str, list[float]] = {}
    figures: dict[str, dict[str, Any]] = {}
    for turn in range(options.rounds):
        for name, model, line, images in RUNGS:
            if "error" in figures.get(name, {}):
                continue
            if options.small:
                model, images = replace(model, width=64, depth=2, heads=4, mlp_width=128), 2
            model, plan = rung(model, line, images)
            figures.setdefault(
                name, {"plan": plan.line(), "images": images, "flops": describe(model, plan).model_flops}
            )
            try:
                built = build(model, plan, device=device)  # one at a time: two of them fill a card
                pixels = torch.randn(images, 3, model.image_size, model.image_size, device=device)
                batch = pixels, torch.randint(0, model.classes, (images,), device=device)
                seconds(built, batch, device, 2)  # warm-up
                times.setdefault(name, []).append(seconds(built, batch, device, options.steps))
                del built
            except (RuntimeError, torch.OutOfMemoryError) as error:
                if not ran_out_of_memory(error):
                    raise
                figures[name]["error"] = "out of memory"
            if device.type == "cuda":
                torch.cuda.empty_cache()
        for name, taken in times.items():
            median = statistics.median(taken)
            figures[name] |= {
                "seconds": taken,
                "images_per_second": figures[name]["images"] / median,
                "flops_per_second": figures[name]["flops"] / median,
            }
        report = {"rungs": figures, "rounds": turn + 1, "environment": environment()}
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for name, each in figures.items():
        rates = each.get("images_per_second", 0.0), each.get("flops_per_second", 0.0) / 1e12
        print(f"{name:34} {rates[0]:8.1f} images/s {rates[1]:7.1f} TFLOP/s {each.get('error', '')}")


if __name__ == "__main__":
    main()
