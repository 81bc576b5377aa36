"""`penstock tune-kernels`: measure which fused operators pay on this machine, and store the result."""

from __future__ import annotations

import json
import sys

from penstock.cli._display import show
from penstock.cli._options import Json
from penstock.errors import ConfigError
from penstock.report.page import Cell, Section


def tune_kernels(*, rounds: int = 15, as_json: Json = False) -> None:
    """Measure which fused operators pay on this machine.

    Compares the fused operators with torch's own, eager and compiled; plan.fuse=auto uses those that pay. Takes a
    minute or two. Times are processor time on one thread. The table is stored in the cache folder ($PENSTOCK_CACHE or
    ~/.cache/penstock) and replaces the one that ships with Penstock.

    Parameters
    ----------
    rounds
        Interleaved rounds for each operator, size and type.
    as_json
        Print the table as JSON.
    """
    from penstock.config.gains import LEAST_GAIN, store
    from penstock.cpu import kind_of
    from penstock.probe.kernels import TYPES, KernelTime, cases, gains_of, measure_all

    if rounds < 1:
        raise ConfigError(f"--rounds is {rounds}, but must be at least 1; 15 take a minute or two.")
    measured, most = 0, len(cases()) * len(TYPES)

    def count(time: KernelTime) -> None:
        nonlocal measured
        measured += 1
        what = f"{time.operator} {time.variant}, {time.rows} × {time.features} in {time.dtype}"
        print(
            f"{measured} of {most}: {what}: {time.gains['eager']:.2f} times as fast as eager", file=sys.stderr
        )

    print(f"Measuring {most} operators, each eager and compiled; a minute or two.", file=sys.stderr)
    times = measure_all(rounds, report=count)
    gains, kind = gains_of(times), kind_of("cpu")
    path = store(kind, gains)
    if as_json:
        print(json.dumps({kind: gains}, indent=1))
        return
    names = ("operator", "variant", "type", "than eager", "than compiled")
    heads = [Cell(name, words="than" not in name) for name in names]
    rows = [
        ("", [*map(Cell, (name, variant, dtype, f"{gain['eager']:.2f}", f"{gain['compiled']:.2f}"))])
        for name, variants in gains.items()
        for variant, types in variants.items()
        for dtype, gain in types.items()
    ]
    show([
        f"times as fast on {kind}:", Section(title="", columns=heads, rows=rows),
        f"plan.fuse=auto takes what is {LEAST_GAIN} times as fast, or more.", f"stored in {path}",
    ])  # fmt: skip
