"""Finds, verifies and reads checkpoints on disk, for any number of ranks, whatever number saved them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from penstock.boundary.files import quoted, read_bytes
from penstock.boundary.trees import Bounds, parse_json
from penstock.checkpoint.commit import settle, steps
from penstock.checkpoint.coordinator import RankProblem, current_coordinator
from penstock.checkpoint.index import Entry, Index, file_name, read_index
from penstock.checkpoint.manifest import INDEX, Manifest, check_sizes, refusal, verify
from penstock.checkpoint.snapshot import LOCAL, Piece, Snapshot, pieces_of
from penstock.checkpoint.stages import restricted
from penstock.checkpoint.storage import read_pieces
from penstock.checkpoint.tree import unpack
from penstock.errors import CheckpointError, ran_out_of_memory
from penstock.models.former_names import BIAS, CORRECTION, former_name, present_name, with_corrections

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint directory. Its tensors are read on demand."""

    path: Path
    manifest: Manifest
    index: Index
    document: Mapping[str, Any]
    config: Mapping[str, Any]

    @property
    def step(self) -> int:
        """The step at which it was saved."""
        return self.manifest.step

    @property
    def world(self) -> int:
        """Number of ranks that saved it."""
        return self.manifest.world

    def load(
        self,
        like: Mapping[str, Tensor] | None = None,
        *,
        rank: int = 0,
        world: int | None = None,
        held: Collection[str] | None = None,
    ) -> Snapshot:
        """The checkpoint's content for rank `rank` of `world` (default: the number of ranks that saved it).

        `like` maps names of the model's parameters to the parameters. A tensor that the checkpoint holds under such a
        name (a weight, its average, the optimizer's moments), with the parameter's shape, is put on the parameter's
        device; for a DTensor only this rank's part is read, into a DTensor with the same placements. All other tensors,
        or all without `like`, are read whole to the CPU. If a rank holds a part of the model only, `held` names the
        weights it needs; by default all are read. Not collective. Raises CheckpointError if a file cannot be read.
        """
        with trusted(self.path):
            old = self._has_former_names()
            if old:
                like = {former_name(name): parameter for name, parameter in (like or {}).items()}
                held = None if held is None else {former_name(name) for name in held}
            local = self._local(rank) if world in (None, self.world) else {}
            held = held and {*held, *(name.replace(CORRECTION, BIAS) for name in held)}
            document = self.document if held is None else restricted(self.document, held)
            weights, state = self._put_together(
                document["weights"], {**document["state"], LOCAL: local}, like or {}, self.read
            )
            if old:
                weights, state = _with_present_names(weights), _with_present_names(state)
            weights, local = {key: with_corrections(each) for key, each in weights.items()}, state.pop(LOCAL)
            return Snapshot(self.step, weights, state, self.config, self.manifest.plan, local, self.world)

    def _has_former_names(self) -> bool:
        """Whether it is of a Penstock Vision Transformer, saved when its parts had other names. A user's own model may
        have such names, too, and keeps them."""
        model = self.config.get("model")
        own_vit = isinstance(model, dict) and model.get("family") == "vit" and not self.config.get("factory")
        return own_vit and any("positions" in names for names in self.document["weights"].values())

    def rehearse(self, *, part: tuple[int, int] = (0, 1)) -> None:
        """Do everything that `load` does except reading tensors' values, to refuse a checkpoint that cannot be loaded.

        With `part` (i, n) only every n-th rank's own state, from the i-th on, is checked, so that n ranks split the
        work. Raises CheckpointError as `load`.
        """

        def described(wanted: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
            entries = {name: self._entry(name) for name in wanted}
            return {n: torch.empty(e.shape, dtype=e.torch_dtype, device="meta") for n, e in entries.items()}

        with trusted(self.path):
            self._put_together(self.document["weights"], self.document["state"], {}, described)
            for rank in range(part[0], self.world, part[1]):
                self._put_together({}, {LOCAL: self._local(rank)}, {}, described)

    def _local(self, rank: int) -> dict[str, Any]:
        name = file_name(LOCAL, rank, self.world, "json")
        return read_json(self.path / name) if name in self.manifest.files else {}

    def _put_together(
        self,
        sets: Mapping[str, Iterable[str]],
        trees: Mapping[str, Any],
        like: Mapping[str, Tensor],
        read: _Read,
    ) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """Sets of weights and trees of state, filled with the tensors that `read` returns."""
        parameters = {f"{group}/{name}": like.get(name) for group, names in sets.items() for name in names}
        for group, tree in trees.items():
            for path, parameter in _with_parameters(tree, like if group != LOCAL else {}):
                if (name := f"{group}/{path}") in parameters:
                    raise ValueError(f"{quoted(name)} is named twice")
                parameters[name] = parameter
        tensors: dict[str, dict[str, Tensor]] = {group: {} for group in (*sets, *trees)}
        for name, tensor in read(parameters).items():
            group, _, path = name.partition("/")
            tensors[group][path] = tensor
        state = {group: unpack(tree, tensors[group]) for group, tree in trees.items()}
        return {group: tensors[group] for group in sets}, state

    def _entry(self, name: str) -> Entry:
        if name not in self.index:
            raise refusal(self.path, f"its files have no tensor {quoted(name)}.")
        return self.index[name]

    def read(self, parameters: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Tensors by `set/name`, each on the device and with the placements of its parameter, if the shapes agree."""
        # Sorted, so that an error always names the first.
        entries = {name: self._entry(name) for name in sorted(parameters)}
        pieces, tensors = {}, {}
        for name, like in parameters.items():
            tensors[name], pieces[name] = _empty(entries[name], like)
        read_pieces(self.path, self.index, self.world, pieces)
        return tensors


_Read = Callable[[Mapping[str, Tensor | None]], Mapping[str, Tensor]]


@contextmanager
def trusted(path: Path) -> Iterator[None]:
    """Use the checkpoint `path` inside without checks; an error caused by its content becomes a CheckpointError."""
    try:
        yield
    except _MALFORMED as problem:
        if ran_out_of_memory(problem):
            raise
        what = " ".join(str(problem).split())
        raise refusal(path, f"its state is malformed ({quoted(what, 400)[1:-1]}).") from problem


_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError)


def _empty(entry: Entry, like: Tensor | None) -> tuple[Tensor, list[Piece]]:
    """Memory for a tensor, or for this rank's part of it, and the pieces by which it is filled."""
    dtype = entry.torch_dtype
    if like is None or tuple(like.shape) != entry.shape:
        whole = torch.empty(entry.shape, dtype=dtype)
        return whole, pieces_of(whole)
    if not isinstance(like, DTensor):
        device = "cpu" if like.is_meta else like.device
        whole = torch.empty(entry.shape, dtype=dtype, device=device)
        return whole, pieces_of(whole)
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
    return tensor, pieces_of(like, local)


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


def _with_present_names(tree: Any) -> Any:
    """A tree in which names of parameters are replaced by `present_name`."""
    if isinstance(tree, dict):
        return {_with_present_names(key): _with_present_names(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_with_present_names(value) for value in tree)
    return present_name(tree) if isinstance(tree, str) else tree


def _numbered(optimizer: Mapping[str, Any], like: Mapping[str, Tensor]) -> Mapping[Any, Tensor]:
    """Parameters by their numbers in an optimizer's state that was not saved by name."""
    return {
        number: like[name]
        for group in optimizer["param_groups"]
        for number, name in zip(group["params"], group.get("param_names", ()))
        if name in like
    }


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Refuse the checkpoint `path` if a file cannot be read inside."""
    try:
        yield
    except OSError as problem:
        raise refusal(path, f"it cannot be read ({problem}).") from problem


def open_verified(path: Path, *, checksums: bool = True) -> Checkpoint:
    """Open the checkpoint directory `path` after verifying every byte; without `checksums` everything but the
    checksums. Raises CheckpointError as `verify`, or if a file's content does not match its name."""
    with _readable(path):
        return _opened(path, verify(path) if checksums else check_sizes(path))


def _opened(path: Path, manifest: Manifest, *, part: tuple[int, int] = (0, 1)) -> Checkpoint:
    state, config = (read_json(path / f"{name}.json") for name in ("state", "config"))
    index = read_index(path, read_json(path / INDEX), manifest.files, manifest.world)
    if not (isinstance(state.get("weights"), dict) and isinstance(state.get("state"), dict)):
        raise refusal(path, "state.json is not a checkpoint's.")
    with trusted(path):
        checkpoint = Checkpoint(path, manifest, index, state, config)
        checkpoint.rehearse(part=part)
    return checkpoint


_DOCUMENT = Bounds(bytes=1 << 28, values=1 << 25, infinite=True, control=True)
"""Large enough for the index of a thousand ranks; the manifest holds its size and checksum."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON document of a checkpoint."""
    raw = read_bytes(path, "The checkpoint's file", limit=_DOCUMENT.bytes, error=CheckpointError)
    return parse_json(raw, f"{path} is refused: it", error=CheckpointError, bounds=_DOCUMENT)


def load(path: Path) -> Snapshot:
    """Read all of the checkpoint directory `path`, after verifying every byte. Raises as `open_verified`."""
    return open_verified(path).load()


def find(folder: Path, *, below: int | None = None) -> Checkpoint | None:
    """The newest checkpoint in `folder` that verifies, only among steps below `below` if that is set; None if there is
    no checkpoint at all.

    Each refused one is logged. Once an older one has been accepted, it is renamed to `step-N.refused`, so that it is
    not tried again. Collective with torch.distributed: the ranks split the work and get the same result. Raises
    CheckpointError if there are checkpoints, but none can be trusted.
    """
    coordinator = current_coordinator()
    refused: list[tuple[Path, CheckpointError]] = []
    for step in reversed(coordinator.first(lambda: steps(folder))):
        if below is not None and step >= below:
            continue
        path = folder / f"step-{step}"
        try:
            stored = open_together(path)
        except CheckpointError as problem:
            _log.warning("%s The checkpoint before it is tried.", problem)
            refused.append((path, problem))
            continue
        coordinator.first(lambda: settle(folder, [bad for bad, _ in refused], stored.path.name))  # noqa: B023
        return stored
    if refused:
        listed = "\n".join(f"- {problem}" for _, problem in refused)
        raise CheckpointError(
            f"No checkpoint in {folder} can be trusted:\n{listed}\n"
            f"Restore one from a backup, or start again with --no-resume."
        )
    return None


def open_together(path: Path) -> Checkpoint:
    """Open the checkpoint directory `path`, whose bytes all ranks verify together. Raises CheckpointError, on all
    ranks, if one refuses it."""
    coordinator = current_coordinator()
    part = coordinator.rank, coordinator.world
    checkpoints: list[Checkpoint] = []

    @_readable(path)
    def verified() -> Manifest:
        return verify(path, part=part)

    @_readable(path)
    def opened() -> None:
        checkpoints.append(_opened(path, manifest, part=part))

    try:
        manifest = coordinator.all(verified)[0]
        coordinator.all(opened)
    except RankProblem as problem:
        raise problem.error from problem
    return checkpoints[0]
