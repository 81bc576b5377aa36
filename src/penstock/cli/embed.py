"""`penstock embed`: vectors of texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from penstock.cli._app import configured
from penstock.cli.generate import words
from penstock.config.decoding import EncodeConfig


@configured(EncodeConfig, positional="model")
def embed(
    config: EncodeConfig,
    *texts: Annotated[str, Parameter(allow_leading_hyphen=False)],
    file: Annotated[Path | None, Parameter(help="Read texts from this file, one a line.")] = None,
) -> None:
    """Turn texts into vectors of length 1, each a JSON list on a line of its own.

    TEXTS come from the command line, from --file, or from what is piped in, one a line.
    """
    model, given = config.named("embed"), words(texts, file)
    from penstock.infer.encode import Embedder

    found = Embedder(model, config.as_plan, weights=config.weights, batch=config.batch, device=config.device)
    for vector in found.embed(given).tolist():
        print(json.dumps([round(number, 7) for number in vector]))
