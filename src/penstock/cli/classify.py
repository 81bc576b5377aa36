"""`penstock classify`: classes of texts or images."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from penstock.boundary.files import printable, write_text
from penstock.cli._app import configured
from penstock.cli._options import JsonLines
from penstock.cli.generate import input_texts
from penstock.config.decoding import EncodeConfig
from penstock.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from penstock.infer.predictions import ClassPrediction

_FILE = "Read texts, or paths of images, from this file, one per line."
_COLUMNS = "Column of a table to read; for pairs of texts two, as first,second."
_SECONDS = 10.0
"""Time between two lines of progress where there is no terminal."""


@configured(EncodeConfig, positional="model")
def classify(
    config: EncodeConfig,
    *inputs: Annotated[str, Parameter(allow_leading_hyphen=False, help="Texts or tables; images or folders.")],
    file: Annotated[Path | None, Parameter(help=_FILE)] = None,
    as_json: JsonLines = False,
    output: Annotated[Path | None, Parameter(help="Write predictions to this file: .csv, .jsonl or .json.")] = None,
    columns: Annotated[str, Parameter(help=_COLUMNS)] = "",
) -> int:  # fmt: skip
    """Classify texts or images with a trained model.

    INPUTS are texts, or tables of them (CSV, TSV, JSON lines, Parquet); for a ViT images, or folders of them. They come
    from the command line, from --file, or from a pipe, one per line. Each line that is printed is the likeliest class,
    its probability, and the input. What cannot be read is reported, counted, and written with the reason; the exit code
    is then 4.

        penstock classify runs/digits photo.png --json
        penstock classify runs/flowers photos/ --output predictions.csv
    """
    from penstock.infer.predictions import expand_inputs, predict, require_format, written

    model, sources = config.named("classify"), input_texts(inputs, file)
    if output is not None:
        require_format(output)
        if any(Path(source) == output for source in sources):
            raise ConfigError(f"--output is {output}, which is also an input; name another file.")
    from penstock.infer.encode import Classifier

    classifier = Classifier(model, **config.options)
    wanted = tuple(filter(None, columns.split(",")))
    every = expand_inputs(sources, images=classifier.reads_images, columns=wanted)
    records, failed = list[dict[str, Any]](), 0
    for prediction in _with_progress(predict(classifier, every), len(every), shown=output is not None):
        record = prediction.record(classifier.classes)
        if prediction.answer is None:
            failed += 1
            problem = f"{printable(prediction.where)}: {printable(prediction.problem)}"
            print(f"penstock: {problem}", file=sys.stderr)
        if output is not None:
            records.append(record)
        elif as_json:
            print(json.dumps(record))
        elif prediction.answer is not None:
            answer = prediction.answer
            print(f"{answer.label}\t{answer.probability:.4f}\t{prediction.where}")
    if output is not None:
        write_text(output, written(records, output))
        print(f"{len(every) - failed:,} predictions in {output}")
    if failed:
        print(f"penstock: {failed:,} of {len(every):,} inputs could not be read.", file=sys.stderr)
    return int(ExitCode.DATA if failed else ExitCode.DONE)


def _with_progress(
    predictions: Iterator[ClassPrediction], total: int, *, shown: bool
) -> Iterator[ClassPrediction]:
    """Yield the predictions unchanged, and show progress on stderr: a bar on a terminal, otherwise a line now and
    then."""
    from rich.console import Console
    from rich.progress import track

    if shown and sys.stderr.isatty():
        yield from track(predictions, "classify", total, console=Console(stderr=True), transient=True)
        return
    reported = time.monotonic()
    for number, prediction in enumerate(predictions, 1):
        yield prediction
        if shown and time.monotonic() - reported > _SECONDS:
            print(f"{number:,} of {total:,}", file=sys.stderr, flush=True)
            reported = time.monotonic()
