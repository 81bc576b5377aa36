"""`penstock experts`: the record of experts' loads in a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
    uneven: Annotated[bool, Parameter(negative="")] = False,
    before: Path | None = None,
    moves: int | None = None,
) -> None:
    """Show how often tokens visited each expert of a run's mixtures, or where to place these.

    Parameters
    ----------
    run
        The output folder of a run, or a record that --json printed.
    as_json
        Print the whole record as JSON, which this command and `penstock plan --loads` read.
    csv
        Print it as CSV: layer, label, expert, visits.
    html
        Write a page with heat maps to this file.
    place
        Place experts on devices, such as gpus=8 slots=16 nodes=2 groups=4: replicas on all devices together, and groups
        of experts of which each stays on one node. With --json the placement itself is printed.
    uneven
        Replicas of an expert may take uneven shares of its tokens.
    before
        A placement of before, as --json printed it: few slots change.
    moves
        How many slots of a layer may change; by default one in twenty.
    """
    from penstock.boundary.files import write_text
    from penstock.planner.loads import read_loads
    from penstock.planner.loads_page import loads_page, loads_table
    from penstock.report.page import plain_console, terminal_table

    if as_json and csv:
        raise ConfigError("--json and --csv were both given; the record is printed in one form.")
    if not place and (uneven or before is not None or moves is not None):
        raise ConfigError(
            "--uneven, --before and --moves are for placements; say with --place where, such as gpus=8."
        )
    if place and csv:
        raise ConfigError("--csv is for the record; print a placement with --json.")
    if moves is not None and (moves < 0 or before is None):
        raise ConfigError(
            f"--moves is {moves}, but counts changes of a placement that --before names, 0 or more."
        )
    record = read_loads(run)
    if html is not None:
        write_text(html, loads_page(record))
    if place:
        _place(record, place, as_json=as_json, uneven=uneven, before=before, moves=moves)
    elif as_json:
        print(record.to_json())
    elif csv:
        print(record.to_csv(), end="")
    else:
        console = plain_console()
        console.print(terminal_table(loads_table(record), console.width))


def _place(
    record: Any, words: Sequence[str], *, as_json: bool, uneven: bool, before: Any, moves: int | None
) -> None:
    from penstock.cli.place_experts import (
        devices_table,
        place_layers,
        placements_table,
        read_placements,
        room_of,
    )
    from penstock.report.page import plain_console, terminal_table

    then = None if before is None else read_placements(before)
    found = place_layers(record, room_of(words), uneven=uneven, before=then, moves=moves)
    if as_json:
        print(json.dumps(found))
        return
    console = plain_console()
    for name, layer in found["layers"].items():
        console.print(terminal_table(devices_table(name, layer), console.width))
    console.print(terminal_table(placements_table(found), console.width))
