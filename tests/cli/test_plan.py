"""`penstock plan` as a user meets it."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.sweeps import sweep
from penstock.cli import main
from penstock.cli.launch import python_arguments
from penstock.cli.plan_scaling import overtrained
from penstock.config.model import PRESETS, stacks
from penstock.config.plan import Plan
from penstock.config.rules import problems, require
from penstock.errors import ExitCode
from penstock.planner.scaling_laws import BESIROGLU

SMALL = ["plan", "gpt-7.5b", "--machine", "a100-80g", "--gpus", "16", "--global-batch", "128"]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_table_ranks_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *SMALL, "--tokens", "300e9", "--price", "2", "--sensitivity")
    assert code == 0
    assert "gpt-7.5b (7.47 billion parameters) on 16 a100-80g, 128 samples a step" in out
    line = re.search(r"^best: (.*)$", out, re.MULTILINE)
    assert line is not None
    assert Plan.parse(line[1]).gpus == 16
    assert re.search(
        r"[\d.]+ days of training, [\d,]+ GPU hours, [\d.]+ MWh at rated power, US\$ [\d,]+ to pay", out
    )
    assert "tokens/s/GPU" in out
    assert "slower" in out
    assert "what would help most:" in out


def test_json_has_units_in_its_names(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *SMALL, "--json", "--top", "3", "--tokens", "1e9")
    assert code == 0
    data = json.loads(out)
    assert data["layouts_tried"] > 50
    assert len(data["layouts"]) == 3
    first = data["layouts"][0]
    assert {"iteration_seconds", "memory_bytes", "mfu", "hfu", "days", "gpu_hours", "plan"} <= set(first)
    assert sum(first["seconds"].values()) == pytest.approx(first["iteration_seconds"])
    times = [one["iteration_seconds"] for one in data["layouts"]]
    assert times == sorted(times)


def test_the_fastest_layout_that_trains_today_is_named_beside_the_fastest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """KV heads that are copied to devices are planned only."""
    words = (
        "plan", "llama3-8b", "--model.kv_heads", "2", "--machine", "h100", "--gpus", "16", "--global-batch", "4",
    )  # fmt: skip
    model: Any = replace(PRESETS["llama3-8b"], kv_heads=2)  # type: ignore[call-arg]
    _, out, _ = run(capsys, *words)
    best, runs = (
        re.search(rf"^{re.escape(start)}: (.*?)(?: \(([\d.]+)% slower\))?$", out, re.MULTILINE)
        for start in ("best", "best that penstock train runs")
    )
    assert best is not None
    assert problems(Plan.parse(best[1]), model, run=True)
    assert runs is not None
    assert not problems(Plan.parse(runs[1]), model, run=True)
    assert Plan.parse(runs[1]).gpus == 16
    _, out, _ = run(capsys, *words, "--json", "--top", "1")
    data = json.loads(out)
    assert data["best_runnable"]["plan"] == runs[1]
    slower = data["best_runnable"]["iteration_seconds"] / data["layouts"][0]["iteration_seconds"] - 1
    assert float(runs[2]) == pytest.approx(100 * slower, abs=0.06)


def test_images_are_counted_as_images_and_hours_as_hours(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "plan", "vit-l16", "--gpus", "8", "--images", "1.28e6", "--epochs", "90", "--price", "2", "--top", "1",
    )  # fmt: skip
    _, out, _ = run(capsys, *words)
    assert "images/s/GPU" in out
    assert "tokens/s" not in out
    total = r"^\d\.\d h of training, \d+ GPU hours, \d+ kWh at rated power, US\$ \d+ to pay$"
    assert re.search(total, out, re.MULTILINE)
    _, whole, _ = run(capsys, *words, "--json")
    best = json.loads(whole)["layouts"][0]
    shown = re.search(r"([\d,]+)$", out.splitlines()[2].strip())
    assert shown is not None
    assert float(shown[1].replace(",", "")) == round(best["samples_per_second"] / 8)


def test_where_nothing_trains_today_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*SMALL, "--base", "precision=O1 offload=activations compile=blocks attention=flash")
    _, out, _ = run(capsys, *words)
    assert "penstock train runs none of them yet" in out
    assert "penstock launch" not in out
    _, out, _ = run(capsys, *words, "--json", "--top", "1")
    assert json.loads(out)["best_runnable"] is None
    code, out, error = run(capsys, *words, "--run")
    assert (code, out) == (ExitCode.CONFIG, "")
    assert "penstock train runs none of the" in error


@pytest.mark.parametrize("model", ["gpt-7.5b", "vit-h14"])
def test_run_prints_the_command_that_trains(capsys: pytest.CaptureFixture[str], model: str) -> None:
    code, out, _ = run(capsys, "plan", model, *SMALL[2:], "--run")
    assert code == 0
    words = shlex.split(out)
    assert words[:7] == ["penstock", "launch", "--procs", "8", "--nnodes", "2", "--rdzv"]
    assert words[8:-1] == ["--", "train", model, "--plan"]
    require(Plan.parse(words[-1]), PRESETS[model], run=True)
    assert python_arguments(words[9:])[:3] == ["-m", "penstock", "train"]
    code, _, error = run(capsys, "plan", model, "--run", "--json")
    assert code == ExitCode.CONFIG
    assert "--run was given with --json" in error


def test_the_page_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "a" / "plan.html"
    code, _, _ = run(capsys, *SMALL, "--html", str(page))
    assert code == 0
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") >= 6
    assert "http://" not in text.replace("http://www.w3.org", "")
    for words in ("time goes", "memory goes", "Why the others are slower", "More devices, or fewer"):
        assert words in text


def test_a_pipeline_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    code, _, _ = run(
        capsys, "plan", "gpt-1t", "--machine", "a100-80g", "--gpus", "512", "--global-batch", "512",
        "--html", str(page),
    )  # fmt: skip
    assert code == 0
    assert "The pipeline over time" in page.read_text(encoding="utf-8")


def test_one_plan_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    line = "precision=O2 tp=8 sp=true pp=8 accumulate=64 recompute=selective attention=plain compile=blocks"
    code, out, _ = run(capsys, "plan", "gpt-175b", "--machine", "a100-80g", "--explain", line)
    assert code == 0
    assert "matrix products" in out
    assert "pipeline bubble" in out
    assert "GiB on the fullest device" in out
    assert re.search(r"Activations of 8 micro-batches: .*mlp [\d.]+ GiB", out)
    code, out, _ = run(
        capsys, "plan", "gpt-175b", "--machine", "a100-80g", "--explain", line, "--json", "--tokens", "1e9"
    )
    assert code == 0
    data = json.loads(out)
    assert data["gpus"] == data["layouts"][0]["gpus"] == 64
    assert data["layouts"][0]["days"] > 0


OWN = "precision=O2 optimizer=fused attention=flash compile=blocks"
"""What the planner takes by itself on an A100."""


@pytest.mark.parametrize(
    ("line", "taken"),
    [
        ("tp=4 dp=4 accumulate=32", OWN),
        ("tp=4 dp=4 accumulate=32 attention=plain", OWN.replace(" attention=flash", "")),
        ("tp=4 dp=4 accumulate=32 precision=O0", ""),
        ("baseline tp=4 dp=4 accumulate=32", ""),
    ],
)
def test_a_line_without_a_precision_gets_the_planners_own_and_says_so(
    capsys: pytest.CaptureFixture[str], line: str, taken: str
) -> None:
    model = ("plan", "gpt-7.5b", "--machine", "a100-80g")
    for words in (("--explain", line), ("--gpus", "16", "--base", f"{line} micro_batch=8", "--top", "1")):
        _, out, _ = run(capsys, *model, *words)
        assert (f"assumed, for the line names no precision: {taken}\n" in out) == bool(taken), out
        assert ("precision=O2" in out) == bool(taken)
        _, out, _ = run(capsys, *model, *words, "--json")
        assert json.loads(out)["assumed"].endswith(taken)
        assert Plan.parse(json.loads(out)["layouts"][0]["plan"]).precision == ("O2" if taken else "O0")


def test_a_wish_is_set_beside_the_best_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    wish, layout = "tp=4", "tp=8 dp=2 accumulate=8"
    words = ("--explain", f"{wish} | {layout}", "--tokens", "3e11", "--price", "2", "--grams-per-kwh", "400")
    code, out, err = run(capsys, *SMALL, *words)
    assert code == 0, err
    cells = [re.split(r"\s{2,}", row.strip()) for row in out.splitlines()]
    assert ["best of all", wish, layout] in cells
    rows = {first: others for first, *others in cells}
    for row, unit in (
        ("one step", "s"), ("memory of the fullest device", "GiB"), ("energy of a step, at rated power", "Wh"),
        ("time of the run", "days"), ("energy of the run", "MWh"), ("CO₂ of the run", "t"),
    ):  # fmt: skip
        assert [cell.split()[-1] for cell in rows[row]] == [unit] * 3
    assert [cell[:3] for cell in rows["cost of the run"]] == ["US$"] * 3
    assert re.search(r"tp=4: .*tp=4.*\n  [\d.]+% slower: .* more for ", out)
    _, out, _ = run(capsys, *SMALL, *words, "--json")
    best, other, whole = json.loads(out)["layouts"]
    assert Plan.parse(other["plan"]).tp == 4
    assert Plan.parse(whole["plan"]) == Plan.parse(f"{OWN} {layout}")
    assert best["iteration_seconds"] < other["iteration_seconds"]
    assert best["plan"] == json.loads(run(capsys, *SMALL, "--json")[1])["layouts"][0]["plan"]


def test_a_second_machine_is_set_beside_at_its_own_price(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = (
        "plan", "gpt2", "--machine", "a100-80g", "--gpus", "2", "--base", "tp=1 micro_batch=8", "--tokens", "1e9",
    )  # fmt: skip
    words += ("--price", "2", "--against", "h100", "--against-price", "5")
    _, out, _ = run(capsys, *words, "--json", "--html", str(tmp_path / "page.html"))
    data = json.loads(out)
    for one, machine, price in ((data["layouts"][0], "a100-80g", 2), (data["against"], "h100", 5)):
        assert one["machine"] == machine
        assert one["cost"] == pytest.approx(price * one["gpu_hours"])
    assert "Side by side" in (tmp_path / "page.html").read_text(encoding="utf-8")
    _, out, _ = run(capsys, *words)
    assert re.search(r"devices +2 a100-80g +2 h100", out)
    assert "best on h100: precision=" in out
    # Two offers of one machine differ by their prices.
    _, out, _ = run(capsys, *words[:-3], "a100-80g", *words[-2:])
    assert re.search(r" a100-80g +a100-80g of --against *\n", out)
    assert "best on a100-80g of --against: precision=" in out


def test_a_machine_that_penstock_does_not_run_on_is_planned_for_and_said_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = run(
        capsys, "plan", "gpt2", "--machine", "tpu-v5p", "--gpus", "2", "--base", "tp=1", "--top", "1"
    )
    assert code == 0
    assert "Penstock does not run on tpu-v5p" in out
    assert "to run it" not in out
    code, _, error = run(
        capsys, "plan", "gpt2", "--machine", "trainium2", "--gpus", "2", "--base", "tp=1", "--run"
    )
    assert code == ExitCode.CONFIG
    assert "runs none of the" in error


def test_flops_energy_and_co2_follow_from_the_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    """GPT-3's arithmetic (Narayanan et al. 2021): 4.5e18 FLOPs an iteration of 1,536 samples with recomputation."""
    line = "precision=O2 tp=8 pp=8 dp=16 accumulate=96 micro_batch=1 recompute=full attention=plain"
    words = ("plan", "gpt-175b", "--machine", "a100-80g", "--explain", line, "--tokens", "300e9")
    _, out, _ = run(capsys, *words, "--grams-per-kwh", "250")
    assert re.search(
        r"FLOPs: 3\.\d+e18 a step \(4\.5\d*e18 with what is computed again\), [\d.]+e23 in all", out
    )
    _, out, _ = run(capsys, *words, "--json", "--grams-per-kwh", "250")
    one = json.loads(out)["layouts"][0]
    steps = 300e9 / 2048 / 1536
    assert one["step_hardware_flops"] == pytest.approx(4.5e18, rel=0.01)
    assert one["step_hardware_flops"] / one["step_model_flops"] == pytest.approx(one["hfu"] / one["mfu"])
    assert one["hardware_flops"] == pytest.approx(steps * one["step_hardware_flops"])
    assert one["step_watt_hours"] == pytest.approx(1024 * 400 * one["iteration_seconds"] / 3600)
    assert one["energy_megawatt_hours"] == pytest.approx(steps * one["step_watt_hours"] / 1e6)
    assert one["co2_kilograms"] == pytest.approx(one["energy_megawatt_hours"] * 250)


def test_scaling_laws_disagree_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", "--compute", "5.76e23")
    assert code == 0
    assert re.search(r"Hoffmann 2022 .* 92\.6 ", out)
    assert re.search(r"Besiroglu 2024 .* 18\.4 ", out)
    assert "Kaplan 2020" in out
    assert "trained for longer to the same loss" in out
    code, out, _ = run(capsys, "plan", "--budget-gpu-hours", "1e5", "--served-tokens", "1e12", "--json")
    assert code == 0
    assert len(json.loads(out)["allocations"]) == 7


def test_a_smaller_model_of_the_same_loss_costs_more_to_train_and_less_to_serve() -> None:
    free = overtrained(BESIROGLU, 1e22, 0.0)
    assert free[0]["total_flops"] == pytest.approx(1e22)
    costs = [one["training_flops"] for one in free]
    assert costs == sorted(costs)
    served = overtrained(BESIROGLU, 1e22, 1e14)
    assert served[0]["total_flops"] > served[2]["total_flops"]
    assert served[0]["total_flops"] == pytest.approx(1e22 + 2e14 * served[0]["parameters"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "needs a model"),
        ("gpt-17b", "Did you mean 'gpt-175b'"),
        ("gpt2 --machine h10", "Give one of v100, "),
        ("gpt2 --gpus 7 --explain tp=7", "with tp=7: tensor parallel degrees must divide the heads"),
        ("gpt2 --tokens 1 --images 1", "keep one"),
        (
            "gpt-175b --gpus 1000 --global-batch 1537",
            "No layout has 1000 devices and 1537 samples a step: tensor parallel degrees must divide the heads, stages "
            "must divide the 96 blocks, and replicas the samples. Try the global batch 1500 or 1625.",
        ),
        (
            "gpt2 --gpus 64 --global-batch 1 --base 'tp=1 pp=1'",
            "Try the global batch 64, or the number of devices 1.",
        ),
        ("vit-b16 --model.sequence 5", "belongs to the family decoder"),
        ("gpt2 --explain tp=2 --html x.html", "--explain was given with --html"),
        ("gpt2 --explain 'tp=2 |'", "--explain has no Plan line before or after a `|`"),
        ("gpt2 --gpus 64 --explain dp=3", "--gpus is 64, which dp=3 of --explain (3) does not divide"),
        ("gpt2 --against-price 2 --tokens 1", "without --against"),
        ("gpt2 --global-batch 9 --explain 'dp=8 micro_batch=1'", "--global-batch is 9, but"),
        ("gpt2 --explain dp=8 --sensitivity", "--explain was given with --sensitivity"),
        ("gpt2 --compute 1e20", "--compute was given with a model"),
        ("--compute 1e20 --tokens 1 --gpus 9", "--compute was given with --gpus and --tokens"),
        ("--compute 1e20 --budget-gpu-hours 1", "keep one"),
        ("--compute -1", "must be above 0"),
        ("gpt-1t --gpus 8", "To make it fit: use "),
        ("gpt-175b --gpus 1", "To make it fit: use 40 devices or more."),
    ],
)
def test_bad_input_says_what_to_do(capsys: pytest.CaptureFixture[str], words: str, message: str) -> None:
    code, _, err = run(capsys, "plan", *shlex.split(words))
    assert code == (ExitCode.OUT_OF_MEMORY if "To make it fit" in message else ExitCode.CONFIG)
    assert message in err


# One of each kind with every change; all of them take half a minute.
SAMPLE = {"vit-ti16", "gpt2", "gpt-1t", "llama3-70b", "bert-large"}


@pytest.mark.parametrize("name", sweep(sorted(PRESETS), SAMPLE))
def test_every_preset_has_a_layout_on_enough_devices(capsys: pytest.CaptureFixture[str], name: str) -> None:
    # Trillions of parameters need their thousands of devices; what is small need not use them all.
    gpus = 2048 if stacks(PRESETS[name])[0].width > 8192 else 64
    code, out, _ = run(capsys, "plan", name, "--gpus", str(gpus), "--top", "1")
    assert code == 0
    assert "best: " in out
