"""A whole compression: its steps in order, resumable after any interruption, and its report.

`compress.json` in the output folder records each finished step. Its folder is complete by then; a step without a record
is resumed from its own checkpoints, or repeated.
"""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from penstock.boundary.files import own_file, read_bytes, write_text
from penstock.boundary.hub import local_weights
from penstock.boundary.trees import parse_json
from penstock.compress.cut import multiple_of, sized
from penstock.compress.measure import Workbench
from penstock.compress.page import card, to_html, worsening
from penstock.compress.steps import STEPS, StepCall, distil_run, learning_run
from penstock.config.compress import CompressConfig, Prune, StepName
from penstock.config.load import dump_toml, from_dict, to_dict
from penstock.config.model import ModelConfig, stacks, title
from penstock.config.recipes import require_startable
from penstock.errors import CheckpointError, ConfigError
from penstock.ladder.statistics import Journal
from penstock.models.convert.pretrained import read_config
from penstock.report.record import environment
from penstock.train.lock import RunLock

RECORD, PAGE, RECIPE = "compress.json", "compress.html", "compress.toml"
_FREE = ("output", "machine")
"""Settings that may change when a compression is resumed."""

Report = dict[str, Any]


def compress(config: CompressConfig, say: Callable[[str], None] = lambda words: None) -> Report:
    """Compress a model as `config` says, resuming after the last step that is recorded in `config.output`.

    `say` is called with a line on each activity. Returns the content of compress.json: `rows` with the figures of the
    original and of each step's model. The compressed model is in `export` in the output folder, together with the
    recipe.

    Raises ConfigError for an impossible model or steps, and for an output folder with steps of other settings; and
    whatever the steps raise.
    """
    if config.model is None:
        raise ConfigError("penstock compress needs a model: a run's folder, an export, or a name on the hub.")
    if not config.order:
        raise ConfigError(
            "No step is requested; set a share such as prune.layers, or target, distil.epochs or quantise. Known steps "
            f"are {', '.join(STEPS)}."
        )
    original = local_weights(config.model)
    read_config(original)  # refuses anything but a model, before a file is written
    output = Path(config.output)
    if config.plan.gpus > 1:
        raise ConfigError(
            f"plan takes {config.plan.gpus} devices, but penstock compress runs on one; give a --plan for one, or "
            "train the pruned model with penstock launch, --from and --recipe.teacher."
        )
    call = StepCall(source=original, target=output / "step", original=original, prune=config.prune)
    if "distil" in config.order:  # refuses what cannot be trained, before anything is pruned
        require_startable(distil_run(config, call))
    if "quantise" in config.order and config.quantise.learn:
        require_startable(learning_run(config, call))
    if output.resolve() in (original.resolve(), *original.resolve().parents):
        raise ConfigError(f"output is {output}, in which the model itself is; choose another folder.")
    output.mkdir(parents=True, exist_ok=True)
    with RunLock(output):
        return _compress(config, original, output, say)


def _compress(config: CompressConfig, original: Path, output: Path, say: Callable[[str], None]) -> Report:
    bench = Workbench(config, original)
    report = _record(config, output)

    def keep() -> None:
        write_text(own_file(output, RECORD), json.dumps(report, indent=1) + "\n")

    rows: list[dict[str, Any]] = report["rows"]
    if not rows:
        say(f"original: {title(bench.model)}")
        rows.append({"title": "original", "folder": str(original), **asdict(bench.figures(original))})
        keep()
    shares = config.prune
    if config.speedup is not None and "shares" not in report:
        reached, tried = reach(bench, shares, config.speedup, say)
        report |= {"shares": {name: getattr(reached, name) for name in SHARES}, "tried": tried}
        keep()
    shares = replace(shares, **report.get("shares", {}))
    for number, (name, prune) in enumerate(_calls(config, shares), 1):
        target = own_file(output, f"{number}-{name}")
        if number < len(rows):
            say(f"{target.name}: done before")
            continue
        say(f"{target.name} …")
        started = time.perf_counter()
        call = StepCall(source=Path(rows[-1]["folder"]), target=target, original=original, prune=prune)
        notes = STEPS[name](bench, call)
        folder = local_weights(target)
        figures = asdict(bench.figures(folder))
        spent = time.perf_counter() - started
        rows.append({"title": name, "folder": str(folder), **figures, "step_seconds": spent, "notes": notes})
        keep()
        say(f"{target.name}: {rows[-1]['words']}, {rows[-1]['parameters']:,} parameters, in {spent:.0f} s")
        if worse := worsening(rows[-2], rows[-1]):
            say(worse)
    if "speed" not in rows[-1]:
        _time(bench, rows)
        keep()
    _export(config, Path(rows[-1]["folder"]), output, card(config, title(bench.model), rows))
    write_text(own_file(output, PAGE), to_html(report))
    return report


def _time(bench: Workbench, rows: list[dict[str, Any]]) -> None:
    """Add to each row, and to each cut of its step, the latency and the speed relative to the original with its
    interval: all measured in turns, so that every speed has the same base. A step's last cut is its row's model."""
    cuts = [cut for row in rows for cut in row.get("notes", {}).get("cuts", ())[:-1] if "model" in cut]
    models = [bench.open(Path(row["folder"])) for row in rows]
    models += [bench.drawn(from_dict(ModelConfig, cut["model"])) for cut in cuts]
    seconds, journal = bench.latencies(models), Journal[int]()
    for turn in zip(*seconds, strict=True):
        journal.add(dict(enumerate(turn)))
    for number, (entry, rounds) in enumerate(zip([*rows, *cuts], seconds, strict=True)):
        speed = journal.joint().ratio(number, 0)
        assert speed is not None
        entry |= {"seconds": statistics.median(rounds), "speed": [speed.value, speed.low, speed.high]}
    for row in rows:
        for cut in row.get("notes", {}).get("cuts", ())[-1:]:
            cut |= {"seconds": row["seconds"], "speed": row["speed"]}


def _calls(config: CompressConfig, prune: Prune) -> Iterator[tuple[StepName, Prune]]:
    """Every call of a step, with the shares that it removes of what remains."""
    for turn in range(config.rounds):
        shares = {
            name: 1.0 - (1.0 - share * (turn + 1) / config.rounds) / (1.0 - share * turn / config.rounds)
            for name in SHARES
            for share in [getattr(prune, name)]
        }
        for name in config.order:
            if name != "quantise" or turn + 1 == config.rounds:
                yield name, replace(prune, **shares)


def _record(config: CompressConfig, output: Path) -> Report:
    """The record in the output folder, or a new one. Raises ConfigError for other settings."""
    settings = {name: value for name, value in to_dict(config).items() if name not in _FREE}
    path = output / RECORD
    if not path.exists():
        return {"settings": settings, "environment": environment(), "rows": []}
    record: Report = parse_json(
        read_bytes(path, "The record of the compression", limit=1 << 26),
        f"{path} cannot be read: it",
        error=CheckpointError,
    )
    before = from_dict(CompressConfig, record.get("settings", {}), origin=str(path), error=CheckpointError)
    differ = [name for name in settings if getattr(before, name) != getattr(config, name)]
    if differ:
        raise ConfigError(
            f"{output} holds a compression with other settings of {', '.join(differ)}; restore these to go on with it, "
            "or choose another output."
        )
    return record


def _export(config: CompressConfig, folder: Path, output: Path, about: str) -> None:
    """Write the last model, the recipe and the card, atomically."""
    target, partial = output / "export", own_file(output, "export.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(folder, partial)
    write_text(partial / RECIPE, dump_toml(config))
    write_text(partial / "README.md", about)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


# -- shares of pruning that reach a speed: by the planner's forecast, then by measuring untrained models of these sizes


MOST, PARTS = 0.95, 95
"""The largest share that is tried, and the number of shares, at equal distances."""
TRIES = 5
"""Most measurements of a search."""
SHARES = ("layers", "heads", "hidden", "experts")


def reach(
    bench: Workbench, options: Prune, target: float, say: Callable[[str], None]
) -> tuple[Prune, list[dict[str, Any]]]:
    """The least shares, all scaled together, with which a model of these sizes is measured to be `target` times as
    fast; and all choices that were measured: `shares`, and the speed relative to the model, `forecast` by the planner
    and `measured`. Each measurement corrects the next forecasts, so that no more is removed than necessary.

    Raises ConfigError if no shares are forecast, or measured, to be fast enough.
    """
    usual = options if options.enabled else _alike(bench, options)
    multiple = multiple_of(options, bench.device)
    before = bench.predicted(bench.model)
    reached = {}
    for part in range(1, PARTS + 1):
        choice = _scaled(usual, MOST * part / PARTS)
        reached[choice] = before / bench.predicted(sized(bench.model, choice, multiple=multiple))
    original, tried, factor = bench.drawn(bench.model), list[dict[str, Any]](), 1.0
    fast_enough: list[Prune] = []
    while len(tried) < TRIES:
        hopeful = [choice for choice, speed in reached.items() if speed * factor >= target]
        if not hopeful or _shares(hopeful[0]) in [choice["shares"] for choice in tried]:
            break
        choice, shares = hopeful[0], _shares(hopeful[0])
        small = bench.drawn(sized(bench.model, choice, multiple=multiple))
        slow, fast = map(statistics.median, bench.latencies([original, small]))
        tried.append({"shares": shares, "forecast": reached[choice], "measured": slow / fast})
        words = ", ".join(f"{name} {share:.2f}" for name, share in shares.items())
        say(f"shares {words}: forecast {reached[choice]:.2f}x, measured {slow / fast:.2f}x")
        if slow / fast >= target:
            fast_enough.append(choice)
        elif fast_enough:
            break
        factor = slow / fast / reached[choice]
    if fast_enough:
        return fast_enough[-1], tried
    best = max([factor * max(reached.values()), *(choice["measured"] for choice in tried)])
    raise ConfigError(
        f"target is {target:g}x, but pruning up to {MOST:.0%} gives {best:.2f}x at most on this machine; choose a "
        "lower target, or remove other parts."
    )


def _alike(bench: Workbench, options: Prune) -> Prune:
    """Equal shares of layers, heads and hidden features; no heads if their slopes follow from their number."""
    heads = 0.0 if any(stack.positions == "alibi" for stack in stacks(bench.model)) else 0.5
    return replace(options, layers=0.5, heads=heads, hidden=0.5)


def _scaled(options: Prune, largest: float) -> Prune:
    """The shares in the same proportions, with the given largest one."""
    most = max(getattr(options, name) for name in SHARES)
    changes: dict[str, Any] = {name: getattr(options, name) / most * largest for name in SHARES}
    return replace(options, **changes)


def _shares(options: Prune) -> dict[str, float]:
    return {name: getattr(options, name) for name in SHARES if getattr(options, name)}
