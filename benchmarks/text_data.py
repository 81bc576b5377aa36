"""Tokens per second that one core reads of a pack, and text that it tokenises.

    python benchmarks/text_data.py --output benchmarks/results/text_data_cpu.json

The text is the standard library's source, packed as bytes and with a BPE of 8,192 tokens trained on it. Windows of
1,024 tokens, and rows of up to 128, are read in random order: by the source alone, and by a Loader, which copies them
to tensors in a thread of its own. `first` is a pass in which every block's checksum is still to be checked. Files are
in the page cache. Rates are per second of processor time of the whole process, so that other work on the machine does
not count; wall-clock rates are listed beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.config.run import DataConfig
from penstock.data import Loader, Source
from penstock.data.text.open import open_tokenizer
from penstock.data.text.rows import open_rows
from penstock.data.text.sources import TextPacking, pack_text
from penstock.data.text.tokens import TokenSource, open_tokens
from ways import Way, in_turn

WINDOW, ROW, BATCH = 1024, 128, 64


def reading(source: Source, tokens: int) -> Way:
    """`tokens` is how many a sample has."""
    out = np.empty(BATCH, source.sample)

    def work(rng: np.random.Generator) -> int:
        source.read_into(rng.integers(0, len(source), BATCH), out)
        return BATCH * tokens

    return Way(work, "tokens")


def first_pass(open_again: Callable[[], TokenSource]) -> Way:
    def work(rng: np.random.Generator) -> int:
        source = open_again()
        out = np.empty(BATCH, source.sample)
        order = rng.permutation(len(source))
        for start in range(0, len(order) - BATCH, BATCH):
            source.read_into(order[start : start + BATCH], out)
        return len(source) * WINDOW

    return Way(work, "tokens")


def loading(source: Source) -> Way:
    loader = iter(Loader(source, lambda host, _: host.samples, batch=BATCH))

    def work(_: np.random.Generator) -> int:
        return int(next(loader).numel())

    return Way(work, "tokens")


def tokenising(data: DataConfig) -> Way:
    """In one thread: `RAYON_NUM_THREADS` is 1."""
    tokenizer = open_tokenizer(data)
    source = open_tokens(data, tokenizer, "train", length=1 << 14)
    out = np.empty(64, source.sample)
    source.read_into(np.arange(64), out)
    texts = [tokenizer.decode(row.tolist()) for row in out]
    size = sum(len(text.encode()) for text in texts)

    def work(_: np.random.Generator) -> int:
        tokenizer.encode(texts)
        return size

    return Way(work, "bytes")


def ways(root: Path) -> tuple[dict[str, Way], dict[str, Any]]:
    """Every way by name, and the facts of what they read."""
    found: dict[str, Way] = {}
    facts: dict[str, Any] = {"window": WINDOW, "row": ROW, "batch": BATCH}
    for name, tokenizer in (("bytes", "bytes"), ("BPE", "bpe:8192")):
        path = root / name
        manifest = pack_text("stdlib", path, TextPacking(tokenizer=tokenizer))
        part = manifest.parts[0]
        facts[name] = {
            "tokens": part.tokens,
            "text_bytes": part.text_bytes,
            "vocabulary": manifest.tokenizer.size,
        }
        data = DataConfig(source=f"pack:{path}")

        def opened(data: DataConfig = data) -> TokenSource:
            return open_tokens(data, open_tokenizer(data), "train", length=WINDOW)

        found[f"windows of {name}"] = reading(opened(), WINDOW)
        found[f"windows of {name}, first"] = first_pass(opened)
        found[f"windows of {name}, Loader"] = loading(opened())
        found[f"tokenise, {name}"] = tokenising(data)
    table = root / "pairs.tsv"
    rng = np.random.default_rng(0)
    lines = [
        f"{'word ' * int(rng.integers(1, 9))}\t{'other ' * int(rng.integers(1, 9))}" for _ in range(20_000)
    ]
    table.write_text("first\tsecond\n" + "\n".join(lines), encoding="utf-8")
    pack_text(f"pairs:{table}", root / "rows", TextPacking(rows="two"))
    data = DataConfig(source=f"pack:{root / 'rows'}")
    rows = open_rows(data, open_tokenizer(data), "train", form="two", length=ROW)
    found["rows of two texts"] = reading(rows, 2 * ROW)
    return found, facts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="of processor time, for each way and round"
    )
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    os.environ["RAYON_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as root:
        found, facts = ways(Path(root))
        result = in_turn(found, options.rounds, options.seconds) | {"data": facts}
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
