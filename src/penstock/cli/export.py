"""`penstock export`: a trained model in forms that other programs run."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from penstock.errors import ConfigError
from penstock.export import ExportForm, ExportType


def export(
    model: str, target: Path, *, to: Annotated[Literal[ExportForm, "transformers"], Parameter(name="--to")] = "onnx",
    type: ExportType = "fp32", head: Annotated[tuple[str, ...], Parameter(negative="")] = (),
) -> None:  # fmt: skip
    """Write a model for other programs: ONNX, CTranslate2, torch, transformers.

    The written model is run once. Ends with code 6 if its outputs differ from MODEL's beyond the rounding of TYPE.

        penstock export runs/vit-digits/export out --to onnx

    Parameters
    ----------
    model
        A run's folder or its export, a folder that transformers wrote, or a name on the Hugging Face hub.
    target
        The folder to write to.
    to
        `onnx`: model.onnx, run in ONNX Runtime. `onnx-cache`: for generating, with keys and values passed in and out.
        `transformers`: a folder of transformers; layers of a pruned model are padded with zeros up to the widest, and
        weights of a quantised model are dequantised. `ctranslate2`: a folder of CTranslate2.
        `torch`: model.pt2, for torch.export.load. `aoti`: compiled.pt2, machine code by AOTInductor.
        `compressed-tensors`: a folder of transformers with the integers of a quantised model. `gguf`: model.gguf, for
        llama.cpp.
    type
        Type of the weights of `ctranslate2` and `gguf`. bf16, fp16 and int8 change results.
    head
        Write only the output of this head of a model with several; may be repeated. By default all, each by its name.
    """
    from penstock.compress.pad import write_transformers
    from penstock.export.export import export as write

    # The import of torch sets all levels again, so this comes after it.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "`isinstance.treespec", FutureWarning)  # of torch's own calls
    if to == "transformers":
        if type != "fp32" or head:
            raise ConfigError(
                "--to transformers has no --type and no --head; leave them out, or choose onnx."
            )
        path, difference = write_transformers(model, target)
    else:
        path, difference = write(model, target, to, type, heads=head)
    print(f"written: {path}, outputs within {difference:.1e} of the model's")
