"""`penstock embed`: vectors of texts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from penstock.cli._app import configured
from penstock.cli._options import TextFile, Texts
from penstock.cli.generate import input_texts
from penstock.config.decoding import EncodeConfig
from penstock.errors import ConfigError


@configured(EncodeConfig, positional="model")
def embed(
    config: EncodeConfig, *texts: Texts, file: TextFile = None,
    image: Annotated[tuple[Path, ...], Parameter(help="An image instead of texts; may be repeated.", negative="")] = (),
) -> None:  # fmt: skip
    """Turn texts into vectors with a trained encoder.

    A model of texts and images takes images too, with --image. Each vector has length 1, and is printed as a JSON list
    on a line of its own. TEXTS come from the command line, from --file, or from a pipe, one per line. With --plan, each
    of several processes does its part, and one prints.

        penstock embed sentence-transformers/all-MiniLM-L6-v2 --file sentences.txt
    """
    from penstock.infer.encode import Embedder
    from penstock.infer.ranks import from_rank_zero, require_ranks
    from penstock.parallel import launched

    model, plan = config.named("embed"), config.as_plan
    require_ranks(plan, launched(), weights=config.weights)
    main = launched() == 1 or os.environ["RANK"] == "0"
    if image and (texts or file is not None):
        raise ConfigError("Give texts, or images with --image, not both.")
    inputs = input_texts(texts, file) if main and not image else []
    with Embedder(model, **config.options) as embedder:
        if image:
            vectors = embedder.embed_images(image)
        else:
            vectors = embedder.embed(from_rank_zero(inputs, embedder.dims))
    for vector in vectors.tolist() if main else ():
        print(json.dumps([round(number, 7) for number in vector]))
