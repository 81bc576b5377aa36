"""Weights by their name on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.boundary.hub import hub_folder
from penstock.errors import ConfigError

_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_FILES = (
    "config.json", "generation_config.json", "1_Pooling/config.json", "*.safetensors", "*.safetensors.index.json",
    "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "target_vocab.json", "merges.txt",
    "*.spm", "*.model",
)  # fmt: skip


def local_weights(source: str | Path) -> Path:
    """A path as it is, or of a run's folder that of its export; of a name on the hub (`google/vit-base-patch16-224`,
    with `@REVISION` if you like) the folder in the cache, to which it is fetched once. Only safetensors, what says
    how to use them, and a tokenizer's files are fetched.

    Raises:
        ConfigError: neither a path nor a model on the hub, one without safetensors, or a checkpoint.
        EnvironmentProblem: there is no network, or the extra `hf` is missing.
    """
    path = Path(source)
    if not (path / "config.json").is_file() and (path / "export" / "config.json").is_file():
        return path / "export"
    if (path / "tensors.json").is_file() or any(path.glob("step-*/tensors.json")):
        raise ConfigError(
            f"{path} is a checkpoint, from which training goes on. Give the run's folder, or write its weights as a "
            f"model: penstock checkpoint export {path} FOLDER."
        )
    if any(path.glob("checkpoints/step-*/tensors.json")):
        raise ConfigError(
            f"{path} is a run that has not ended, and has no export. Train it to its end, or write its newest "
            f"checkpoint as a model: penstock checkpoint export {path} FOLDER."
        )
    if path.exists() or not _NAME.fullmatch(str(source)):
        return path
    folder = hub_folder(str(source), _FILES, enough=lambda folder: any(folder.glob("*.safetensors")))
    if folder is None:
        raise ConfigError(
            f"{source} on the Hugging Face hub has no safetensors, and other formats can run code when they are read. "
            f"Convert it with transformers: save_pretrained writes safetensors."
        )
    return folder
