"""`penstock experts`: the record of experts' loads in a run, and placements of experts that follow from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from penstock.cli._options import Flag, Json
from penstock.errors import ConfigError

_PLACE = (
    "Place experts on devices, such as gpus=8 slots=16 nodes=2 groups=4: slots is the number of expert replicas on all "
    "devices together, and each group of experts stays on one node. With --json the placement itself is printed."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """How experts are to be placed. Fields are the verb's options."""

    place: Annotated[tuple[str, ...], Parameter(negative="", consume_multiple=True, help=_PLACE)] = ()
    before: Path | None = None
    """An earlier placement, printed by --json, of which only few slots are to change."""
    moves: int | None = None
    """How many slots of a layer may change; by default one in twenty."""
    target: float | None = None
    """Also find the fewest slots with which the largest load is at most this many times the mean, such as 1.05."""

    def problems(self) -> Iterator[str]:
        """Each option that contradicts the others or has no effect."""
        only_placing = {"--before": self.before, "--moves": self.moves, "--target": self.target}
        if useless := [name for name, value in only_placing.items() if value is not None and not self.place]:
            yield f"{' and '.join(useless)} is for placements; say with --place where to, such as gpus=8."
        if self.moves is not None and (self.moves < 0 or self.before is None):
            yield f"--moves is {self.moves}, but counts changes of a placement that --before names, 0 or more."
        if self.target is not None and not self.target >= 1:
            yield f"--target is {self.target:g}, but the largest load is never below the mean; give 1 or more."


_DEFAULTS = Placing()


def experts(
    run: Path,
    *,
    as_json: Json = False,
    csv: Flag = False,
    html: Path | None = None,
    placing: Annotated[Placing, Parameter(name="*")] = _DEFAULTS,
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
    """
    from penstock.boundary.files import write_text
    from penstock.cli._display import show
    from penstock.cli.place_experts import place_layers, placement_tables, read_placements, room_of
    from penstock.planner.loads import loads_page, loads_table, read_loads

    if as_json and csv:
        raise ConfigError("--json and --csv were both given; leave one out.")
    if placing.place and csv:
        raise ConfigError("--csv is for the record; print a placement with --json.")
    if problems := list(placing.problems()):
        raise ConfigError(problems)
    record = read_loads(run)
    placed: dict[str, Any] | None = None
    if html is not None:
        write_text(html, loads_page(record))
    if placing.place:
        before = None if placing.before is None else read_placements(placing.before)
        room = room_of(placing.place)
        placed = place_layers(record, room, before=before, moves=placing.moves, target=placing.target)
    if as_json:
        print(record.to_json() if placed is None else json.dumps(placed))
    elif csv:
        print(record.to_csv(), end="")
    else:
        show([loads_table(record)] if placed is None else placement_tables(placed))
