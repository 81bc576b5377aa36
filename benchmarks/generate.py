"""Generation against transformers' `generate` and CTranslate2: seconds of a batch of texts, side by side.

    pip install ctranslate2
    python benchmarks/generate.py --threads 1 --output benchmarks/results/generate_cpu.json

Models have the shapes of the presets and random weights, and every text gets as many tokens as asked for, so that all
ways do the same work. Encoder–decoders search with four beams, decoders take the likeliest token. All ways of a cell
run in one process in rounds whose order is reversed each time; ratios are medians of the ratios within a round.
CTranslate2 is left out where it is not installed, of models that it does not read, and of types that it does not
compute in here.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from penstock.config.decoding import Decoding, Weights
from penstock.config.model import PRESETS, Seq2SeqConfig
from penstock.config.plan import Plan
from penstock.infer.generator import Generator
from penstock.models import create
from penstock.models.convert import save_pretrained
from penstock.report.record import environment

BEAMS = 4
START = 0
TYPES: dict[str, tuple[str, Weights, str]] = {
    "fp32": ("baseline", "auto", "float32"),
    "bf16": ("precision=O3", "auto", "bfloat16"),
    "int8": ("baseline", "int8", "int8_float32"),
}
"""Of each type: our Plan and weights, and CTranslate2's name. transformers has no int8 of its own on a CPU."""


class Case:
    """One model, in a folder that all ways read."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        config: Any = PRESETS[name]
        self.both = isinstance(config, Seq2SeqConfig)
        self.words: int = config.vocabulary
        torch.manual_seed(0)
        save_pretrained(create(config), folder)

    def prompts(self, batch: int, tokens: int) -> list[list[int]]:
        """Ragged ones, between half as long and as long as asked for."""
        draw = random.Random(batch)
        return [
            [draw.randrange(10, self.words - 1) for _ in range(draw.randint(tokens // 2, tokens))]
            for _ in range(batch)
        ]

    def ours(
        self, kind: str, rows: list[list[int]], new: int, *, compiled: bool = False, shortlist: int = 0
    ) -> Callable[[], Any]:
        line, weights, _ = TYPES[kind]
        plan = Plan.parse(line.replace("baseline", "") + " compile=whole" if compiled else line)
        listed = range(10, 10 + shortlist)
        made = Generator(self.folder, plan, weights=weights, start=START, ends=(), shortlist=listed)
        settings = Decoding(max_tokens=new, beams=BEAMS if self.both else 1)
        return lambda: made.generate(rows, settings)

    def theirs(self, kind: str, rows: list[list[int]], new: int) -> Callable[[], Any] | None:
        """transformers' `generate`."""
        import transformers

        if kind == "int8":
            return None
        transformers.logging.set_verbosity_error()
        classes = transformers.AutoModelForSeq2SeqLM if self.both else transformers.AutoModelForCausalLM
        model = classes.from_pretrained(self.folder, dtype=getattr(torch, TYPES[kind][2])).eval()
        model.generation_config = transformers.GenerationConfig()
        longest = max(map(len, rows))
        left = 0 if self.both else 1
        fill = [[START] * (longest - len(row)) for row in rows]
        tokens = torch.tensor([more + row if left else row + more for row, more in zip(rows, fill)])
        mask = torch.tensor(
            [[0] * len(m) + [1] * len(r) if left else [1] * len(r) + [0] * len(m) for r, m in zip(rows, fill)]
        )
        given: dict[str, Any] = {
            "max_new_tokens": new,
            "min_new_tokens": new,
            "do_sample": False,
            "pad_token_id": START,
        }
        if self.both:
            given |= {"num_beams": BEAMS, "decoder_start_token_id": START}
        return lambda: model.generate(tokens, attention_mask=mask, **given)

    def ctranslate2(
        self, kind: str, rows: list[list[int]], new: int, threads: int
    ) -> Callable[[], Any] | None:
        """CTranslate2, from the same weights; it is given words that are numbers."""
        try:
            import ctranslate2
        except ImportError:
            return None
        folder = self._converted()
        if folder is None:
            return None
        words = [[f"t{number}" for number in row] for row in rows]
        how: dict[str, Any] = {"compute_type": TYPES[kind][2], "intra_threads": threads, "inter_threads": 1}
        if TYPES[kind][2] not in ctranslate2.get_supported_compute_types("cpu"):
            return None
        if self.both:
            translator = ctranslate2.Translator(str(folder), **how)
            return lambda: translator.translate_batch(
                words, beam_size=BEAMS, max_decoding_length=new, min_decoding_length=new, max_batch_size=0
            )
        generator = ctranslate2.Generator(str(folder), **how)
        return lambda: generator.generate_batch(
            words, max_length=new, min_length=new, include_prompt_in_result=False, max_batch_size=0
        )

    def _converted(self) -> Path | None:
        import transformers
        from ctranslate2.converters import transformers as readers

        out = self.folder / "ctranslate2"
        if out.exists():
            return out
        kinds = {
            "marian": ("MarianMTLoader", "MarianMTModel"), "gpt2": ("GPT2Loader", "GPT2LMHeadModel"),
            "t5": ("T5Loader", "T5ForConditionalGeneration"), "qwen2": ("Qwen2Loader", "Qwen2ForCausalLM"),
        }  # fmt: skip
        kind = json.loads((self.folder / "config.json").read_text())["model_type"]
        if kind not in kinds:
            return None
        loader, model = getattr(readers, kinds[kind][0])(), getattr(transformers, kinds[kind][1])
        spec = loader.get_model_spec(model.from_pretrained(self.folder, dtype=torch.float32))
        # Of Marian's, the last word is padding, which CTranslate2 leaves out.
        words = [f"t{number}" for number in range(self.words - (kind == "marian"))]
        if self.both:
            spec.register_source_vocabulary(words)
            spec.register_target_vocabulary(words)
            spec.config.decoder_start_token = words[START]
            spec.config.add_source_eos = False
        else:
            spec.register_vocabulary(words)
        spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = words[1], words[2], words[3]
        spec.validate()
        spec.optimize()
        out.mkdir()
        spec.save(str(out))
        return out


def measured(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Any]:
    """Seconds of each way, and how many times faster ours is than each other."""
    for way in ways.values():
        way()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            start = time.perf_counter()
            ways[name]()
            times[name].append(time.perf_counter() - start)
    found: dict[str, Any] = {
        name: {"seconds": statistics.median(every), "least": min(every), "most": max(every)}
        for name, every in times.items()
    }
    for name in set(ways) - {"penstock"}:
        ratios = [other / own for own, other in zip(times["penstock"], times[name])]
        found[name]["penstock is faster by"] = statistics.median(ratios)
        found[name]["between"] = [min(ratios), max(ratios)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", default="marian-base,t5-small,gpt2", help="presets, with commas between them"
    )
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--types", default="fp32,bf16,int8")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of the longest prompt or source")
    parser.add_argument("--new", type=int, default=32, help="tokens to generate")
    parser.add_argument("--compiled", action="store_true", help="measure our compiled steps, too")
    parser.add_argument(
        "--shortlist", type=int, default=0, help="measure ours with so many tokens alone, too"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    cells: list[dict[str, Any]] = []
    for name in given.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            case = Case(name, Path(folder))
            for kind in given.types.split(","):
                for batch in map(int, given.batches.split(",")):
                    rows = case.prompts(batch, given.prompt)
                    every = {
                        "penstock": case.ours(kind, rows, given.new),
                        "compiled": case.ours(kind, rows, given.new, compiled=True)
                        if given.compiled
                        else None,
                        "shortlist": (
                            case.ours(kind, rows, given.new, shortlist=given.shortlist)
                            if given.shortlist
                            else None
                        ),
                        "transformers": case.theirs(kind, rows, given.new),
                        "ctranslate2": case.ctranslate2(kind, rows, given.new, given.threads),
                    }
                    ways = {way: run for way, run in every.items() if run is not None}
                    found = measured(ways, given.rounds)
                    cells.append({"model": name, "type": kind, "batch": batch, "ways": found})
                    told = [f"{way} {each['seconds']:.3f} s" for way, each in found.items()]
                    told += [
                        f"{each['penstock is faster by']:.2f}x {way}"
                        for way, each in found.items()
                        if way != "penstock"
                    ]
                    print(f"{name} {kind} batch {batch}: {', '.join(told)}", flush=True)
    if given.output:
        settings = {key: value for key, value in vars(given).items() if key != "output"}
        record = {"settings": settings, "environment": environment(), "cells": cells}
        given.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
