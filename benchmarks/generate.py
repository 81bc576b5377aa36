"""Generation against transformers' `generate`, eager and compiled, and CTranslate2: seconds of a batch of texts,
side by side.

    pip install 'penstock[export]'
    python benchmarks/generate.py --threads 2 --output benchmarks/results/generate_cpu.json

Models have the shapes of the presets and random weights, and every text gets as many tokens as asked for, so that all
ways do the same work. Encoder–decoders search with four beams, decoders take the likeliest token. The ways of a cell,
each in a process of its own, take turns in rounds whose order is reversed each time; ratios are medians of the ratios
within a round. A way that does not work in a cell is left out, and the file says why.

`ours-compiled` and `ours-shortlist`, which `--ways` adds, are ours with compiled steps and with a short vocabulary.
`compiled` is transformers with a cache of one size and torch.compile: `generate` compiles the pass of one token by
itself where it takes the likeliest; in beam search it never does, so there the model's whole forward is compiled.
CTranslate2 runs what `penstock export` writes.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from penstock.config.decoding import Decoding
from penstock.config.formats import Weights
from penstock.config.model import PRESETS, Seq2SeqConfig
from penstock.config.plan import Plan
from penstock.export.ctranslate import write_ctranslate
from penstock.export.export import inputs_of
from penstock.infer.generator import Generator
from penstock.models import create
from penstock.models.convert import save_pretrained
from races import Cells, Makes, Run, options, require_known

BEAMS = 4
START, END = 0, 2
SHORT = 1000
"""Tokens that `ours-shortlist` chooses among."""
TYPES: dict[str, tuple[str, Weights, str]] = {
    "fp32": ("baseline", "auto", "float32"),
    "bf16": ("precision=O3", "auto", "bfloat16"),
    "int8": ("baseline", "int8", "int8_float32"),
}
"""Of each type: our Plan and weights, and CTranslate2's name."""
CHECK = 3, 11, 9
"""Texts, tokens of a source and of a target, on which CTranslate2's folder is tried."""


class Case:
    """One model, in a folder that all ways read."""

    def __init__(self, name: str, folder: Path, threads: int) -> None:
        self.folder, self.threads = folder, threads
        config: Any = PRESETS[name]
        self.both = isinstance(config, Seq2SeqConfig)
        self.words: int = config.vocabulary
        self.beams = BEAMS if self.both else 1
        torch.manual_seed(0)
        save_pretrained(create(config), folder)
        require_known(folder)
        file = folder / "config.json"
        said = json.loads(file.read_text()) | {"eos_token_id": END, "decoder_start_token_id": START}
        file.write_text(json.dumps(said))

    def prompts(self, batch: int, tokens: int) -> list[list[int]]:
        """Ragged ones, between half as long and as long as asked for."""
        draw = random.Random(batch)
        return [
            [draw.randrange(10, self.words - 1) for _ in range(draw.randint(tokens // 2, tokens))]
            for _ in range(batch)
        ]

    def ways(self, kind: str, rows: list[list[int]], new: int) -> Makes:
        """What prepares each way."""
        return {
            "penstock": lambda: self.ours(kind, rows, new),
            "ours-compiled": lambda: self.ours(kind, rows, new, compiled=True),
            "ours-shortlist": lambda: self.ours(kind, rows, new, shortlist=SHORT),
            "transformers": lambda: self.theirs(kind, rows, new),
            "compiled": lambda: self.theirs(kind, rows, new, compiled=True),
            "ctranslate2": lambda: self.ctranslate2(kind, rows, new),
        }

    def ours(
        self,
        kind: str,
        rows: list[list[int]],
        new: int,
        *,
        compiled: bool = False,
        shortlist: int = 0,
        device: str = "cpu",
    ) -> Run:
        line, weights, _ = TYPES[kind]
        plan = Plan.parse(line.replace("baseline", "") + " compile=whole" if compiled else line)
        listed = range(10, 10 + shortlist)
        made = Generator(
            self.folder, plan, weights=weights, start=START, ends=(), shortlist=listed, device=device
        )
        settings = Decoding(max_tokens=new, beams=self.beams)
        return lambda: made.generate(rows, settings)

    def theirs(
        self, kind: str, rows: list[list[int]], new: int, *, compiled: bool = False, device: str = "cpu"
    ) -> Run | str:
        """transformers' `generate`."""
        import transformers

        if kind == "int8":
            return "transformers has no int8 of its own on a CPU"
        transformers.logging.set_verbosity_error()
        classes = transformers.AutoModelForSeq2SeqLM if self.both else transformers.AutoModelForCausalLM
        model = classes.from_pretrained(self.folder, dtype=getattr(torch, TYPES[kind][2])).eval().to(device)
        model.generation_config = transformers.GenerationConfig()
        tokens, mask = (tensor.to(device) for tensor in padded(rows, first=not self.both))
        given: dict[str, Any] = {
            "max_new_tokens": new,
            "min_new_tokens": new,
            "do_sample": False,
            "pad_token_id": START,
        }
        if self.both:
            given |= {"num_beams": BEAMS, "decoder_start_token_id": START}
        if compiled:
            given["cache_implementation"] = "static"
            if self.both:
                model.forward = torch.compile(model.forward)
            elif device == "cpu":  # `generate` compiles by itself on GPUs alone
                given["compile_config"] = transformers.CompileConfig(mode="default")
                given["compile_config"]._compile_all_devices = True
        return lambda: model.generate(tokens, attention_mask=mask, **given)

    def ctranslate2(self, kind: str, rows: list[list[int]], new: int) -> Run | str:
        """CTranslate2, from the same weights; it is given words that are numbers."""
        import ctranslate2

        if TYPES[kind][2] not in ctranslate2.get_supported_compute_types("cpu"):
            return f"CTranslate2 does not compute in {TYPES[kind][2]} here"
        folder = self.folder / "ctranslate2"
        if not folder.exists():
            write_ctranslate(self.folder, folder, "fp32", lambda model: inputs_of(model, *CHECK))
        words = [list(map(str, row)) for row in rows]
        how: dict[str, Any] = {
            "compute_type": TYPES[kind][2],
            "intra_threads": self.threads,
            "inter_threads": 1,
        }
        if self.both:
            translator = ctranslate2.Translator(str(folder), **how)
            return lambda: translator.translate_batch(
                words, beam_size=BEAMS, max_decoding_length=new, min_decoding_length=new, max_batch_size=0
            )
        generator = ctranslate2.Generator(str(folder), **how)
        return lambda: generator.generate_batch(
            words, max_length=new, min_length=new, include_prompt_in_result=False, max_batch_size=0
        )


def padded(rows: list[list[int]], *, first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of one length, with padding in front or behind, and a mask that is 0 there."""
    longest = max(map(len, rows))
    fill = [[START] * (longest - len(row)) for row in rows]
    tokens = [more + row if first else row + more for row, more in zip(rows, fill)]
    mask = [
        [0] * len(more) + [1] * len(row) if first else [1] * len(row) + [0] * len(more)
        for row, more in zip(rows, fill)
    ]
    return torch.tensor(tokens), torch.tensor(mask)


def main() -> None:
    parser = options(
        __doc__,
        ways="penstock,transformers,compiled,ctranslate2",
        models="marian-base,transformer-big,t5-small,gpt2,qwen2-0.5b",
    )
    parser.add_argument(
        "--batches", default="1,8,32", type=lambda text: [int(one) for one in text.split(",")]
    )
    parser.add_argument("--prompt", type=int, default=32, help="tokens of the longest prompt or source")
    parser.add_argument("--new", type=int, default=32, help="tokens to generate")
    given = parser.parse_args()
    torch.set_num_threads(1)  # the ways, which are forked, have as many as asked for
    cells = Cells(given)

    def keys(name: str) -> Iterator[dict[str, Any]]:
        for kind in given.types:
            for batch in given.batches:
                sizes = {"prompt": given.prompt, "new": given.new}
                yield {"model": name, "type": kind, "batch": batch, **sizes}

    for name in given.models:
        wanted = list(cells.missing(keys(name)))
        if not wanted:
            continue
        with tempfile.TemporaryDirectory() as folder:
            case = Case(name, Path(folder), given.threads)
            for key in wanted:
                rows = case.prompts(key["batch"], given.prompt)
                cells.race(key, case.ways(key["type"], rows, given.new))


if __name__ == "__main__":
    main()
