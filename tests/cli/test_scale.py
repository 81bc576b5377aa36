"""`penstock scale` as a user meets it."""

from __future__ import annotations

import json
import re
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.errors import ExitCode
from penstock.precision import recommend
from penstock.precision.histogram import HIGH, LOW, Histogram

SMALL = [
    "scale", "vit-digits", "--model.width", "16", "--model.depth", "1", "--model.heads", "2", "--model.mlp_width", "32",
    "--batch", "8", "--batches", "3", "--device", "cpu",
]  # fmt: skip


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    said = capsys.readouterr()
    return code, said.out, said.err


def histogram(stored: dict[str, Any]) -> Histogram:
    """What `Histogram.to_dict` wrote."""
    counts = tuple(stored["counts"].get(str(exponent), 0) for exponent in range(LOW, HIGH + 1))
    return Histogram(**{**stored, "counts": counts})


def test_a_preset_is_measured_drawn_and_advised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "made" / "here"
    code, out, _ = run(capsys, *SMALL, "--output", str(folder))
    assert code == 0
    assert "on digits: 3 batches of 8, training at a rate of 0.0003 in between" in out
    stored = json.loads((folder / "scale.json").read_text())
    advice, gradients = stored["recommendation"], stored["gradients"]
    both = histogram(gradients["activations"]) + histogram(gradients["weights"])
    assert advice["scale"] == recommend(both).scale
    assert advice["largest"] * advice["scale"] * 2 <= 65504 < advice["largest"] * advice["scale"] * 4
    assert gradients["batches"] == 3
    assert stored["environment"]["versions"]["torch"]
    last = out.strip().splitlines()[-1]
    assert last == stored["line"]
    assert last.endswith(f'precision="O1", dtype="fp16", loss_scale={advice["scale"]})')
    assert (folder / "scale.svg").read_text().startswith("<svg xmlns=")
    for name in ("scale.svg", "scale.json"):
        assert str(folder / name) in out


def test_the_line_it_prints_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    import penstock
    from penstock.precision import scalers_of

    code, out, _ = run(capsys, *SMALL, "--lr", "0", "--headroom", "8", "--output", str(tmp_path))
    assert code == 0
    assert "at the same weights" in out
    model = torch.nn.Linear(2, 2)
    names = {"penstock": penstock, "model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    line = out.strip().splitlines()[-1]
    exec(line, names)
    (scaler,) = scalers_of(names["optimizer"])  # type: ignore[arg-type]
    assert f"loss_scale={scaler.scale.item()})" in line
    assert not scaler.dynamic


FACTORY = textwrap.dedent(
    """
    import torch
    from torch import nn

    def make():
        model = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(model.weight)
        x = torch.full((1, 4), FACTOR)
        return model, {"x": x}, lambda model, batch: model(batch["x"]).sum()

    def nothing():
        return nn.Linear(2, 2)
    """
)


@pytest.mark.parametrize(
    "words", [["planted:make"], ["--model", "planted:make"], ["--factory", "planted:make"]]
)
def test_a_model_of_ones_own(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "planted.py").write_text(FACTORY.replace("FACTOR", "2.0**-10"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "planted", raising=False)
    code, out, _ = run(capsys, "scale", *words, "--batches", "2", "--device", "cpu")
    assert code == 0
    assert "planted:make on the factory's batch: 2 batches of 1" in out
    gradients = json.loads(Path("runs/scale/scale.json").read_text())["gradients"]
    assert gradients["weights"]["counts"] == {"-10": 8}  # whatever the weights have become
    assert gradients["activations"]["counts"] == {"0": 2}
    assert re.search(r"loss_scale=16384\.0\)$", out.strip())  # by the 1 that reaches the output


def test_gradients_that_no_scale_mends_end_with_their_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "planted.py").write_text(FACTORY.replace("FACTOR", "float('inf')"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "planted", raising=False)
    code, _, err = run(capsys, "scale", "planted:make", "--batches", "1", "--lr", "0", "--device", "cpu")
    assert code == ExitCode.NUMERIC
    assert "in fp32 already" in err
    assert not list(Path("runs/scale").iterdir())  # it was asked for before anything was measured


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--batches", "0"], "batches is 0, but must be at least 1"),
        (["--headroom", "0.5"], "headroom is 0.5, but must be at least 1"),
        (["--factory", "nothing"], "must be package.module:function"),
        (["--factory", "a:b", "--init_from", "weights"], "let the factory load its weights"),
        (["--factory", "planted:nothing"], "must return three things"),
        (["--data", "nowhere"], "data.source"),
    ],
)
def test_what_cannot_be_is_refused(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "planted.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "planted", raising=False)
    code, _, err = run(capsys, "scale", *words)
    assert code == ExitCode.CONFIG
    assert said in err


def test_weights_may_come_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    from penstock.config.model import PRESETS
    from penstock.models import create
    from penstock.models.convert import save_pretrained

    model = create(replace(PRESETS["vit-digits"], width=16, depth=1, heads=2, mlp_width=32))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.0)  # zero weights: only the last bias has a gradient
    save_pretrained(model, tmp_path / "zero")
    code, _, err = run(
        capsys, *SMALL, "--lr", "0", "--init_from", str(tmp_path / "zero"), "--output", str(tmp_path / "out")
    )
    assert code == 0, err
    weights = json.loads((tmp_path / "out" / "scale.json").read_text())["gradients"]["weights"]
    assert weights["zeros"] > 0.99 * (weights["zeros"] + sum(weights["counts"].values()))
