"""Checkpoints rewritten for another number of ranks, and their weights as Hugging Face folders."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from penstock.checkpoint.commit import make_empty, publish, remove, steps, write_manifest
from penstock.checkpoint.index import Chunk, Entry, file_name, to_json
from penstock.checkpoint.manifest import INDEX, Manifest, verify
from penstock.checkpoint.reader import Checkpoint, open_verified, read_json
from penstock.checkpoint.snapshot import LOCAL, Piece
from penstock.checkpoint.storage import read_pieces, write_chunks, write_json
from penstock.config.convert import Ranks, require
from penstock.disk import Written
from penstock.errors import CheckpointError, ConfigError, EnvironmentProblem
from penstock.report.record import versions
from penstock.tensorfile import SHARD_BYTES, Pending, pending, write_model, write_tensors

_log = logging.getLogger(__name__)

_BESIDE = ("names", "tokenizer")


def folder_beside(run: Path, tokenizer: bool | None = None) -> Path:
    """Folder of a run with what its exports hold besides weights (see `save_pretrained`): a `tokenizer` and names, or
    `names` of classes alone. Without `tokenizer` it is the one that the run has."""
    return run / _BESIDE[(run / _BESIDE[1]).is_dir() if tokenizer is None else tokenizer]


def candidates(path: Path, *, step: int | None = None) -> list[Path]:
    """The checkpoint directories that `path` names, the newest first: itself, those in a folder of them, or a run's.

    Raises:
        ConfigError: there is none.
    """
    for folder in (path, path / "checkpoints"):
        matching = [n for n in reversed(steps(folder)) if step in (None, n)]
        if matching:
            return [folder / f"step-{n}" for n in matching]
    if step is None and path.name in {f"step-{n}" for n in steps(path.parent)}:
        return [path]
    missing = "checkpoint" if step is None else f"step-{step}"
    raise ConfigError(
        f"There is no {missing} in {path}. Give a directory step-N, a folder of them, or the output folder of a run."
    )


def open_newest(path: Path, *, step: int | None = None) -> Checkpoint:
    """The newest of the `candidates` that verifies. Each one that is refused is logged, and stays where it is.

    Raises:
        CheckpointError: none can be trusted. ConfigError: there is none.
    """
    *others, last = candidates(path, step=step)
    for candidate in others:
        try:
            return open_verified(candidate)
        except CheckpointError as problem:
            _log.warning("%s The checkpoint before it is taken.", problem)
    return open_verified(last)


def convert(source: Path | Checkpoint, target: Path, *, ranks: int = 1) -> Path:
    """Write the checkpoint (or its directory) `source` into the folder `target` as `ranks` ranks would save it now.

    One rank gives one file per set, each tensor whole; more ranks split every tensor along its first dimension, as FSDP
    does. Any number of ranks can read either, so this is for moving and sharing, and for speed where a rank should read
    one file. One tensor at a time is in memory. A rank's own state (its random generators) is kept only if the number
    of ranks stays the same.

    Raises:
        CheckpointError: `source` is refused. EnvironmentProblem: the disk has too little room or fails.
        ConfigError: `ranks` is below 1, or the target exists already.
    """
    require("ranks", ranks, Ranks)
    checkpoint = source if isinstance(source, Checkpoint) else open_verified(source)
    source = checkpoint.path
    final, temporary = target / source.name, target / f"{source.name}.tmp"
    if final.exists():
        raise ConfigError(f"{final} exists already; give another folder, or remove it.")
    try:
        make_empty(temporary, checkpoint.manifest.bytes)
        files = _rewritten(checkpoint, temporary, ranks)
        write_manifest(temporary, Manifest(checkpoint.step, checkpoint.plan, versions(), files, ranks))
        publish(temporary, final)
    except OSError as problem:
        remove(temporary)
        raise EnvironmentProblem(
            f"{final} could not be written: {problem}. {source} is untouched; free space, then convert again."
        ) from problem
    verify(final)
    return final


def _rewritten(checkpoint: Checkpoint, folder: Path, ranks: int) -> dict[str, Written]:
    same = ranks == checkpoint.world
    index: dict[str, Entry] = {}
    for name, entry in checkpoint.index.items():
        if not name.startswith(f"{LOCAL}/"):
            index[name] = replace(entry, chunks=tuple(_split(entry.shape, ranks)))
        elif same:
            index[name] = entry
    files = write_chunks(folder, index, ranks, partial(_fetch, checkpoint))
    documents = {INDEX: to_json(index), "state.json": checkpoint.document, "config.json": checkpoint.config}
    if same:
        local = (file_name(LOCAL, rank, ranks, "json") for rank in range(ranks))
        documents |= {
            name: read_json(checkpoint.path / name) for name in local if name in checkpoint.manifest.files
        }
    return files | {name: write_json(folder / name, content) for name, content in documents.items()}


def _split(shape: tuple[int, ...], ranks: int) -> Iterator[Chunk]:
    """Boxes along the first dimension, as torch.chunk cuts. Rank 0 gets what cannot be cut."""
    rows = shape[0] if shape and min(shape) > 0 else 0
    if rows < 2 or ranks == 1:
        yield Chunk(0, (0,) * len(shape), shape)
        return
    step = -(-rows // ranks)
    for rank, start in enumerate(range(0, rows, step)):
        yield Chunk(rank, (start, *(0,) * (len(shape) - 1)), (min(step, rows - start), *shape[1:]))


def _fetch(checkpoint: Checkpoint, name: str, chunk: Chunk) -> Tensor:
    entry = checkpoint.index[name]
    values = torch.empty(chunk.sizes, dtype=entry.torch_dtype)
    piece = Piece(values, torch.Size(entry.shape), torch.Size(chunk.offsets))
    read_pieces(checkpoint.path, {name: entry}, checkpoint.world, {name: [piece]})
    return values


def weight_sets(checkpoint: Checkpoint) -> list[str]:
    """The sets of weights it holds: `weights`, and `ema` where there was an average."""
    return list(checkpoint.document["weights"])


def read_weights(checkpoint: Checkpoint, which: str) -> dict[str, Tensor]:
    """One set of weights, whole and on the CPU, by parameter name. Averages have no whole numbers, as the biases of
    routers and weights in few bits: these are those of the weights."""
    places = _places(checkpoint, which)
    read = checkpoint.read(dict.fromkeys(places.values()))
    return {name: read[place] for name, place in places.items()}


def _places(checkpoint: Checkpoint, which: str) -> dict[str, str]:
    """Where the tensors of one set of weights are in the index, by parameter name: see `read_weights`."""
    places = {name: f"{which}/{name}" for name in _names(checkpoint, which)}
    for name in checkpoint.document["weights"].get("weights", ()):
        if not checkpoint.index[f"weights/{name}"].torch_dtype.is_floating_point:
            places.setdefault(name, f"weights/{name}")
    return places


def export_plain(
    checkpoint: Checkpoint, folder: Path, which: str, *, shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Write one set of weights in its own names as Hugging Face lays files out; one tensor at a time is in memory.

    Returns the files. Raises ConfigError where there is no such set, and as `penstock.tensorfile.write_model`.
    """
    names = _names(checkpoint, which)
    return write_model(folder, _whole(checkpoint, which, names), shard_bytes=shard_bytes)


def export_model(
    checkpoint: Checkpoint,
    folder: Path,
    which: str,
    *,
    state: Mapping[str, Tensor] | None = None,
    shard_bytes: int = SHARD_BYTES,
    branch: str | None = None,
) -> None:
    """Write one set of weights, or `state` in their place, and the model's configuration, as a Hugging Face folder,
    and the tokenizer that the checkpoint's run has; of a model with several branches, one alone. The set is in memory
    as a whole.

    Raises:
        ConfigError: no such set. CheckpointError: they are not of the model that the checkpoint's settings describe.
    """
    from penstock.config.load import from_dict
    from penstock.config.removed import without_removed
    from penstock.config.run import RunConfig
    from penstock.models import create
    from penstock.models.convert import branch_of, fitted, require_as_large, require_theirs, save_pretrained
    from penstock.models.lora import merged
    from penstock.models.rounded import without_clips

    config = from_dict(
        RunConfig, without_removed(checkpoint.config), origin=f"the checkpoint {checkpoint.path}"
    )
    places = _places(checkpoint, which)
    elements = sum(  # of 4 bits two in each byte
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
        alone, weights = branch_of(config.model, branch, weights)
        require_theirs(alone)
        model = create(alone, device="meta")
    save_pretrained(model, folder, weights=weights, beside=beside, shard_bytes=shard_bytes)


def export_adapter(checkpoint: Checkpoint, folder: Path, which: str) -> None:
    """Write the adapters of one set of weights alone, as peft reads them (`PeftModel.from_pretrained`).

    Raises ConfigError where the run has no adapters, or more than they learned, and where there is no such set.
    """
    from penstock.config.load import from_dict
    from penstock.config.removed import without_removed
    from penstock.config.run import RunConfig
    from penstock.models import create
    from penstock.models.convert.adapter import adapter_files
    from penstock.models.lora import gives_classes

    config = from_dict(
        RunConfig, without_removed(checkpoint.config), origin=f"the checkpoint {checkpoint.path}"
    )
    lora = config.recipe.lora
    if not lora.rank:
        raise ConfigError(
            f"{checkpoint.path} has no adapters, because recipe.lora.rank was 0; export it without --adapter."
        )
    if lora.also or gives_classes(create(config.model, device="meta")):
        raise ConfigError(
            f"{checkpoint.path} has learned more than its adapters: {', '.join(lora.also) or 'its head'}; export the "
            "whole model, without --adapter."
        )
    places = {name: f"{which}/{name}" for name in _names(checkpoint, which) if ".lora_" in name}
    read = checkpoint.read(dict.fromkeys(places.values()))
    tensors, values = adapter_files(
        {name: read[place] for name, place in places.items()}, config.model, lora, config.init_from
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / "adapter_model.safetensors", pending(tensors), {"format": "pt"})
    write_json(folder / "adapter_config.json", values)


def _names(checkpoint: Checkpoint, which: str) -> list[str]:
    sets: Mapping[str, list[str]] = checkpoint.document["weights"]
    if which not in sets:
        raise ConfigError(f"{checkpoint.path} has no weights '{which}'; it has {', '.join(sets)}.")
    return list(sets[which])


def _whole(checkpoint: Checkpoint, which: str, names: Sequence[str]) -> Iterator[Pending]:
    for name in names:
        entry = checkpoint.index[f"{which}/{name}"]
        chunk = Chunk(0, (0,) * len(entry.shape), entry.shape)
        yield Pending(
            name, entry.torch_dtype, entry.shape, partial(_fetch, checkpoint, f"{which}/{name}", chunk)
        )
