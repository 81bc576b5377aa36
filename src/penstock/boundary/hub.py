"""The Hugging Face hub: files by a name there, through huggingface_hub's cache."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.boundary.files import quoted, shown
from penstock.boundary.packages import package
from penstock.errors import ConfigError, EnvironmentProblem

_NAME = re.compile(r"^(?P<repo>[\w.-]+(/[\w.-]+)?)(@(?P<revision>[\w./-]+))?$")
_OWNED = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_MODEL_FILES = (
    "config.json", "generation_config.json", "1_Pooling/config.json", "*.safetensors", "*.safetensors.index.json",
    "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "target_vocab.json", "merges.txt",
    "*.spm", "*.model",
)  # fmt: skip
OFFLINE = (
    "If you mean a folder, check its path; a run's folder is there once `penstock train` has made it. If you mean a "
    "name on the hub, fetch it where there is a network, with `hf download {name}`, and set HF_HOME to a copy of that "
    "cache."
)


def hub_folder(name: str, files: Sequence[str], *, enough: Callable[[Path], bool]) -> Path | None:
    """The cache folder with the `files` (names or patterns) of a model on the hub, downloaded once. `name` is like
    `google/vit-base-patch16-224`, optionally with `@REVISION`. None where the folder does not hold `enough`.

    Raises:
        ConfigError: there is no such name on the hub. EnvironmentProblem: there is no network, or the extra `hf` is
            missing.
    """
    match = _NAME.match(name)
    if match is None:
        raise ConfigError(
            f"There is no file or folder {quoted(name)}, nor can that be a name on the Hugging Face hub."
        )
    need = f"There is no file or folder {name}. If it is a name on the Hugging Face hub, huggingface_hub fetches it"
    hub = package("huggingface_hub", need, "hf")
    options = {"repo_id": match["repo"], "revision": match["revision"], "allow_patterns": list(files)}
    folder = _cached(hub, options, enough) or _fetched(hub, options)
    return folder if enough(folder) else None


def local_weights(source: str | Path) -> Path:
    """The folder of weights that a path or a name means: a path itself, the export of a run's folder, or for a name on
    the hub (`google/vit-base-patch16-224`, optionally with `@REVISION`) the cache folder, into which it is downloaded
    once. Only safetensors, configurations and a tokenizer's files are downloaded.

    Raises:
        ConfigError: `source` is neither a path nor a model on the hub, has no safetensors, or is a checkpoint.
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
    if path.exists() or not _OWNED.fullmatch(str(source)):
        return path
    folder = hub_folder(str(source), _MODEL_FILES, enough=lambda folder: any(folder.glob("*.safetensors")))
    if folder is None:
        raise ConfigError(
            f"{source} on the Hugging Face hub has no safetensors, and other formats can run code when they are read. "
            f"Convert it with transformers: save_pretrained writes safetensors."
        )
    return folder


def _cached(hub: Any, options: dict[str, object], enough: Callable[[Path], bool]) -> Path | None:
    """The folder in the cache, without asking the network whether there is a newer one."""
    try:
        folder = Path(hub.snapshot_download(**options, local_files_only=True))
    except OSError:  # huggingface_hub's LocalEntryNotFoundError is one
        return None
    return folder if enough(folder) else None


def _fetched(hub: Any, options: dict[str, object]) -> Path:
    """Download the files. A missing network is noticed at once, and a silent one after ten seconds."""
    from huggingface_hub import constants, errors

    name = str(options["repo_id"])
    try:
        return Path(hub.snapshot_download(**options, etag_timeout=10))
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        at = f" at the revision {options['revision']}" if options["revision"] else ""
        raise ConfigError(
            f"There is no file or folder {name}, and no such name on the Hugging Face hub{at}.{_alike(name)} Check the "
            f"name; for a private or gated model run `hf auth login` first."
        ) from error
    except (errors.HfHubHTTPError, OSError) as error:
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _root_cause(error)
        raise EnvironmentProblem(
            f"There is no folder {name}.{_alike(name)} As a name on the Hugging Face hub it is not in the cache "
            f"({constants.HF_HUB_CACHE}), and cannot be fetched: {reason}. {OFFLINE.format(name=name)}"
        ) from error


def _alike(name: str) -> str:
    """A hint such as ` Did you mean runs/digits?` where a similar path exists; else an empty string."""
    path = Path(name)
    neighbours = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, neighbours, n=1)
    return f" Did you mean {shown(path.parent / near[0])}?" if near else ""


def _root_cause(error: BaseException) -> str:
    """The root cause of a chain of exceptions, in one line."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
