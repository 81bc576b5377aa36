"""`penstock probe`: measure this machine and store the result."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from penstock.cli._options import Flag, Json
from penstock.config.load import to_dict
from penstock.config.machine import GemmSample, Machine, save_machine


def probe(
    *, device: str = "auto", quick: Flag = False, output: Path | None = None, as_json: Json = False
) -> None:
    """Measure this machine, and store the result.

    It is stored in the cache folder ($PENSTOCK_CACHE or ~/.cache/penstock), from which `train` and `ladder` take it for
    their predictions and for MFU.

    Parameters
    ----------
    device
        auto, cpu, cuda or cuda:N.
    quick
        Take seconds instead of a minute or two: fewer shapes, and on a GPU no rate under sustained load.
    output
        Also write the machine to this .toml or .json file, for --machine.
    as_json
        Print the machine as JSON instead of tables.
    """
    from penstock.probe import keep
    from penstock.probe import probe as measure

    machine = measure(device, quick=quick)
    paths = [path for path in (keep(machine), save_machine(machine, output) if output else None) if path]
    if as_json:
        print(json.dumps(to_dict(machine), indent=1))
        return
    console = Console()
    console.print(_summary(machine), _products(machine))
    for note in machine.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    for path in paths:
        console.print(f"stored in {path}", markup=False, soft_wrap=True)


def _summary(machine: Machine) -> Table:
    table = Table(title=machine.name, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value, unit, words in (
        ("memory", machine.memory_bytes, 1e9, "{:,.1f} GB"),
        ("memory bandwidth", machine.memory_bytes_per_second, 1e9, "{:,.1f} GB/s"),
        ("one small operator", machine.launch_seconds, 1e-6, "{:,.2f} µs"),
        ("one operator of a training step", machine.operator_seconds, 1e-6, "{:,.2f} µs"),
        ("sustained under load", machine.sustained_share, 1.0, "{:.1%} of the best rate"),
        ("all-reduce bus bandwidth", machine.collective_bytes_per_second, 1e9, "{:,.2f} GB/s"),
    ):
        if value:
            table.add_row(name, words.format(value / unit))
    return table


def _products(machine: Machine) -> Table:
    """One row per shape and form, one column per type, in GFLOP/s."""
    kinds = list(dict.fromkeys(sample.dtype for sample in machine.gemm))
    rates = {(_product(sample), sample.dtype): sample.flops_per_second for sample in machine.gemm}
    table = Table(title="matrix products, GFLOP/s", title_justify="left")
    table.add_column("m × n × k")
    for kind in kinds:
        table.add_column(kind, justify="right")
    for product in dict.fromkeys(map(_product, machine.gemm)):
        cells = [rates.get((product, kind)) for kind in kinds]
        table.add_row(product, *("–" if rate is None else f"{rate / 1e9:,.0f}" for rate in cells))
    return table


def _product(sample: GemmSample) -> str:
    forms = {"forward": "", "ragged": ", odd rows", "vocabulary": ", a vocabulary"}
    gradient = f", {sample.form}{' gradient' if sample.plain else ''}"
    return f"{sample.m} × {sample.n} × {sample.k}{forms.get(sample.form, gradient)}"
