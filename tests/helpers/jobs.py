"""A small job of every family, dropout on, with data that need nothing from outside: what runs are disturbed on.

A job is enrolled by a line in `JOBS`.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple

from helpers.families import small
from penstock.config.model import DiffusionConfig, ModelConfig, MultimodalConfig, ViTConfig, option_words
from penstock.config.run import DataConfig
from penstock.config.stack import Stack


class Job(NamedTuple):
    """A model, and what it is trained on."""

    model: ModelConfig
    data: str
    """A source; those with a path lie in the folder of `texts_in`."""
    task: str = "auto"


VIT = ViTConfig(
    image_size=8, patch_size=4, channels=1, width=16, depth=2, heads=2, mlp_width=32, classes=10,
    dropout=0.1, drop_path=0.2,
)  # fmt: skip
_SMALL = Stack(width=16, depth=2, heads=2, mlp_width=32, dropout=0.1)
JOBS = {
    "vit": Job(VIT, "digits"),
    "decoder": Job(small("qwen-tiny", dropout=0.1), "text:words"),
    "encoder": Job(small("bert-tiny", dropout=0.1), "text:words"),
    "encoder-decoder": Job(small("marian-tiny", dropout=0.1), "pairs:rows.tsv", "translation"),
    "encoder of pairs": Job(small("bert-tiny", dropout=0.1), "pairs:pairs.tsv", "pairs"),
    "encoder-decoder of spans": Job(small("t5-tiny", dropout=0.1), "text:words"),
    "diffusion": Job(
        DiffusionConfig(
            image_size=8, patch_size=4, channels=1, classes=10, experts=2, width=16, depth=2, heads=2, mlp_width=32,
            dropout=0.1,
        ),
        "digits",
    ),
    "universal": Job(small("universal-tiny", dropout=0.1, head="both", prefix=0.5), "text:words"),
    "multimodal": Job(
        MultimodalConfig(
            image_size=8, patch_size=4, channels=1, vision=_SMALL, text=_SMALL, writer=_SMALL, features=8,
            vocabulary=368, sequence=32, writer_sequence=32,
        ),
        "captions:en,de",
    ),
}  # fmt: skip


def settings(name: str, folder: Path) -> dict[str, Any]:
    """Fields of a RunConfig: model, task and data, whose texts are written to `folder`."""
    model, source, task = JOBS[name]
    kind, colon, path = source.partition(":")
    if colon and kind != "captions":
        source = f"{kind}:{texts_in(folder) / path}"
    return {"model": model, "task": task, "data": DataConfig(source=source)}


def words(name: str, folder: Path) -> list[str]:
    """The same as words of the command line, behind `penstock train`."""
    made = settings(name, folder)
    told = " ".join(option_words(made["model"])).split()
    return [*told, "--task", made["task"], "--data", made["data"].source]


def texts_in(folder: Path) -> Path:
    """Write 288 lines in 12 files of `words`; 240 rows of two texts to `rows.tsv`, and 80 pairs with one of two classes
    to `pairs.tsv`. Returns the folder.
    """
    (folder / "words").mkdir(parents=True, exist_ok=True)
    lines = [f"{a} and {b} make {a + b}." for a, b in itertools.product(range(24), range(12))]
    for part in range(12):
        (folder / "words" / f"{part}.txt").write_text("\n".join(lines[part::12]))
    rows = [f"{n} in tens\t{n // 10} and {n % 10}" for n in range(240)]
    (folder / "rows.tsv").write_text("\n".join(["source\ttarget", *rows]))
    pairs = [
        f"{a} and {a + d}\t{a + d} less {d}\t{'same' if a % 2 else 'other'}"
        for a in range(40)
        for d in (1, 2)
    ]
    (folder / "pairs.tsv").write_text("\n".join(["first\tsecond\tlabel", *pairs]))
    return folder
