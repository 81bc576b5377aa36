"""`penstock checkpoint`: what it prints, what it writes and how it ends."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.checkpoints import numbered
from penstock import checkpoint
from penstock.cli import main
from penstock.config.load import to_dict
from penstock.config.model import ViTConfig
from penstock.config.run import RunConfig
from penstock.models import create
from penstock.models.convert import from_pretrained


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The output folder of a run with two checkpoints."""
    for step in (3, 7):
        checkpoint.save(tmp_path / "run" / "checkpoints", numbered(step))
    return tmp_path / "run"


def test_verify_says_what_is_whole_and_ends_with_5_where_something_is_not(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "verify", str(run)]) == 0
    assert "step-7 is whole" in capsys.readouterr().out
    file = run / "checkpoints" / "step-7" / "ema.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    assert main(["checkpoint", "verify", str(run)]) == 5
    assert "step-7 is refused: ema.safetensors has changed" in capsys.readouterr().err
    assert main(["checkpoint", "verify", str(run), "--step", "3"]) == 0
    assert file.parent.is_dir(), "looking moves nothing"
    assert main(["checkpoint", "verify", str(run), "--step", "4"]) == 2
    (file.parent / "manifest.json").unlink()
    capsys.readouterr()
    for words in ([str(file.parent)], [str(run)], [str(run), "--step", "7"]):
        assert main(["checkpoint", "verify", *words]) == 5
        assert "step-7 is refused: manifest.json is missing." in capsys.readouterr().err
    assert main(["checkpoint", "verify", str(run / "checkpoints" / "step-8")]) == 2


def test_list_shows_each_and_says_which_cannot_be_trusted(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "list", str(run), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["step"] for row in rows] == [3, 7]
    assert all((row["ranks"], row["format"], row["plan"]) == (1, 2, "precision=O1") for row in rows)
    file = run / "checkpoints" / "step-3" / "ema.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    assert main(["checkpoint", "list", str(run)]) == 0  # sizes are right
    assert "sizes right" in capsys.readouterr().out
    assert main(["checkpoint", "list", str(run), "--thorough"]) == 5
    out = capsys.readouterr().out
    assert "refused" in out
    assert "verified" in out
    assert main(["checkpoint", "list", str(run / "nothing")]) == 2


def test_export_writes_the_average_as_transformers_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vit = ViTConfig(depth=1, width=8, heads=2, mlp_width=16, image_size=8, patch_size=4, classes=3)
    config = RunConfig(model=vit, output=str(tmp_path))
    weights = create(vit).state_dict()
    average = {name: tensor + 1 for name, tensor in weights.items()}
    sets = {"weights": weights, "ema": average}
    checkpoint.save(tmp_path / "checkpoints", checkpoint.Snapshot(2, sets, {}, to_dict(config)))
    assert main(["checkpoint", "export", str(tmp_path), str(tmp_path / "a")]) == 0
    assert "'ema' of" in capsys.readouterr().out
    assert torch.equal(from_pretrained(tmp_path / "a").state_dict()["head.weight"], average["head.weight"])
    options = ["--weights", "weights", "--names", "plain", "--shard-gb", "0.000001"]
    assert main(["checkpoint", "export", str(tmp_path), str(tmp_path / "b"), *options]) == 0
    index = json.loads((tmp_path / "b" / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "b" / file)[name], weights[name])
    export = ["checkpoint", "export", str(tmp_path), str(tmp_path / "a"), "--shard-gb"]
    for size in ("0.000001", "5", "0.000001"):  # over what is there
        assert main([*export, size]) == 0
        files = [file.name for file in (tmp_path / "a").glob("model*")]
        assert (files == ["model.safetensors"]) if size == "5" else ("model.safetensors.index.json" in files)
        assert (len(files) > 3) == (size != "5")
        found = from_pretrained(tmp_path / "a").state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in average.items())
    assert main([*export, "0"]) == 2
    assert main(["checkpoint", "export", str(tmp_path), str(tmp_path / "c"), "--weights", "x"]) == 2
    assert "it has weights, ema" in capsys.readouterr().err


def test_the_mean_of_the_newest_is_exact_to_a_rounding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = RunConfig(
        model=ViTConfig(image_size=8, patch_size=4, channels=1, width=16, depth=1, heads=2, mlp_width=32)
    )
    run, states = tmp_path / "run", []
    for step in (1, 2, 3, 4):
        torch.manual_seed(step)
        model = create(config.model)
        # Sums that fp32 would lose: thousands beside thousandths.
        state = {
            name: tensor + (4096.0 if step % 2 else -4096.0) for name, tensor in model.state_dict().items()
        }
        states.append(state)
        snapshot = replace(numbered(step), weights={"weights": state}, config=to_dict(config))
        checkpoint.save(run / "checkpoints", snapshot, keep=4)
    assert main(["checkpoint", "average", str(run), "--last", "3"]) == 0
    assert "the mean of 'weights' of step-2, step-3, step-4" in capsys.readouterr().out
    found = from_pretrained(run / "average").state_dict()
    for name, tensor in found.items():
        exact = sum(state[name].double() for state in states[1:]) / 3
        assert torch.equal(tensor, exact.float()), name
    assert main(["checkpoint", "average", str(run), str(tmp_path / "there"), "--last", "2"]) == 0
    assert (tmp_path / "there" / "model.safetensors").exists()
    assert main(["checkpoint", "average", str(run), "--last", "5"]) == 2
    assert "has 4 checkpoints, but --last is 5. Train with --keep 5" in capsys.readouterr().err
    assert main(["checkpoint", "average", str(run), "--last", "1"]) == 2
    assert main(["checkpoint", "average", str(run), "--weights", "ema"]) == 2


def test_checkpoints_of_two_models_have_no_mean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    for step, width in ((1, 16), (2, 32)):
        config = RunConfig(
            model=ViTConfig(image_size=8, patch_size=4, channels=1, width=width, depth=1, heads=2)
        )
        state = create(config.model).state_dict()
        snapshot = replace(numbered(step), weights={"weights": state}, config=to_dict(config))
        checkpoint.save(run / "checkpoints", snapshot)
    assert main(["checkpoint", "average", str(run)]) == 2
    assert "holds another model than" in capsys.readouterr().err
