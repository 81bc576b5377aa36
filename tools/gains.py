"""Write docs/gains.svg, the picture of the README, from what races and ladders measured: `make reference`.

A test compares the file with `picture()`, so it always agrees with benchmarks/results.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.report.figures import Bar, waterfall

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PATH = ROOT / "docs" / "gains.svg"
TITLE = "Training steps under Penstock's best Plan, beside a plain fp32 loop and the best loop by hand"
BF16 = "CPU with AVX512-BF16"


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _raced(label: str, file: str, cell: str) -> Bar:
    """A race against loops by hand, of benchmarks/language_train.py."""
    verdict = _read(file)["cells"][cell]["verdict"]
    plain, hand = verdict["over_plain"], verdict["over_hand"]
    low, high = plain["interval"]
    return _bar(label, plain["median"], low, high, floor=plain["median"] / hand["median"])


def _vision(label: str, file: str) -> Bar:
    """A race of benchmarks/vit_train.py. Its interval is from the slowest step over the fastest plain one, and back."""
    times: dict[str, list[dict[str, float]]] = {}
    for contestant in _read(file)["contestants"]:
        times.setdefault(contestant["kind"], []).append(contestant["ms_per_step"])
    (plain,) = times["plain"]
    ours, hand = (min(times[kind], key=lambda each: each["median"]) for kind in ("penstock", "hand"))
    return _bar(
        label,
        plain["median"] / ours["median"],
        plain["min"] / ours["max"],
        plain["max"] / ours["min"],
        floor=plain["median"] / hand["median"],
    )


def _climbed(label: str, model: str) -> Bar:
    """A climb of the ladder, which predicts; no loop by hand took part."""
    same = _read("ladder_text_cpu")[model]["same"]
    speed = same["speedup"]
    return _bar(label, speed["value"], speed["low"], speed["high"], predicted=same["predicted"])


def _bar(label: str, value: float, low: float, high: float, **more: float) -> Bar:
    return Bar(
        label=label, state="kept" if low > 1.0 else "unproven", value=value, low=low, high=high, **more
    )


def bars() -> Iterator[Bar]:
    """The rows, machine by machine."""
    yield _vision("ViT-B/16, 64 images, H200", "vit_train_h200")
    yield _raced("GPT-2, 8 × 1,024 tokens, H200", "language_train_h200", "gpt2, 8 x 1024 tokens, cuda")
    for name, words in (("bert-base", "BERT-base"), ("gpt2", "GPT-2"), ("marian-base", "Marian")):
        yield _raced(f"{words}, 4 × 128 tokens, {BF16}", "language_train_cpu", f"{name}, 4 x 128 tokens, cpu")
    yield _climbed(f"transformers' BERT-base, padded texts, {BF16}", "transformers' bert-base of classes")
    yield _climbed(f"transformers' GPT-2, {BF16}", "transformers' gpt2")
    yield _climbed(f"T5-small, {BF16}", "t5-small")
    yield _vision("ViT-S/16, 8 images, CPU with AVX2 only", "vit_train_cpu")


def picture() -> str:
    """The text of the SVG file."""
    drawn = waterfall(
        list(bars()),
        title=TITLE,
        x_label="times as fast as a plain fp32 loop",
        parts=("the best loop by hand, where one raced", "Penstock's best Plan"),
        alone=True,
    )
    return drawn + "\n"


if __name__ == "__main__":
    PATH.write_text(picture(), encoding="utf-8")
