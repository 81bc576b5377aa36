"""`penstock experts --place`: a placement for each layer of a load record, with its figure, the bound and the moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.boundary.files import quoted, read_text, shown
from penstock.boundary.trees import Bounds, parse_json
from penstock.config.load import load
from penstock.errors import ConfigError, DataError
from penstock.planner.loads import LoadRecord, imbalance
from penstock.planner.placement import Placement, Room, bound, place, slots_needed
from penstock.report.page import Cell, Section

_BOUNDS = Bounds(bytes=1 << 28, values=1 << 25)


def room_of(words: Sequence[str]) -> Room:
    """The devices that words such as `gpus=8` describe. Raises ConfigError for other words."""
    pairs: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name in pairs:
            raise ConfigError(
                f"--place has {quoted(word)}; write gpus=8 slots=16 nodes=2 groups=4, each once."
            )
        pairs[name] = value
    return load(Room, overrides=pairs)


def place_layers(
    record: LoadRecord, room: Room, *, before: Mapping[str, Placement] | None = None, moves: int | None = None,
    target: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Place the experts of each layer by their loads in all windows but the last, and compute the placement's figure on
    the last too; with `target` also the fewest slots whose figure is at most that. Returns plain values. Raises
    ConfigError if a layer's experts do not fit, or `before` has other layers, experts or devices."""
    made_from, later = record.history()
    layers: dict[str, Any] = {}
    for number, name in enumerate(record.layers):
        loads = made_from[number]
        fitted = room.fitted(len(loads))
        if before is not None and name not in before:
            raise ConfigError(f"The placement before has no layer {quoted(name)}; leave --before out.")
        then = None if before is None else before[name]
        placement = place(loads, fitted, before=then, moves=moves)
        layers[name] = {
            "devices": placement.devices, "figure": placement.figure(loads),
            "next": None if later is None else placement.figure(later[number]),
            "bound": bound(loads, fitted), "unplaced": imbalance(loads),
            "slots_needed": None if target is None else slots_needed(loads, fitted, target),
            "moved": None if then is None else placement.moved(then), "slots": fitted.slots,
        }  # fmt: skip
    return {"place": asdict(room), "target": target, "layers": layers}


def read_placements(path: Path) -> dict[str, Placement]:
    """The placements that `penstock experts --place … --json` printed, by layer. Raises DataError for other files."""
    raw = read_text(path, "The placement", limit=_BOUNDS.bytes)
    tree = parse_json(raw, f"The placement {shown(path)}", error=DataError, bounds=_BOUNDS)
    try:
        return {
            name: Placement(tuple(tuple(map(int, experts)) for experts in layer["devices"]))
            for name, layer in tree["layers"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError):
        raise DataError(
            f"{shown(path)} is no placement; print one with penstock experts RUN --place gpus=8 --json."
        ) from None


def placement_tables(placements: Mapping[str, Any]) -> list[Section]:
    """The experts of each device, for each layer; and a row for each layer."""
    target = placements["target"]
    reaching = "" if target is None else f"slots for {target:g}"
    heads = ("layer", "slots", "largest over mean", "next window", "bound", reaching, "moved")
    columns = [Cell(head, words=place_ == 0, rank=place_) for place_, head in enumerate(heads)]
    tables, rows = list[Section](), list[tuple[str, list[Cell]]]()
    for name, layer in placements["layers"].items():
        devices = [
            ("", [Cell(str(device)), Cell(", ".join(map(str, experts)), words=True)])
            for device, experts in enumerate(layer["devices"])
        ]
        tables.append(Section(title=name, columns=[Cell("device"), Cell(name, words=True)], rows=devices))
        later, fewest, moved = layer["next"], layer["slots_needed"], layer["moved"]
        enough = "none" if fewest is None and target is not None else str(fewest or "")
        cells = (
            str(layer["slots"]), f"{layer['figure']:.3f}", "" if later is None else f"{later:.3f}",
            f"{layer['bound']:.3f}", enough, "" if moved is None else str(moved),
        )  # fmt: skip
        rows.append(("", [Cell(name, words=True), *map(Cell, cells)]))
    return [*tables, Section(title="Placement", columns=columns, rows=rows)]
