"""`penstock compress`: a smaller model out of a trained one."""

from __future__ import annotations

import sys
from pathlib import Path

from penstock.boundary.files import require_folder
from penstock.cli._app import configured
from penstock.config.compress import CompressConfig, load_compression


@configured(CompressConfig, positional="model", file=("--config", "--recipe"), loader=load_compression)
def compress(config: CompressConfig) -> None:
    """Make a trained model smaller: prune, distil and quantise it.

    Steps that have settings are done; the file given with --recipe can hold the settings of all steps. The same command
    resumes where it was stopped. OUTPUT gets each step's model, compress.html, compress.json, and the compressed model
    in `export`.

        penstock compress runs/vit-digits --prune.layers 0.34 --quantise int8
    """
    from penstock.cli._display import show
    from penstock.compress.page import cuts_table, table
    from penstock.compress.run import PAGE, RECORD
    from penstock.compress.run import compress as run

    require_folder(config.output)
    report = run(config, lambda words: print(words, file=sys.stderr, flush=True))
    output = Path(config.output)
    written = f"\nWritten: {output / 'export'}, {output / PAGE} and {output / RECORD}"
    show(filter(None, [cuts_table(report), table(report), written]))
