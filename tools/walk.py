"""Show which files of src/penstock run, and how many lines of each, in one training step of a ViT, one generated token
and one prediction. Imports and first calls do not count: the files are those that a reader opens to follow."""

import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import penstock.planner
from penstock.build import build
from penstock.config.decoding import Decoding
from penstock.decode.engine import Engine, Request

SOURCE = str(Path(penstock.__file__).parent)


def lines_of(walk: Callable[[], object]) -> dict[str, int]:
    """Number of lines that run in each file; on a CPU the backward pass runs in this thread, too."""
    lines: defaultdict[str, set[int]] = defaultdict(set)

    def trace(frame: Any, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        lines[frame.f_code.co_filename[len(SOURCE) + 1 :]].add(frame.f_lineno)
        return trace

    walk()
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        walk()
    finally:
        sys.settrace(before)
    return {file: len(numbers) for file, numbers in sorted(lines.items())}


def walks() -> dict[str, Callable[[], object]]:
    """The walks by name."""
    vit, plan, machine = penstock.PRESETS["vit-digits"], penstock.Plan(), penstock.load_machine("h100")
    built = build(vit, plan)
    side = vit.graph.images.image_size
    batch = torch.zeros(2, vit.graph.images.channels, side, side), torch.zeros(2, dtype=torch.int64)
    engine = Engine(build(penstock.PRESETS["llama-tiny"], plan).model.eval(), slots=1, context=16)
    engine.admit(Request(ids=(1, 2), decoding=Decoding(max_tokens=8)))
    engine.step()

    def predict() -> object:
        for name in [one for one in sys.modules if one.startswith(("penstock.planner.", "penstock.config."))]:
            for value in vars(sys.modules[name]).values():
                getattr(value, "cache_clear", int)()  # else a second prediction is mostly looked up
        return penstock.planner.predict(vit, machine, plan)

    return {"step": lambda: built.step([batch]), "token": engine.step, "prediction": predict}


if __name__ == "__main__":
    for name, walk in walks().items():
        files = lines_of(walk)
        print(f"{name}: {len(files)} files", *(f"{n:6} {file}" for file, n in files.items()), sep="\n")
