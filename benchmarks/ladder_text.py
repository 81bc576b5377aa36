"""What the ladder finds for language models of every family, as a newcomer types it.

    python benchmarks/ladder_text.py --output benchmarks/results/ladder_text_cpu.json

Each is one command, in its usual six minutes. Those in the JSON are not run again, so that they may be measured one by
one (--only). Kept are the Plan, what each rung of the path gained, and the rungs that only text has.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

CLIMBS = {
    "gpt2": "penstock ladder gpt2",
    "bert-base": "penstock ladder bert-base --task pairs --data numbers:en,de --model.sequence 128 --batch 8",
    "marian-base": "penstock ladder marian-base --data numbers:en,de --batch 16",
    "t5-small": "penstock ladder t5-small",
}
OF_TEXT = ("loss-chunked", "padding", "length-groups")


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """What a table needs of a ladder.json."""
    names = ("name", "status", "reason", "to_previous", "to_baseline", "forecast", "memory_bytes")
    wanted = {*report["same"]["rungs"], *OF_TEXT, "baseline"}
    return {
        "unit": report["unit"],
        "batch": report["batch"],
        "same": report["same"],
        "fastest": report["fastest"],
        "rungs": [{name: rung[name] for name in names} for rung in report["rungs"] if rung["name"] in wanted],
        "measured": sum(rung["to_baseline"] is not None for rung in report["rungs"]),
        "tried": len(report["tried"]),
        "candidates": report["candidates"],
        "control": report["control"],
        "notes": report["notes"],
        "wall_seconds": report["wall_seconds"],
        "others_busy": report["others_busy"],
        "environment": report["environment"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=list(CLIMBS), help="may be given again")
    parser.add_argument("--runs", type=Path, default=Path("runs/ladders"), help="folder of the pages")
    parser.add_argument("--output", type=Path, required=True, help="what is in it is not run again")
    options = parser.parse_args()
    kept = json.loads(options.output.read_text()) if options.output.exists() else {}
    for name in options.only or CLIMBS:
        if name in kept:
            continue
        folder = options.runs / name
        words = shlex.split(CLIMBS[name])[1:]
        subprocess.run([sys.executable, "-m", "penstock", *words, "--output", str(folder)], check=True)
        found = summary(json.loads((folder / "ladder.json").read_text()))
        kept[name] = {"command": CLIMBS[name], **found}
        options.output.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
        print(f"{name}: {found['same']['speedup']['value']:.2f}x with {found['same']['plan']}", flush=True)


if __name__ == "__main__":
    main()
