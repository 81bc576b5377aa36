"""Checkpoints on the disk: found, verified, and read by any number of ranks, however many saved them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from penstock.checkpoint.commit import check, repair_latest, set_aside, steps
from penstock.checkpoint.coordinator import Coordinator, RankProblem, current_coordinator
from penstock.checkpoint.index import Entry, Index, file_name, index_of_whole_files, read_index
from penstock.checkpoint.manifest import Manifest, verify
from penstock.checkpoint.snapshot import LOCAL, Piece, Snapshot, piece_of
from penstock.checkpoint.storage import INDEX, read_pieces
from penstock.checkpoint.tree import unpack
from penstock.errors import CheckpointError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint directory that has been verified. Its tensors are read on demand."""

    path: Path
    manifest: Manifest
    index: Index
    document: Mapping[str, Any]
    config: Mapping[str, Any]

    @property
    def step(self) -> int:
        """The step it was saved at."""
        return self.manifest.step

    @property
    def plan(self) -> str:
        """The Plan's line."""
        return self.manifest.plan

    @property
    def world(self) -> int:
        """Ranks that saved it."""
        return self.manifest.world

    def load(
        self, like: Mapping[str, Tensor] | None = None, *, rank: int = 0, world: int | None = None
    ) -> Snapshot:
        """What it holds, for rank `rank` of `world` (default: as many as saved it).

        `like` maps the names of the model's parameters to the parameters. Whatever the checkpoint holds under such a
        name (a weight, its average, the optimizer's moments) in the parameter's shape is put where the parameter is:
        on its device and, for a DTensor, into a DTensor of the same placements, of which only this rank's part is
        read. Everything else, or all of it without `like`, is read whole to the CPU. Not collective.

        Raises:
            CheckpointError: a file cannot be read.
        """
        try:
            return self._load(like or {}, rank, world)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as problem:
            raise CheckpointError(
                f"Checkpoint {self.path} is refused: its state is malformed ({problem})."
            ) from problem

    def _load(self, like: Mapping[str, Tensor], rank: int, world: int | None) -> Snapshot:
        trees = {**self.document["state"], LOCAL: {}}
        local_file = file_name(LOCAL, rank, self.world, "json")
        if world in (None, self.world) and local_file in self.manifest.files:
            trees[LOCAL] = _read_json(self.path / local_file)
        sets = self.document["weights"]
        wanted = {f"{group}/{name}": like.get(name) for group, names in sets.items() for name in names}
        for group, tree in trees.items():
            found = _with_parameters(tree, like if group != LOCAL else {})
            wanted |= {f"{group}/{path}": parameter for path, parameter in found}
        read: dict[str, dict[str, Tensor]] = {group: {} for group in (*sets, *trees)}
        for name, tensor in self.read(wanted).items():
            group, _, path = name.partition("/")
            read[group][path] = tensor
        state = {group: unpack(tree, read[group]) for group, tree in trees.items()}
        local = state.pop(LOCAL)
        weights = {group: read[group] for group in sets}
        return Snapshot(self.step, weights, state, self.config, self.plan, local, self.world)

    def read(self, wanted: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Tensors by `set/name`, each on the device and with the placements of its model, if the shapes agree."""
        missing = sorted(wanted.keys() - self.index.keys())
        if missing:
            raise CheckpointError(
                f"Checkpoint {self.path} is refused: its files have no tensor '{missing[0]}'."
            )
        pieces, tensors = {}, {}
        for name, like in wanted.items():
            tensors[name], pieces[name] = _empty(self.index[name], like)
        read_pieces(self.path, self.index, self.world, pieces)
        return tensors


def _empty(entry: Entry, like: Tensor | None) -> tuple[Tensor, Piece]:
    """Memory for a tensor, or for this rank's part of it, and the piece through which it is filled."""
    dtype = entry.torch_dtype
    if like is None or tuple(like.shape) != entry.shape:
        whole = torch.empty(entry.shape, dtype=dtype)
        return whole, piece_of(whole)
    if not isinstance(like, DTensor):
        device = "cpu" if like.is_meta else like.device
        whole = torch.empty(entry.shape, dtype=dtype, device=device)
        return whole, piece_of(whole)
    part = like.to_local().detach()
    device = torch.device(like.device_mesh.device_type) if part.is_meta else part.device
    local = torch.empty(part.shape, dtype=dtype, device=device)
    tensor = DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=torch.empty(like.shape, device="meta").stride(),
    )
    return tensor, Piece(local, like.shape, piece_of(like).offsets)


def _with_parameters(
    tree: Any, like: Mapping[str, Tensor], parameter: Tensor | None = None
) -> Iterator[tuple[str, Tensor | None]]:
    """Every tensor that a document names, with the parameter whose state it is."""
    if isinstance(tree, list):
        for item in tree:
            yield from _with_parameters(item, like, parameter)
    elif isinstance(tree, dict):
        name = tree.get("$tensor", tree.get("$array"))
        if isinstance(name, str):
            yield name, parameter if "$tensor" in tree else None
            return
        numbered = {**like, **_numbered(tree, like)} if "param_groups" in tree else like
        for key, item in tree["$items"] if "$items" in tree else tree.items():
            yield from _with_parameters(item, numbered, numbered.get(key, parameter))


def _numbered(optimizer: Mapping[str, Any], like: Mapping[str, Tensor]) -> Mapping[Any, Tensor]:
    """The parameters by their numbers in an optimizer's state that was not saved by name."""
    return {
        number: like[name]
        for group in optimizer["param_groups"]
        for number, name in zip(group["params"], group.get("param_names", ()))
        if name in like
    }


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Refuse the checkpoint `path` if it cannot be read inside."""
    try:
        yield
    except OSError as problem:
        raise CheckpointError(f"Checkpoint {path} is refused: it cannot be read ({problem}).") from problem


def open_verified(path: Path) -> Checkpoint:
    """The checkpoint directory `path`, every byte of it verified.

    Raises:
        CheckpointError: as `verify`, or a file's content is not what its name says.
    """
    with _readable(path):
        return _opened(path, verify(path))


def _opened(path: Path, manifest: Manifest) -> Checkpoint:
    documents = {name: _read_json(path / f"{name}.json") for name in ("state", "config")}
    if manifest.format == 1:
        index = index_of_whole_files(path, manifest.files)
    else:
        index = read_index(path, _read_json(path / INDEX), manifest.files, manifest.world)
    state = documents["state"]
    if not (
        isinstance(state, dict)
        and isinstance(state.get("weights"), dict | list)
        and isinstance(state.get("state"), dict)
        and isinstance(documents["config"], dict)
    ):
        raise CheckpointError(f"Checkpoint {path} is refused: state.json is not a checkpoint's.")
    if isinstance(state["weights"], list):  # format 1 named the sets alone
        names = [name.partition("/") for name in index]
        listed = {group: [n for g, _, n in names if g == group] for group in state["weights"]}
        state = {**state, "weights": listed}
    return Checkpoint(path, manifest, index, state, documents["config"])


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        raise CheckpointError(f"{path} is refused: it is not JSON.") from None


def load(path: Path) -> Snapshot:
    """Read the checkpoint directory `path` whole, after verifying every byte of it.

    Raises:
        CheckpointError: as `open_verified`.
    """
    return open_verified(path).load()


def find(folder: Path, *, group: dist.ProcessGroup | None = None) -> Checkpoint | None:
    """The newest checkpoint in `folder` that verifies, or None where there is none at all.

    Each one that is refused is logged. Once an older one has been accepted, it is renamed to `step-N.refused`, so that
    it is not tried again. Collective where torch.distributed runs: the ranks share the work and get the same result.

    Raises:
        CheckpointError: there are checkpoints, and none can be trusted.
    """
    coordinator = current_coordinator(group)
    refused: list[tuple[Path, CheckpointError]] = []
    for step in reversed(coordinator.first(lambda: steps(folder))):
        path = folder / f"step-{step}"
        try:
            stored = _accepted(path, coordinator)
        except CheckpointError as problem:
            _log.warning("%s The checkpoint before it is tried.", problem)
            refused.append((path, problem))
            continue
        coordinator.first(lambda: _settle(folder, [bad for bad, _ in refused], stored.path.name))  # noqa: B023
        return stored
    if refused:
        listed = "\n".join(f"- {problem}" for _, problem in refused)
        raise CheckpointError(
            f"No checkpoint in {folder} can be trusted:\n{listed}\n"
            f"Restore one from a backup, or start again with --no-resume."
        )
    return None


def _accepted(path: Path, coordinator: Coordinator) -> Checkpoint:
    """The checkpoint `path`, if every rank trusts it."""

    def opened() -> Checkpoint:
        with _readable(path):  # here, because it must be told to the other ranks
            return _opened(path, manifest)

    mine: list[Checkpoint] = []
    try:
        with _readable(path):
            manifest = check(path, coordinator)
        coordinator.all(lambda: mine.append(opened()))
    except RankProblem as problem:
        raise problem.error from problem
    return mine[0]


def _settle(folder: Path, refused: Iterable[Path], name: str) -> None:
    for bad in refused:
        set_aside(bad)
    repair_latest(folder, name)


def newest(folder: Path, *, group: dist.ProcessGroup | None = None) -> Snapshot | None:
    """Read what `find` finds, whole on every rank: for models that each rank holds whole."""
    coordinator = current_coordinator(group)
    stored = find(folder, group=group)
    return stored.load(rank=coordinator.rank, world=coordinator.world) if stored else None
