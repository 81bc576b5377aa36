"""Weights by their name on the Hugging Face hub, through huggingface_hub's cache."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.errors import ConfigError, EnvironmentProblem

_NAME = re.compile(r"^(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?$")
_FILES = (
    "config.json", "*.safetensors", "*.safetensors.index.json",
    "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.spm", "*.model",
)  # fmt: skip
OFFLINE = (
    "Fetch it where there is a network, with `hf download {name}`, and set HF_HOME to a copy of that cache; or give a "
    "folder with its files."
)


def local_weights(source: str | Path) -> Path:
    """A path as it is; of a name on the hub (`google/vit-base-patch16-224`, with `@REVISION` if you like) the folder
    in the cache, to which it is fetched once. Only safetensors, config.json and a tokenizer's
    files are fetched.

    Raises:
        ConfigError: neither a path nor a model on the hub, or one without safetensors.
        EnvironmentProblem: there is no network, or the extra `hf` is missing.
    """
    path = Path(source)
    match = _NAME.match(str(source))
    if match is None or path.exists():
        return path
    hub = _hub(str(source))
    options = {"repo_id": match["repo"], "revision": match["revision"], "allow_patterns": list(_FILES)}
    folder = _cached(hub, options)
    return folder if folder is not None else _fetched(hub, options)


def _hub(name: str) -> object:
    try:
        import huggingface_hub
    except ImportError:
        raise EnvironmentProblem(
            f"There is no file or folder {name}. If it is a name on the Hugging Face hub, install what fetches it: "
            f"pip install 'penstock[hf]'."
        ) from None
    return huggingface_hub


def _cached(hub: object, options: dict[str, object]) -> Path | None:
    """The folder in the cache, without asking the network whether there is a newer one."""
    try:
        folder = Path(hub.snapshot_download(**options, local_files_only=True))  # type: ignore[attr-defined]
    except OSError:  # huggingface_hub's LocalEntryNotFoundError is one
        return None
    return folder if any(folder.glob("*.safetensors")) else None


def _fetched(hub: object, options: dict[str, object]) -> Path:
    """Fetch the files. A network that is not there is noticed at once, and one that is silent after ten seconds."""
    from huggingface_hub import errors

    name = str(options["repo_id"])
    try:
        folder = Path(hub.snapshot_download(**options, etag_timeout=10))  # type: ignore[attr-defined]
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        at = f" at the revision {options['revision']}" if options["revision"] else ""
        raise ConfigError(
            f"There is no file or folder {name}, and no such model on the Hugging Face hub{at}. Check the name; for a "
            f"private or gated one run `hf auth login` first."
        ) from error
    except (errors.HfHubHTTPError, OSError) as error:
        raise EnvironmentProblem(
            f"{name} is not in the cache of the Hugging Face hub ({_home()}), and cannot be fetched: "
            f"{_reason(error)}. {OFFLINE.format(name=name)}"
        ) from error
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"{name} on the Hugging Face hub has no safetensors, and other formats can run code when they are read. "
            f"Convert it with transformers: save_pretrained writes safetensors."
        )
    return folder


def _home() -> str:
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)


def _reason(error: BaseException) -> str:
    """What lies at the bottom of a chain of exceptions, in one line."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
