"""The settings of an evaluation: which model, and the labelled data that it is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from penstock.boundary.files import shown
from penstock.config.compress import CompressConfig
from penstock.config.convert import Checked, Count, Device, FilledText, Positive
from penstock.config.load import from_dict, load, read_file
from penstock.config.run import DataConfig, RunConfig
from penstock.config.tasks import TaskName
from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateConfig(Checked):
    """One evaluation."""

    model: FilledText | None = None
    """A run's folder or its export, a checkpoint, a folder that transformers wrote, or a name on the Hugging Face
    hub."""
    data: DataConfig = field(default_factory=DataConfig)
    """Labelled data, as in `penstock train`; by default those of the run, if the model comes from one."""
    split: Literal["val", "train", "all"] = "val"
    """Which samples are read. Data without a split have every fifth sample in `val`; `all` reads both parts."""
    task: TaskName = "auto"
    """Task whose metrics are computed; `auto` is that of the run, or of the model."""
    batch: Count = 32
    """Samples of a forward pass."""
    device: Device = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    reference: FilledText | None = None
    """Weights that training by preferences started from (its init_from); by default those of the model's run."""
    preference_beta: Positive = 0.1
    """β of the margins of preferences; by default the run's, if the model comes from one."""


def load_evaluation(
    cls: type[Any] = EvaluateConfig, *, file: Path | str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> EvaluateConfig:  # fmt: skip
    """An evaluation from general defaults, then the run or compression that made the model, then `file`, then
    `overrides`. Raises ConfigError as `penstock.config.load.load` does, and if no data are named."""
    stored = read_file(file) if file is not None else {}
    model: Any = (overrides or {}).get("model", stored.get("model"))
    job = _of_job(Path(model)) if isinstance(model, str) and Path(model).exists() else None
    loaded: EvaluateConfig = load(
        cls, file=file, stored=stored, overrides=overrides, base=job or EvaluateConfig()
    )
    if job is None and loaded.model is not None and loaded.data.source == "auto":
        raise ConfigError(
            f"No data are named to evaluate {shown(loaded.model)} on; name labelled data, such as --data "
            "imagefolder:PATH or --data text:FILE.csv (--data digits for the embedded ones)."
        )
    return loaded


def _of_job(path: Path) -> EvaluateConfig | None:
    """Settings of the run or compression that a folder, export or checkpoint belongs to; None for other paths."""
    for folder in (path, *path.absolute().parents[:2]):
        if (file := folder / "run.toml").is_file():
            run = from_dict(RunConfig, read_file(file), origin=str(file))
            return EvaluateConfig(
                data=run.data, task=run.task, reference=run.init_from if run.task == "preferences" else None,
                preference_beta=run.recipe.preference_beta,
            )  # fmt: skip
    for file in (path / "compress.toml", path / "export" / "compress.toml"):
        if file.is_file():
            job = from_dict(CompressConfig, read_file(file), origin=str(file))
            return EvaluateConfig(data=job.data, task=job.task)
    return None
