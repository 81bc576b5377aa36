"""What the ladder finds for language models of every family, as a newcomer types it.

    python benchmarks/ladder_text.py --output benchmarks/results/ladder_text_cpu.json

Each is one command, in its usual six minutes. Those in the JSON are not run again, so that they may be measured one by
one (--only). Two climb on short documents that are not packed: the docstrings of Python's standard library. Three are
transformers' own modules (transformers_models.py). Kept are the Plan, what each rung of the path gained, and the rungs
that only text has.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shlex
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FEW = "--rungs memory,optimizer-fused,masters,attention-plain,padding,packed,length-groups"
CLIMBS = {
    "gpt2": "penstock ladder gpt2",
    "bert-base": "penstock ladder bert-base --task pairs --data numbers:en,de --model.sequence 128 --batch 8",
    "marian-base": "penstock ladder marian-base --data numbers:en,de --batch 16",
    "t5-small": "penstock ladder t5-small",
    "bert-base unpacked": "penstock ladder bert-base --data pack:docstrings --data.packed false "
    f"--model.sequence 128 --batch 4 {FEW}",
    "gpt2 unpacked": "penstock ladder gpt2 --data pack:docstrings --data.packed false "
    f"--model.sequence 128 --batch 4 {FEW}",
    "transformers' bert-base of classes": "penstock ladder --model transformers_models:bert_classes",
    "transformers' bert-base of words": "penstock ladder --model transformers_models:bert_words",
    "transformers' gpt2": "penstock ladder --model transformers_models:gpt2",
}
OF_TEXT = ("loss-chunked", "padding", "packed", "length-groups")


def docstrings() -> Iterator[str]:
    """Those of the standard library's own modules, in the order of their files."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("**/*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue  # files that are there to be broken
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""


def pack_docstrings(folder: Path) -> None:
    """Tokens of a BPE of 8,192, as `pack:docstrings` reads them."""
    if (folder / "docstrings").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": text}) for text in docstrings() if text]
    (folder / "docstrings.jsonl").write_text("\n".join(lines))
    words = ["pack", "text:docstrings.jsonl", "docstrings", "--tokenizer", "bpe:8192"]
    subprocess.run([sys.executable, "-m", "penstock", *words], check=True, cwd=folder)


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
    here = [str(Path(__file__).parent.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
    kept = json.loads(options.output.read_text()) if options.output.exists() else {}
    for name in options.only or CLIMBS:
        if name in kept:
            continue
        words = shlex.split(CLIMBS[name])[1:]
        if "pack:docstrings" in words:
            pack_docstrings(options.runs)
        folder = name.replace(" ", "-").replace("'", "")
        options.runs.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [sys.executable, "-m", "penstock", *words, "--output", folder],
            check=True,
            cwd=options.runs,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(here)},
        )
        found = summary(json.loads((options.runs / folder / "ladder.json").read_text()))
        kept[name] = {"command": CLIMBS[name], **found}
        options.output.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
        print(f"{name}: {found['same']['speedup']['value']:.2f}x with {found['same']['plan']}", flush=True)


if __name__ == "__main__":
    main()
