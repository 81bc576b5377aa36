"""Folders that the steps of a compression read and write."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.config.compress import Prune
from penstock.models.convert.hub import local_weights
from penstock.models.convert.pretrained import save_values
from penstock.models.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCall:
    """One call of a step."""

    source: Path
    """Folder of the model that is read."""
    target: Path
    """Folder that is written; what an interrupted call left there is gone on from, or written again."""
    original: Path
    """Folder of the model that is compressed, which teaches."""
    prune: Prune
    """Shares that this call removes of the model in `source`."""


def save_beside(model: Model, source: Path, target: Path) -> None:
    """Write a model with the files beside another model's weights: its tokenizer's, and what its config.json
    says besides sizes."""
    save_values(model, target, source=local_weights(source))
