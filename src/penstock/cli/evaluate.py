"""`penstock evaluate`: all metrics of a trained model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from penstock.boundary.files import write_text
from penstock.cli._app import configured
from penstock.cli._options import Json
from penstock.config.evaluate import EvaluateConfig, load_evaluation


@configured(EvaluateConfig, positional="model", loader=load_evaluation)
def evaluate(
    config: EvaluateConfig,
    *,
    as_json: Annotated[Json, Parameter(help="Print one JSON object.")] = False,
    report: Annotated[Path | None, Parameter(help="Write a page (HTML) to this file.")] = None,
) -> None:
    """Measure a trained model: every metric of its task.

    For classes these are accuracy, precision, recall and F1 of each, and the confusion matrix; for texts perplexity,
    chrF and BLEU; for preferences the share of pairs won. The data set is the run's, unless --data names
    another, whose classes are matched by name.

        penstock evaluate runs/digits
        penstock evaluate runs/flowers --data imagefolder:/data/other --split all
    """
    from rich.text import Text

    from penstock.cli._display import Part, show
    from penstock.train.evaluate import evaluate_folder
    from penstock.train.evaluation_page import as_json as values_of
    from penstock.train.evaluation_page import classes_section, confusion_section, to_html

    result = evaluate_folder(config)
    values = values_of(result)
    if report is not None:
        write_text(report, to_html(result))
    if as_json:
        print(json.dumps(values))
        return
    parts: list[Part] = [
        f"{result.model}, from {result.weights}", f"{values['samples']:,} {values['unit']} of {result.data}",
        Text(result.task.describe(values["metrics"]), style="bold"),
    ]  # fmt: skip
    tables = [classes_section(values["classes"])] if "classes" in values else []
    for section in filter(None, [*tables, confusion_section(values)]):
        parts += [Text(f"\n{section.title}", style="bold"), section]
    parts += [f"\n{result.sample}"] if result.sample else []
    parts += [f"\nWritten: {report}"] if report is not None else []
    show(parts)
