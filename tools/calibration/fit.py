"""Fitting the constants, and what errors remain for a model that had no say in them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

from calibration.rows import TABLES, rows
from calibration.table import FOLDER, Row
from penstock.planner.constants import DEFAULT, Constants

FITTED = (
    "gemm_share", "fused_attention_share", "host_wait_seconds", "kernel_seconds", "memory_share", "node_share",
    "straggling",
)  # fmt: skip
"""Constants that a fit changes. The others are read off one table (nccl), or are ranges that a source states."""
HOPPER = ("gemm_share_hopper",)
"""Constants that are fitted after these, on `mosaicml_h100` alone."""
WEIGHTS = {"korthikanti_table4": 0.5, "korthikanti_table5": 1.5, "mosaicml_a100": 1.5}
"""Tables that `FITTED` are fitted on: whole runs alike, the passes of one layer a third."""
STEPS = (1.04, 1.015, 1.005)
RANGE = {
    "gemm_share": (0.0, 1.0),
    "fused_attention_share": (0.0, 1.0),
    "memory_share": (0.0, 1.0),
    "node_share": (0.0, 1.0),
    "gemm_share_hopper": (0.0, 1.0),
    # Of what the tables cannot tell from a slower memory, physics must: a kernel that waits for another starts no
    # sooner than this after its end.
    "kernel_seconds": (1.5e-6, math.inf),
}


def error(row: Row, constants: Constants = DEFAULT) -> float:
    """What is predicted over what was measured, less one."""
    return row.predict(constants) / row.measured - 1


def loss(constants: Constants, given: Sequence[Row]) -> float:
    """Mean absolute logarithmic error, tables weighted by `WEIGHTS`."""
    by_table: dict[str, list[float]] = {}
    for row in given:
        by_table.setdefault(row.table, []).append(abs(math.log(row.predict(constants) / row.measured)))
    return sum(WEIGHTS.get(table, 1.0) * sum(errors) / len(errors) for table, errors in by_table.items())


def fit(given: Sequence[Row], start: Constants = DEFAULT, names: Sequence[str] = FITTED) -> Constants:
    """The constants `names` that minimise `loss`, by steps along one at a time, from `start`."""
    best, least = start, loss(start, given)
    for step in STEPS:
        moved = True
        while moved:
            moved = False
            for name in names:
                for factor in (step, 1 / step):
                    value = getattr(best, name) * factor
                    least_value, most_value = RANGE.get(name, (0.0, math.inf))
                    if not least_value <= value <= most_value:
                        continue
                    trial = replace(best, **{name: value})
                    found = loss(trial, given)
                    if found < least - 1e-6:
                        best, least, moved = trial, found, True
                        break
    return best


def fitted_rows() -> list[Row]:
    """The rows of time that constants are fitted on."""
    return [row for table in WEIGHTS for row in rows(table)]


def leave_one_out() -> dict[str, list[float]]:
    """Error of each row of the fitted tables, under constants fitted without any row of its model; table by table.

    Models of the same name in different tables are left out together.
    """
    everything = fitted_rows()
    hopper = rows("mosaicml_h100")
    errors: dict[str, list[float]] = {table: [] for table in (*WEIGHTS, "mosaicml_h100")}
    held: dict[str, Constants] = {}
    for row in (*everything, *hopper):
        if row.model not in held:
            first = fit([other for other in everything if other.model != row.model])
            held[row.model] = fit([other for other in hopper if other.model != row.model], first, HOPPER)
        errors[row.table].append(error(row, held[row.model]))
    return errors


def stored_leave_one_out() -> dict[str, list[float]]:
    """The errors of `leave_one_out` as they were when the page was last written; refitting takes minutes."""
    path = FOLDER / "leave_one_out.json"
    stored: dict[str, list[float]] = json.loads(path.read_text(encoding="utf-8"))
    return {table: stored[table] for table in TABLES if table in stored}
