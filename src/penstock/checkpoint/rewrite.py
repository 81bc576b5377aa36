"""The weights of checkpoints, or their mean, as Hugging Face folders."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from penstock.checkpoint.commit import steps
from penstock.checkpoint.reader import Checkpoint, open_verified
from penstock.checkpoint.storage import write_json
from penstock.config.load import from_dict
from penstock.config.removed import without_removed
from penstock.config.run import RunConfig
from penstock.errors import CheckpointError, ConfigError
from penstock.tensorfile import SHARD_BYTES, Pending, pending, write_model, write_tensors

_log = logging.getLogger(__name__)


def folder_beside(run: Path, tokenizer: bool | None = None) -> Path:
    """The folder in a run with the files that its exports get besides weights (see `save_pretrained`): `tokenizer`, or
    for runs without a tokenizer `names`, with class names. By default the folder that exists."""
    if tokenizer is None:
        tokenizer = (run / "tokenizer").is_dir()
    return run / ("tokenizer" if tokenizer else "names")


def candidates(path: Path, *, step: int | None = None) -> list[Path]:
    """The checkpoint directories that `path` refers to, newest first: itself, those in a folder, or those of a run.
    Raises ConfigError if there is none."""
    for folder in (path, path / "checkpoints"):
        matching = [n for n in reversed(steps(folder)) if step in (None, n)]
        if matching:
            return [folder / f"step-{n}" for n in matching]
    here = path.absolute()  # `.` has no name
    if step is None and here.name in {f"step-{n}" for n in steps(here.parent)}:
        return [here]
    missing = "checkpoint" if step is None else f"step-{step}"
    raise ConfigError(
        f"There is no {missing} in {path}. Give a directory step-N, a folder of them, or the output folder of a run."
    )


def open_newest(path: Path, *, step: int | None = None) -> Checkpoint:
    """Open the newest of the `candidates` that verifies. Refused ones are logged and stay where they are. Raises
    CheckpointError if none can be trusted, ConfigError if there is none."""
    *others, last = candidates(path, step=step)
    for candidate in others:
        try:
            return open_verified(candidate)
        except CheckpointError as problem:
            _log.warning("%s The checkpoint before it is used.", problem)
    return open_verified(last)


def weight_sets(checkpoint: Checkpoint) -> list[str]:
    """Names of the sets of weights in it: `weights`, and `ema` if an average was kept."""
    return list(checkpoint.document["weights"])


def read_weights(checkpoint: Checkpoint, which: str) -> dict[str, Tensor]:
    """One set of weights, whole and on the CPU, by parameter name. Averages lack integer tensors, such as biases of
    routers and weights in few bits; these are read from `weights`."""
    places = _places(checkpoint, which)
    read = checkpoint.read(dict.fromkeys(places.values()))
    return {name: read[place] for name, place in places.items()}


def _places(checkpoint: Checkpoint, which: str) -> dict[str, str]:
    """Names in the index of the tensors of one set of weights, by parameter name: see `read_weights`."""
    places = {name: f"{which}/{name}" for name in _names(checkpoint, which)}
    for name in checkpoint.document["weights"].get("weights", ()):
        if not checkpoint.index[f"weights/{name}"].torch_dtype.is_floating_point:
            places.setdefault(name, f"weights/{name}")
    return places


def export_plain(
    checkpoint: Checkpoint, folder: Path, which: str, *, shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Write one set of weights under its own names in Hugging Face's file layout, with one tensor at a time in memory.

    Returns the files. Raises ConfigError if there is no such set, and as `penstock.tensorfile.write_model`.
    """

    def tensor(name: str) -> Pending:
        place = f"{which}/{name}"
        entry = checkpoint.index[place]
        return Pending(name, entry.torch_dtype, entry.shape, lambda: checkpoint.read({place: None})[place])

    tensors = map(tensor, _names(checkpoint, which))
    return write_model(folder, tensors, shard_bytes=shard_bytes)


def export_model(
    checkpoint: Checkpoint,
    folder: Path,
    which: str,
    *,
    state: Mapping[str, Tensor] | None = None,
    shard_bytes: int = SHARD_BYTES,
    branch: str | None = None,
) -> None:
    """Write a Hugging Face folder: one set of weights, or `state` instead, the model's configuration, and the run's
    tokenizer; `branch` selects one branch of a model with several. All the weights are in memory. Raises ConfigError if
    there is no such set, CheckpointError if the weights do not fit the model in the checkpoint's settings."""
    from penstock.models import create
    from penstock.models.convert import branch_of, fitted, require_as_large, require_theirs, save_pretrained
    from penstock.models.lora import merged
    from penstock.models.rounded import without_clips

    config = _settings(checkpoint)
    places = _places(checkpoint, which)
    elements = sum(  # packed weights of 4 bits: two in each byte
        math.prod(checkpoint.index[place].shape) * (1 + (f"{name}_offset" in places))
        for name, place in places.items()
    )
    where, remedy = f"config.json of {checkpoint.path}", "Export them with --names plain."
    require_as_large(config.model, elements, where, error=CheckpointError, remedy=remedy)
    with torch.device("meta"):
        model = create(config.model)
    try:
        held = merged(state or read_weights(checkpoint, which), config.recipe.lora, model)
        held, clips = without_clips(held)
        weights, _ = fitted(model, held)
        weights |= clips
    except ConfigError as problem:
        raise CheckpointError(
            f"The weights '{which}' of {checkpoint.path} are not those of the model that its configuration describes "
            f"({problem}); export them with --names plain."
        ) from problem
    beside = folder_beside(checkpoint.path.parent.parent)
    if branch is not None:
        branch_config, weights = branch_of(config.model, branch, weights)
        require_theirs(branch_config)
        model = create(branch_config, device="meta")
    save_pretrained(model, folder, weights=weights, beside=beside, shard_bytes=shard_bytes)


def export_adapter(checkpoint: Checkpoint, folder: Path, which: str) -> None:
    """Write only the adapters of one set of weights, for peft (`PeftModel.from_pretrained`).

    Raises ConfigError if the run has no adapters, if other weights were trained too, or if there is no such set.
    """
    from penstock.models import create
    from penstock.models.convert.adapter import adapter_files
    from penstock.models.lora import gives_classes

    config = _settings(checkpoint)
    lora = config.recipe.lora
    if not lora.rank:
        raise ConfigError(
            f"{checkpoint.path} has no adapters, because recipe.lora.rank was 0; export it without --adapter."
        )
    if lora.trained_parts or gives_classes(create(config.model, device="meta")):
        raise ConfigError(
            f"{checkpoint.path} has learned more than its adapters: {', '.join(lora.trained_parts) or 'its head'}; "
            "export the whole model, without --adapter."
        )
    places = {name: f"{which}/{name}" for name in _names(checkpoint, which) if ".lora_" in name}
    read = checkpoint.read(dict.fromkeys(places.values()))
    tensors, values = adapter_files(
        {name: read[place] for name, place in places.items()}, config.model, lora, config.init_from
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / "adapter_model.safetensors", pending(tensors), {"format": "pt"})
    write_json(folder / "adapter_config.json", values)


def _settings(checkpoint: Checkpoint) -> RunConfig:
    """The settings of the run that saved the checkpoint."""
    origin = f"the checkpoint {checkpoint.path}"
    return from_dict(RunConfig, without_removed(checkpoint.config), origin=origin)


def _names(checkpoint: Checkpoint, which: str) -> list[str]:
    sets: Mapping[str, list[str]] = checkpoint.document["weights"]
    if which not in sets:
        raise ConfigError(f"{checkpoint.path} has no weights '{which}'; it has {', '.join(sets)}.")
    return list(sets[which])


def average(checkpoints: Sequence[Checkpoint], which: str = "weights") -> dict[str, Tensor]:
    """The mean of each weight in fp32: summed and divided in fp64, and rounded once. Besides the sums, with 8 bytes per
    weight, one set is in memory. Integer tensors, such as frozen weights in few bits, are the last checkpoint's. Raises
    ConfigError if the checkpoints are of different models, or have no such set.

    (Izmailov et al., "Averaging Weights Leads to Wider Optima", UAI 2018; Vaswani et al., NeurIPS 2017, section 6.1.)
    """
    sums: dict[str, Tensor] = {}
    for checkpoint in checkpoints:
        weights = read_weights(checkpoint, which)
        shapes, others = ({name: each.shape for name, each in held.items()} for held in (weights, sums))
        if sums and shapes != others:
            raise ConfigError(
                f"{checkpoint.path} holds another model than {checkpoints[0].path}, so they have no mean."
            )
        for name, tensor in weights.items():
            sums[name] = sums.get(name, 0) + tensor.double() if tensor.is_floating_point() else tensor
    return {
        name: total.div_(len(checkpoints)).float() if total.is_floating_point() else total
        for name, total in sums.items()
    }


def export_average(path: Path, folder: Path, *, count: int, which: str = "weights") -> list[Checkpoint]:
    """Write the mean of the `count` newest checkpoints in `path` as a Hugging Face folder; return these checkpoints,
    oldest first. Raises ConfigError if there are fewer, CheckpointError if one of them cannot be trusted."""
    if count < 2:
        raise ConfigError(f"--last is {count}, but a mean is of 2 checkpoints or more.")
    saved = candidates(path)
    if len(saved) < count:
        raise ConfigError(
            f"{path} has {len(saved)} checkpoint{'' if len(saved) == 1 else 's'}, but --last is {count}. "
            f"Train with --keep {count}."
        )
    checkpoints = [open_verified(each) for each in reversed(saved[:count])]
    export_model(checkpoints[-1], folder, which, state=average(checkpoints, which))
    return checkpoints
