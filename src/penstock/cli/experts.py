"""`penstock experts`: the record of experts' loads in a run, and placements of experts that follow from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from penstock.errors import ConfigError


def experts(
    run: Path,
    *,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    csv: Annotated[bool, Parameter(negative="")] = False,
    html: Path | None = None,
    place: Annotated[tuple[str, ...], Parameter(negative="", consume_multiple=True)] = (),
    before: Path | None = None,
    moves: int | None = None,
    target: float | None = None,
) -> None:
    """Show how often a run visited its experts, and place them on devices.

    A mixture's router sends each token to a few experts. This shows for each layer how many tokens visited each expert
    in training. With --place, experts are placed so that devices have about equal work.

        penstock experts runs/mixture
        penstock experts runs/mixture --place gpus=8 slots=16 nodes=2 groups=4

    Parameters
    ----------
    run
        The output folder of a run, or a record that --json printed.
    as_json
        Print the whole record as JSON, which this command and `penstock plan --loads` read.
    csv
        Print it as CSV: layer, label, expert, visits.
    html
        Write a page with the tables of layers and labels to this file.
    place
        Place experts on devices, such as gpus=8 slots=16 nodes=2 groups=4: slots are the replicas of experts on all
        devices together, and each group of experts stays on one node. With --json the placement itself is printed.
    before
        An earlier placement, as --json printed it, to change in few slots.
    moves
        How many slots of a layer may change; by default one in twenty.
    target
        Also find the fewest slots with which the largest load is at most this many times the mean, such as 1.05.
    """
    from penstock.boundary.files import write_text
    from penstock.cli.place_experts import place_layers, read_placements, room_of
    from penstock.planner.loads import read_loads
    from penstock.planner.loads_page import loads_page, loads_table
    from penstock.report.page import plain_console, terminal_table

    if as_json and csv:
        raise ConfigError("--json and --csv were both given; leave one out.")
    if place and csv:
        raise ConfigError("--csv is for the record; print a placement with --json.")
    only_placing = {"--before": before, "--moves": moves, "--target": target}
    if useless := [name for name, value in only_placing.items() if value is not None and not place]:
        raise ConfigError(
            f"{' and '.join(useless)} is for placements; say with --place where to, such as gpus=8."
        )
    if moves is not None and (moves < 0 or before is None):
        raise ConfigError(
            f"--moves is {moves}, but counts changes of a placement that --before names, 0 or more."
        )
    if target is not None and not target >= 1:
        raise ConfigError(
            f"--target is {target:g}, but the largest load is never below the mean; give 1 or more."
        )
    record = read_loads(run)
    if html is not None:
        write_text(html, loads_page(record))
    if place:
        earlier = None if before is None else read_placements(before)
        room = room_of(place)
        placed = place_layers(record, room, before=earlier, moves=moves, target=target)
        _show(placed, as_json=as_json)
    elif as_json:
        print(record.to_json())
    elif csv:
        print(record.to_csv(), end="")
    else:
        console = plain_console()
        console.print(terminal_table(loads_table(record), console.width))


def _show(placements: dict[str, Any], *, as_json: bool) -> None:
    from penstock.cli.place_experts import devices_table, placements_table
    from penstock.report.page import plain_console, terminal_table

    if as_json:
        print(json.dumps(placements))
        return
    console = plain_console()
    for name, layer in placements["layers"].items():
        console.print(terminal_table(devices_table(name, layer), console.width))
    console.print(terminal_table(placements_table(placements), console.width))
