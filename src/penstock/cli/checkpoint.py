"""`penstock checkpoint`: verify, list, export and average the checkpoints of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from penstock.cli._display import show
from penstock.cli._options import Flag, Json
from penstock.config.convert import Range, require
from penstock.errors import CheckpointError, ConfigError, ExitCode
from penstock.report.page import Cell, Section

ShardSize = Annotated[float, Range(0, 1e9, open_low=True)]
_HEADS = ("checkpoint", "MB", "ranks", "torch", "state", "plan")


def verify_(path: Path, *, step: int | None = None) -> None:
    """Check every byte of a checkpoint.

    Compares its files with its manifest. Ends with code 5 if anything has changed.

    Parameters
    ----------
    path
        A directory `step-N`, or a folder of them, or the output folder of a run. The newest is used.
    step
        Use this step instead of the newest.
    """
    from penstock.checkpoint.reader import open_verified
    from penstock.checkpoint.rewrite import candidates

    newest = candidates(path, step=step)[0]
    checkpoint = open_verified(newest)
    ranks = "1 rank" if checkpoint.world == 1 else f"{checkpoint.world} ranks"
    print(
        f"{newest} is whole: {checkpoint.manifest.bytes:,} bytes in {len(checkpoint.manifest.files)} files, "
        f"{len(checkpoint.index):,} tensors, saved by {ranks}."
    )


def list_(path: Path, *, as_json: Json = False, thorough: Flag = False) -> int:
    """List the checkpoints of a run.

    Shows step, size, ranks, Plan, and whether they can be trusted. Ends with code 5 if one cannot be trusted.

    Parameters
    ----------
    path
        A folder of directories `step-N`, or the output folder of a run.
    as_json
        Print JSON instead of a table.
    thorough
        Check every checksum. By default only manifests and sizes are checked.
    """
    from penstock.checkpoint.commit import steps

    folder = path if steps(path) else path / "checkpoints"
    rows = [_row(folder / f"step-{step}", thorough) for step in steps(folder)]
    if not rows:
        raise ConfigError(f"There is no checkpoint in {path}. Give the output folder of a run.")
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        show([_table(rows, thorough)])
    return int(ExitCode.CHECKPOINT if any(row["problem"] for row in rows) else ExitCode.DONE)


def _row(path: Path, thorough: bool) -> dict[str, Any]:
    from penstock.checkpoint.reader import open_verified

    try:
        manifest = open_verified(path, checksums=thorough).manifest
    except CheckpointError as problem:
        return {"path": str(path), "problem": str(problem)}
    return {
        "path": str(path), "problem": None, "step": manifest.step, "bytes": manifest.bytes, "ranks": manifest.world,
        "format": manifest.format, "plan": manifest.plan, "penstock": manifest.versions.get("penstock"),
        "torch": manifest.versions.get("torch"),
    }  # fmt: skip


def _table(rows: list[dict[str, Any]], thorough: bool) -> Section:
    heads = [Cell(name, words=name not in ("MB", "ranks")) for name in _HEADS]
    cells = []
    for row in rows:
        name, state = Path(row["path"]).name, "verified" if thorough else "sizes right"
        known = f"{row.get('bytes', 0) / 1e6:,.1f}", str(row.get("ranks")), row.get("torch") or ""
        words = ("", "", "", "refused", row["problem"]) if row["problem"] else (*known, state, row["plan"])
        cells.append(("", [*map(Cell, (name, *words))]))
    return Section(title="Checkpoints", columns=heads, rows=cells)


def export_(
    path: Path, target: Path, *, step: int | None = None, weights: str | None = None,
    names: Literal["hf", "plain"] = "hf", shard_gb: float = 5.0, branch: str | None = None, adapter: bool = False,
) -> None:  # fmt: skip
    """Write weights as a Hugging Face folder.

    The folder gets a checkpoint's weights as safetensors, and config.json.

    Parameters
    ----------
    path
        A directory `step-N`, or a folder of them, or the output folder of a run. The newest is used.
    target
        The folder to write to.
    step
        Use this step instead of the newest.
    weights
        Which set: `weights`, or `ema` for the moving average. By default the average, if there is one.
    names
        `hf` uses the names of transformers, and works for families that it has. `plain` keeps Penstock's names, and
        works for any model.
    shard_gb
        The size in GB above which the weights are split into several files with an index, as transformers does.
    branch
        Write only this branch of a model with several, `understanding` or `generating`, as an encoder or a decoder of
        transformers. If the branch has two heads, the one for words is kept.
    adapter
        Write the adapters of a run with `recipe.lora` alone, as peft reads them, and not merged into the weights.
    """
    from penstock.checkpoint import rewrite

    require("--shard-gb", shard_gb, ShardSize)
    shard_bytes = max(int(shard_gb * 1e9), 1)
    checkpoint = rewrite.open_newest(path, step=step)
    sets = rewrite.weight_sets(checkpoint)
    chosen = weights or ("ema" if "ema" in sets else "weights")
    if adapter and (branch is not None or names != "hf"):
        raise ConfigError("--adapter writes adapters in transformers' names; leave --names and --branch out.")
    if names == "plain" and branch is not None:
        raise ConfigError(
            "--names plain keeps the names of the whole model, and --branch writes a part; leave one out."
        )
    if adapter:
        rewrite.export_adapter(checkpoint, target, chosen)
    elif names == "hf":
        rewrite.export_model(checkpoint, target, chosen, shard_bytes=shard_bytes, branch=branch)
    else:
        rewrite.export_plain(checkpoint, target, chosen, shard_bytes=shard_bytes)
    print(f"{target}: '{chosen}' of {checkpoint.path}.")


def average_(path: Path, target: Path | None = None, *, last: int = 2, weights: str = "weights") -> None:
    """Write the mean of a run's newest checkpoints.

    Makes a Hugging Face folder: safetensors and config.json. The mean is exact: summed in fp64 and rounded once to
    fp32. `penstock train --keep N` keeps N checkpoints.

    Parameters
    ----------
    path
        The output folder of a run, or its folder of checkpoints.
    target
        The folder to write to; `average` in the output folder by default.
    last
        Number of checkpoints, from the newest back.
    weights
        Which set: `weights`, or `ema` for the moving average.
    """
    from penstock.checkpoint.rewrite import export_average

    folder = target or path / "average"
    averaged = export_average(path, folder, count=last, which=weights)
    print(f"{folder}: the mean of '{weights}' of {', '.join(saved.path.name for saved in averaged)}.")
