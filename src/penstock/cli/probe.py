"""`penstock probe`: measure this machine and store the result."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.cli._display import show
from penstock.cli._options import Flag, Json
from penstock.config.load import to_dict
from penstock.config.machine import GemmSample, Machine, require_machine_file, save_machine
from penstock.report.page import Cell, Section


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

    if output is not None:
        require_machine_file(output)
    machine = measure(device, quick=quick)
    paths = [path for path in (keep(machine), save_machine(machine, output) if output else None) if path]
    if as_json:
        print(json.dumps(to_dict(machine), indent=1))
        return
    show([
        _summary(machine), "", _products(machine), *(f"note: {note}" for note in machine.notes),
        *(f"stored in {path}" for path in paths),
    ])  # fmt: skip


def _summary(machine: Machine) -> Section:
    figures = (
        ("memory", machine.memory_bytes, 1e9, "{:,.1f} GB"),
        ("memory bandwidth", machine.memory_bytes_per_second, 1e9, "{:,.1f} GB/s"),
        ("one small operator", machine.launch_seconds, 1e-6, "{:,.2f} µs"),
        ("one operator of a training step", machine.operator_seconds, 1e-6, "{:,.2f} µs"),
        ("sustained under load", machine.sustained_share, 1.0, "{:.1%} of the best rate"),
        ("all-reduce bus bandwidth", machine.collective_bytes_per_second, 1e9, "{:,.2f} GB/s"),
    )
    rows = [
        ("", [Cell(name), Cell(words.format(value / unit))]) for name, value, unit, words in figures if value
    ]
    return Section(title="", columns=[Cell(machine.name, words=True), Cell("")], rows=rows)


def _products(machine: Machine) -> Section:
    """One row per shape and form, one column per type, in GFLOP/s."""
    kinds = list(dict.fromkeys(sample.dtype for sample in machine.gemm))
    rates = {(_product(sample), sample.dtype): sample.flops_per_second for sample in machine.gemm}
    rows = []
    for product in dict.fromkeys(map(_product, machine.gemm)):
        cells = [rates.get((product, kind)) for kind in kinds]
        rows.append(("", [Cell(product), *(Cell(f"{rate / 1e9:,.0f}" if rate else "–") for rate in cells)]))
    heads = [Cell("GFLOP/s of m × n × k", words=True), *map(Cell, kinds)]
    return Section(title="", columns=heads, rows=rows)


def _product(sample: GemmSample) -> str:
    forms = {"forward": "", "ragged": ", odd rows", "vocabulary": ", a vocabulary"}
    gradient = f", {sample.form}{' gradient' if sample.plain else ''}"
    return f"{sample.m} × {sample.n} × {sample.k}{forms.get(sample.form, gradient)}"
