"""The card of a trained model, README.md of its export: its data, recipe, Plan and metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from penstock import __version__
from penstock.boundary.files import shown
from penstock.config.convert import word
from penstock.config.model import changes, title
from penstock.config.run import Recipe, RunConfig
from penstock.config.tasks import TASKS, task_name
from penstock.tasks import task_of
from penstock.train.evaluate import Evaluation

_HUB = re.compile(r"[\w.-]+/[\w.-]+")


def card(
    config: RunConfig, evaluation: Evaluation | None, *, steps: int, data: str, parameters: int, machine: str
) -> str:
    """Markdown with the hub's header: model, data, recipe, Plan and metrics of a run of `steps` steps, and a reminder
    to add uses and limitations. `data` describes the training data in words, `machine` is the machine's name."""
    task = task_of(config.model, config.task, init_from=config.reads_like)
    base = config.init_from or ""
    head = {
        "library_name": "penstock",
        "tags": ["penstock"],
        "pipeline_tag": TASKS[task_name(config.model, config.task)].tag,
        "base_model": on_hub(base),
    }
    recipe = " ".join(f"{name} {word(value)}" for name, value in changes(Recipe(), config.recipe))
    rows = {
        "model": f"{title(config.model)}, {parameters:,} parameters", "from": base and shown(base),
        "data": data, "steps": f"{steps:,} of {config.plan.global_batch} samples, seed {config.seed}",
        "recipe": recipe or "the defaults", "Plan": f"`{config.plan.line()}`", "machine": machine,
    }  # fmt: skip
    table = "\n".join(f"| {name} | {_cell(value)} |" for name, value in rows.items() if value)
    result = "The data had no validation split."
    if evaluation is not None:
        result = f"On {evaluation.samples:,} validation {task.unit}: {task.describe(evaluation.metrics)}."
    text = f"""\
Trained with Penstock {__version__}. `penstock train --config run.toml` repeats it, with the run's run.toml.

| | |
|---|---|
{table}

{result}
"""
    return page(head, title(config.model), text)


def on_hub(name: str) -> str | None:
    """Name of the hub repository that weights came from; None for a folder."""
    return name if _HUB.fullmatch(name) and not Path(name).exists() else None


def page(head: dict[str, Any], name: str, text: str) -> str:
    """A model's card, with the hub's header and how to open the model."""
    front = "\n".join(f"{key}: {json.dumps(value)}" for key, value in head.items() if value)
    return f"""\
---
{front}
---

# {name}

{text}
```python
from penstock import from_pretrained

model = from_pretrained("path of this folder")
```

Its author should add here what the model is for, what it must not be used for, and the licences of its data.
"""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
