"""A whole compression: its steps, its record, going on after a kill, and its report."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from helpers.toy import toy_machine
from penstock.cli import main
from penstock.compress import measure, run
from penstock.compress.page import table, worsening
from penstock.config.compress import CompressConfig, Distil, Prune, load_compression
from penstock.config.machine import Machine, save_machine
from penstock.config.plan import Plan
from penstock.config.recipes import load_run
from penstock.errors import ConfigError
from penstock.models.convert import from_pretrained
from penstock.models.convert.files import read_state_dict
from penstock.models.convert.pretrained import rounded_weights
from penstock.planner.terms import assumption
from penstock.train import train

SMALL = {
    "model": "vit-digits", "model.width": "32", "model.depth": "4", "model.heads": "4", "model.mlp_width": "64",
    "plan": "micro_batch=64", "device": "cpu", "recipe.warmup_steps": "0",
}  # fmt: skip


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run, and measurements that take no time."""
    folder = tmp_path_factory.mktemp("teacher")
    machine = toy_machine(folder)  # so that nothing is probed
    options = {"recipe.steps": "20", "output": str(folder / "run"), "machine": machine}
    train(load_run(overrides={**SMALL, **options}))
    return folder / "run"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, known_machine: None) -> None:
    monkeypatch.setattr(measure, "ROUNDS", 2)
    monkeypatch.setattr(measure, "ROUND_SECONDS", 0.001)


def _config(teacher: Path, output: Path, **changes: Any) -> CompressConfig:
    overrides = {
        "model": str(teacher), "prune.layers": "0.5", "prune.heads": "0.5", "prune.hidden": "0.25",
        "prune.samples": "64", "distil.steps": "4", "output": str(output), "device": "cpu", **changes,
    }  # fmt: skip
    return load_compression(overrides=overrides)


def test_rounds_prune_and_distil_and_leave_a_model_with_its_recipe(teacher: Path, tmp_path: Path) -> None:
    config = _config(teacher, tmp_path / "out", rounds="2")
    assert config.plan == Plan(micro_batch=64)  # of the run that the model is of
    said: list[str] = []
    report = run.compress(config, said.append)
    titles = [row["title"] for row in report["rows"]]
    assert titles == ["original", "prune", "distil", "prune", "distil"]
    depths = [from_pretrained(row["folder"]).graph.runs[0].stack.depth for row in report["rows"]]
    assert depths == [4, 3, 3, 2, 2]
    last = from_pretrained(tmp_path / "out")
    layers = last.graph.runs[0].stack.layers
    assert sum(layer.heads for layer in layers) in (4, 5)  # rounds round, too
    assert sum(layer.perceptron.width for layer in layers) == 96
    assert report["rows"][-1]["parameters"] == sum(p.numel() for p in last.parameters())
    for row in report["rows"]:
        assert row["seconds"] > 0
        assert row["predicted_seconds"] > 0
        assert row["memory_bytes"] > 4 * row["parameters"]
        assert row["predicted_memory_bytes"] == pytest.approx(row["memory_bytes"], rel=0.05)
        assert 0 <= row["metrics"]["top1"] <= 1
    cuts = report["rows"][1]["notes"]["cuts"]
    assert [cut["words"].partition(": ")[2].split()[0] for cut in cuts] == ["layers", "heads", "hidden"]
    assert cuts[0]["predicted_seconds"] > cuts[1]["predicted_seconds"] > cuts[2]["predicted_seconds"]
    assert cuts[-1]["speed"] == report["rows"][1]["speed"], "one model has one speed, over the original"
    assert report["rows"][0]["speed"] == [1.0, 1.0, 1.0]
    for entry in (*report["rows"], *cuts):
        speed, low, high = entry["speed"]
        assert low <= speed <= high
    assert (
        "by these steps: prune, distil, prune, distil."
        in (tmp_path / "out" / "export" / "README.md").read_text()
    )
    again = load_compression(file=tmp_path / "out" / "export" / run.RECIPE)
    assert again == config
    page = (tmp_path / "out" / run.PAGE).read_text()
    assert page.count("<svg") == 2
    assert "src=" not in page
    assert "encoder: layers 4 → 3" in page

    # The same again does nothing, also where the record is older than a setting; and another recipe does not go on.
    record = json.loads((tmp_path / "out" / run.RECORD).read_text())
    del record["settings"]["batch"]
    (tmp_path / "out" / run.RECORD).write_text(json.dumps(record))
    said.clear()
    assert run.compress(config, said.append)["rows"] == report["rows"]
    assert all(words.endswith("done before") for words in said)
    with pytest.raises(ConfigError, match=r"other settings of distil; restore these"):
        run.compress(replace(config, distil=Distil(steps=5)))


@pytest.mark.parametrize(
    ("name", "before", "after", "words"),
    [
        (
            "perplexity",
            3.35,
            3.6,
            "distil made the model worse: perplexity 3.35 → 3.6. Try a lower --distil.lr",
        ),
        ("perplexity", 3.6, 3.35, ""),
        ("top1", 0.951, 0.93, "distil made the model worse: top1 0.951 → 0.93."),
        ("top1", 0.9512, 0.9511, ""),
        ("top1", 0.93, 0.951, ""),
    ],
)
def test_a_step_that_makes_a_model_worse_says_so(name: str, before: float, after: float, words: str) -> None:
    rows = [{"title": "original", "metrics": {name: before}}, {"title": "distil", "metrics": {name: after}}]
    said = worsening(*rows)
    assert said.startswith(words)
    assert bool(said) == bool(words)


def test_worse_models_are_reported_while_compressing_and_in_the_table(teacher: Path, tmp_path: Path) -> None:
    said: list[str] = []
    options = {"prune.hidden": "0.75", "distil.steps": "none"}
    report = run.compress(_config(teacher, tmp_path / "small", **options), said.append)
    worse = worsening(*report["rows"])
    assert (worse in said) == bool(worse)
    report["rows"][0]["metrics"]["top1"], report["rows"][1]["metrics"]["top1"] = 0.9, 0.1
    assert "prune made the model worse: top1 0.9 → 0.1." in table(report).text


@pytest.mark.slow
def test_a_killed_compression_goes_on_and_ends_as_if_it_had_not_been(teacher: Path, tmp_path: Path) -> None:
    words = ["compress", str(teacher), "--prune.layers", "0.5", "--prune.samples", "64", "--distil.steps", "80",
             "--prune.layers_by", "even", "--device", "cpu", "--output", str(tmp_path / "killed")]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("2-distil"):
            break
    checkpoints = tmp_path / "killed" / "2-distil" / "checkpoints" / "latest"
    while not checkpoints.exists():
        assert process.poll() is None, "it ended before it was killed"
        time.sleep(0.02)
    process.kill()
    process.wait()
    process.stderr.close()
    record = json.loads((tmp_path / "killed" / run.RECORD).read_text())
    assert [row["title"] for row in record["rows"]] == ["original", "prune"]
    pruned = (tmp_path / "killed" / "1-prune" / "model.safetensors").stat().st_mtime_ns
    assert main(words) == 0
    assert main([*words[:-1], str(tmp_path / "whole")]) == 0
    assert (tmp_path / "killed" / "1-prune" / "model.safetensors").stat().st_mtime_ns == pruned
    went_on, whole = (read_state_dict(tmp_path / name / "export") for name in ("killed", "whole"))
    assert all(torch.equal(value, whole[name]) for name, value in went_on.items())


def test_a_target_is_forecast_and_then_measured(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With latencies that are proportional to parameters, so that the test knows what is fast enough."""

    def by_size(self: Any, models: Any) -> list[list[float]]:
        return [[float(sum(weight.numel() for weight in model.parameters()))] * 3 for model in models]

    monkeypatch.setattr(measure.Workbench, "latencies", by_size)
    config = _config(
        teacher, tmp_path / "out", target="2x", **{"distil.steps": "none", "prune.by": "magnitude"}
    )
    report = run.compress(config)
    tried = report["tried"]
    assert tried[-1]["measured"] >= 2 > max((one["measured"] for one in tried[:-1]), default=0)
    shares = tried[-1]["shares"]
    assert shares["layers"] == pytest.approx(2 * shares["hidden"])
    rows = report["rows"]
    assert rows[0]["seconds"] / rows[1]["seconds"] == pytest.approx(tried[-1]["measured"], rel=0.25)
    sizes = [rows[0]["seconds"] / cut["seconds"] for cut in rows[1]["notes"]["cuts"]]
    assert sizes == sorted(sizes)
    assert [cut["speed"][0] for cut in rows[1]["notes"]["cuts"]] == pytest.approx(sizes)
    with pytest.raises(ConfigError, match="choose a lower target"):
        run.compress(replace(config, target="5000x", output=str(tmp_path / "other")))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "No step is requested.*Known steps are prune, distil, quantise"),
    ({"target": "1x"}, "above 1x"),
    ({"target": "fast"}, "a number such as 3x"),
    ({"steps": "fold"}, "must be 'prune', 'distil' or 'quantise'"),
    ({"steps": "distil"}, "set distil.epochs"),
    ({"steps": "prune"}, "nothing is removed"),
    ({"steps": "distil,distil", "distil.steps": "3"}, "twice"),
    ({"prune.layers": "1"}, "below 1"),
    (
        {"distil.steps": "3", "distil.scores": "1", "prune.heads": "0.5"},
        "heads are pruned; use distil.attention",
    ),
    ({"distil.steps": "3", "distil.scores": "1", "target": "2x"}, "heads are pruned; use distil.attention"),
    ({"distil.steps": "3", "plan": "dp=2"}, "runs on one"),
    ({"distil.steps": "3", "plan": "compile=whole"}, "use compile=blocks"),
    ({"distil.steps": "3", "output": "."}, "in which the model itself is"),
]


@pytest.mark.parametrize(("overrides", "words"), REFUSED)
def test_what_cannot_be_compressed_is_refused(
    overrides: dict[str, Any], words: str, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(teacher.parent)
    with pytest.raises(ConfigError, match=words):
        run.compress(load_compression(overrides={"model": "run", "output": "new", **overrides}))
    assert not Path("new").exists(), "nothing is pruned before"


def test_settings_come_from_the_run_then_the_recipe_then_the_options(teacher: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text("rounds = 3\n[prune]\nlayers = 0.5\n[recipe]\nlr = 1e-4\n")
    config = load_compression(file=recipe, overrides={"model": str(teacher), "rounds": "2"})
    assert (config.rounds, config.prune, config.recipe.lr) == (2, Prune(layers=0.5), 1e-4)
    assert config.recipe.weight_decay == load_run(overrides=SMALL).recipe.weight_decay
    from penstock.cli.compress import compress

    verb: Any = compress
    words = {"setting__recipe__lr": "2e-4", "config": recipe}
    assert verb.read((str(teacher),), words).recipe.lr == 2e-4


@pytest.mark.sweep
def test_the_last_round_quantises_what_was_pruned_and_taught(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config(
        teacher, tmp_path / "out", rounds="2", quantise="int8", **{"quantise.drop": "100", "quantise.samples": "64"},
    )  # fmt: skip
    assert config.order == ("prune", "distil", "quantise")
    report = run.compress(config)
    rows = report["rows"]
    assert [row["title"] for row in rows] == ["original", "prune", "distil", "prune", "distil", "quantise"]
    assert rows[-2]["predicted_seconds"] < rows[0]["predicted_seconds"]
    formats = {form for form, _ in rounded_weights(tmp_path / "out" / "export").values()}
    assert formats == {"int8"}
    assert rows[-1]["notes"]["layers"] == 8, "four of each block"
    assert rows[-1]["notes"]["points_lost"] <= 100
    assert rows[-1]["parameters"] == rows[-2]["parameters"]
    assert rows[-1]["bytes"] < 0.6 * rows[-2]["bytes"]
    assert rows[-1]["memory_bytes"] < rows[-2]["memory_bytes"]
    # The kernel pads what it packs: 0.77 of these 45 kB, and 0.87 where layers have 96 features.
    assert rows[-1]["predicted_memory_bytes"] == pytest.approx(rows[-1]["memory_bytes"], rel=0.3)
    assert penstock.Classifier(tmp_path / "out" / "export").model is not None
    # The toy machine's rate in int8 is not known; with one, latency is predicted by it.
    assert rows[-1]["predicted_seconds"] is None
    bench, model = measure.Workbench(config, teacher / "export"), penstock.PRESETS["vit-s16"]
    rates = {**bench.machine.peak_flops, "bf16": 1e11, "int8": 4e11}
    bench.__dict__["machine"] = replace(bench.machine, peak_flops=rates)
    assert bench.predicted(model, "int8") < 0.7 * bench.predicted(model)
    # Scales that learn: the step before is calibrated, and the export is what was trained.
    peaks = dict.fromkeys(("fp32", "bf16", "fp16", "int8"), 1e11)
    desk = Machine(name="desk", device="cpu", source="measured", peak_flops=peaks, launch_seconds=1e-6)
    machine = str(save_machine(desk, tmp_path / "machine.json"))
    config = load_compression(overrides={
        "model": str(teacher), "quantise": "int8", "quantise.inputs": "static", "quantise.learn": "3",
        "quantise.samples": "64", "output": str(tmp_path / "learned"), "device": "cpu", "machine": machine,
    })  # fmt: skip
    report = run.compress(config)
    (_, row) = report["rows"]
    assert row["assumption"] == assumption(desk, "int8") != ""
    assert row["assumption"] in (tmp_path / "learned" / run.PAGE).read_text(encoding="utf-8")
    assert row["notes"]["points_lost"] == pytest.approx(
        100 * (rows[0]["metrics"]["top1"] - row["metrics"]["top1"])
    )
    export, small = tmp_path / "learned" / "export", bench.model
    every = rounded_weights(export)
    whole, _ = bench.forecast(export, small)
    plain = bench.predicted(small)
    assert whole == bench.predicted(small, "int8") != plain
    # Where the first of four blocks alone is in int8, a quarter of the time is.
    monkeypatch.setattr(
        measure, "rounded_weights", lambda _: {n: every[n] for n in every if ".blocks.0." in n}
    )
    assert bench.forecast(export, small)[0] == pytest.approx((whole + 3 * plain) / 4)
    start, learned = (rounded_weights(tmp_path / "learned" / name) for name in ("1-quantise-start", "export"))
    assert start.keys() == learned.keys()
    moved = [not torch.equal(start[name][1].numbers, weight.numbers) for name, (_, weight) in learned.items()]
    assert all(moved)
    assert all(weight.input_scale is not None for _, weight in learned.values())
    with pytest.raises(ConfigError, match=r"set quantise\.inputs to static"):
        _config(teacher, tmp_path / "x", **{"quantise": "int8", "quantise.learn": "3"})
    for changes, words in (
        ({"steps": "quantise,prune", "quantise": "int8"}, "put quantise last"),
        ({"steps": "prune,quantise"}, "but no format"),
    ):
        with pytest.raises(ConfigError, match=words):
            _config(teacher, tmp_path / "x", **changes)


@pytest.mark.slow
def test_a_mixture_whose_experts_are_given_is_compressed(tmp_path: Path) -> None:
    machine = toy_machine(tmp_path)
    options = {
        "model": "ddigits-moe-tiny", "recipe.steps": "2", "output": str(tmp_path / "run"), "machine": machine,
    }  # fmt: skip
    train(load_run(overrides={**SMALL, **options, "model.depth": "2"}))
    wanted = {
        "model": str(tmp_path / "run"), "quantise": "int8", "output": str(tmp_path / "out"), "device": "cpu",
    }  # fmt: skip
    first, last = run.compress(load_compression(overrides={**wanted, "machine": machine}))["rows"]
    assert last["bytes"] < 0.7 * first["bytes"]
    assert last["seconds"] > 0.0


@pytest.mark.parametrize(
    ("setting", "instead"),
    [("epochs", "distil.epochs"), ("teacher_weight", "distil.weight"), ("teacher", "the original")],
)
def test_a_setting_of_the_recipe_that_is_not_used_is_refused_by_name(setting: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=f"no use for recipe.{setting}, .*{instead}"):
        load_compression(overrides={f"recipe.{setting}": "3"})
