"""Folders that the steps of a compression read and write."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from penstock.config.compress import Prune
from penstock.leftovers import temporary
from penstock.models.convert import save_pretrained
from penstock.models.convert.files import read_json
from penstock.models.convert.hub import local_weights
from penstock.models.model import Model

BESIDE_MODEL = (
    "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "id2label", "label2id", "labels",
    "labels_in_prompts",
)  # fmt: skip
"""Entries of a config.json that are no sizes of the model."""
POOLING = "1_Pooling"
"""The folder in which sentence-transformers says how a text's vector is made."""


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
    """Write a model with the files that stand beside another one's weights: its tokenizer's, and what its config.json
    says besides sizes."""
    source = local_weights(source)
    with temporary(None, "penstock-beside-") as beside:
        for file in source.iterdir():
            if (
                file.is_file()
                and file.name not in ("config.json", "README.md")
                and "safetensors" not in file.name
            ):
                shutil.copyfile(file, beside / file.name)
        told = {
            name: value for name, value in read_json(source / "config.json").items() if name in BESIDE_MODEL
        }
        (beside / "config.json").write_text(json.dumps(told), encoding="utf-8")
        save_pretrained(model, target, beside=beside)
        if (source / POOLING).is_dir():
            shutil.copytree(source / POOLING, target / POOLING, dirs_exist_ok=True)
