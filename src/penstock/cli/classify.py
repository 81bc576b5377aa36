"""`penstock classify`: classes of texts or images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from penstock.cli._app import configured
from penstock.cli.generate import words
from penstock.config.decoding import EncodeConfig


@configured(EncodeConfig, positional="model")
def classify(
    config: EncodeConfig,
    *inputs: Annotated[str, Parameter(allow_leading_hyphen=False, help="Texts, or paths of images.")],
    file: Annotated[
        Path | None, Parameter(help="Read texts, or paths of images, from this file, one per line.")
    ] = None,
    as_json: Annotated[
        bool, Parameter(name="--json", negative="", help="Print one JSON object per line.")
    ] = False,
) -> None:
    """Classify texts or images with a trained model.

    INPUTS are texts, or paths of images for a ViT. They come from the command line, from --file, or from a pipe, one
    per line. Each line that is printed is the likeliest class, its probability, and the input.

        penstock classify runs/digits photo.png --json
    """
    model, sources = config.named("classify"), words(inputs, file)
    from penstock.infer.encode import Classifier

    classifier = Classifier(model, **config.options)
    for source, answer in zip(sources, classifier.classify(sources), strict=True):
        if as_json:
            print(json.dumps({"input": source, "label": answer.label, "probabilities": answer.probabilities}))
        else:
            print(f"{answer.label}\t{answer.probability:.4f}\t{source}")
