"""The greeting, and what `penstock demo` makes of a ladder. The whole demo is run once, small, among the slow tests."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from penstock import Plan
from penstock.cli import GREETING, main
from penstock.cli.demo import (
    Rise,
    Tuned,
    demo_figure,
    gpt3_lines,
    next_lines,
    padded_lines,
    picture,
    result_line,
)
from penstock.ladder.factory import padding_of
from penstock.ladder.padded import bert
from penstock.models.anatomy import set_switches

ROOT = Path(__file__).parents[2]
RISES = (
    Rise(title="baseline fp32", ratio=1.0, low=1.0, high=1.0, predicted=1.0, images_per_second=400.0),
    Rise(title="compile <whole>", ratio=1.5, low=1.4, high=1.6, predicted=1.7, images_per_second=600.0),
)
FOUND = Tuned(plan="compile=whole", rises=RISES, predicted=1.7, within_noise=True, machine="a CPU")


def test_the_bare_command_greets_with_four_things_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    told = capsys.readouterr().out
    assert told == f"{GREETING}\n"
    assert [line.split()[1] for line in told.splitlines() if line.startswith("  penstock ")] == [
        "demo", "tune", "ladder", "plan",
    ]  # fmt: skip
    assert all(len(line) <= 80 for line in told.splitlines())


def test_the_greeting_loads_as_little_as_help_does() -> None:
    program = "import sys; from penstock.cli import main; main([]); print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}
    assert loaded.isdisjoint({"torch", "numpy"})


def test_the_result_is_one_line() -> None:
    assert result_line(FOUND, 0.983) == (
        "baseline 400 images/s → Plan 600 images/s (1.50×), same loss within noise; 98.3 % top-1; predicted 1.70×"
    )
    assert "outside the noise of seeds" in result_line(replace(FOUND, within_noise=False), 0.9)
    assert "the same but for the order of sums" in result_line(replace(FOUND, within_noise=None), 0.9)
    half = replace(FOUND, within_noise=None, plan="precision=O1")
    assert "losses not compared" in result_line(half, 0.9)
    assert padded_lines(replace(half, unit="samples"))[0] == (
        "transformers' BERT, padded texts: baseline 400 samples/s → Plan 600 samples/s (1.50×), losses not compared; "
        "predicted 1.70×"
    )
    nothing = replace(FOUND, nothing="nothing beyond ±4.2 %", rises=RISES[:1])
    assert "baseline 400 images/s: nothing beyond ±4.2 % here, so the plain Plan stands" in result_line(
        nothing, 0.9
    )


def test_half_of_the_padded_texts_is_padding() -> None:
    """The ladder can leave it out of the model, which then computes the same."""
    model, batch, loss = bert()
    assert 0.4 < padding_of(batch) < 0.7
    model.eval()
    kept = loss(model, batch)
    set_switches(model, Plan(padding="remove"))
    torch.testing.assert_close(loss(model, batch), kept)


def test_the_picture_is_an_image_of_its_own() -> None:
    drawn = demo_figure("A demo", RISES, ["some words"])
    tree = ElementTree.fromstring(drawn)
    words = [text.text for text in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert "1.50×   600 images/s" in words
    assert "compile <whole>" in words
    assert "some words" in words
    with pytest.raises(ValueError, match="at least the baseline"):
        demo_figure("A demo", (), [])


def test_the_planner_answers_for_gpt3_in_two_lines() -> None:
    first, second = gpt3_lines()
    assert "1,024 A100" in first
    assert "days for 300 billion tokens" in first
    assert second.startswith("with tp=")


def test_what_to_type_next_are_commands_that_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    told = next_lines(tmp_path)
    assert not any("activate" in line for line in told)
    assert [line.split()[1] for line in told[2:]] == ["ladder", "ladder", "tune", "plan"]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").touch()
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert next_lines(tmp_path)[2] == f"  . {tmp_path / 'bin' / 'activate'}"


def test_the_readme_shows_the_picture_of_its_record() -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "demo_cpu.json").read_text(encoding="utf-8"))
    assert (ROOT / "docs" / "demo.svg").read_text(encoding="utf-8") == picture(record)
    rises = tuple(Rise(**rise) for rise in record["rises"])
    found = Tuned(**{field.name: record[field.name] for field in fields(Tuned)} | {"rises": rises})
    assert record["lines"][0] == result_line(found, record["top1"])
    assert record["within_noise"] is True


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("known_machine")
def test_a_short_demo_runs_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["demo", "--output", str(tmp_path / "demo"), "--budget", "24", "--epochs", "2"]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "baseline " in told
    assert "GPT-3 on 1,024 A100 GPUs" in told
    found = json.loads((tmp_path / "demo" / "demo.json").read_text(encoding="utf-8"))
    assert found["rises"][0]["ratio"] == 1.0
    assert 0.1 < found["top1"] <= 1.0
    assert (tmp_path / "demo" / "demo.svg").read_text(encoding="utf-8").startswith("<svg")
    assert (tmp_path / "demo" / "ladder" / "ladder.html").is_file()
    assert (tmp_path / "demo" / "padded" / "ladder.html").is_file()
    assert "transformers' BERT, padded texts: baseline" in told
    assert (tmp_path / "demo" / "train" / "export" / "model.safetensors").is_file()

    assert main(words) == 0
    again = capsys.readouterr().out
    assert "This demo is complete" in again
    assert again.splitlines()[2:] == told.splitlines()[-len(again.splitlines()) + 2 :]


def test_a_failing_step_ends_the_demo_and_says_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--output", str(tmp_path), "--budget", "-1"]) == 2
    told = capsys.readouterr()
    assert "penstock ladder vit-digits" in told.out
    assert "the demo stopped here" in told.err
    assert not (tmp_path / "demo.json").exists()
