"""`penstock train`: the same names as in Python, preset recipes, and exit codes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import get_args

import pytest

from helpers.images import write_folder
from helpers.toy import desk
from penstock.cli import app, main
from penstock.cli.train import next_commands
from penstock.config.load import load
from penstock.config.recipes import load_run
from penstock.config.run import RunConfig
from penstock.config.tasks import TaskName
from penstock.errors import ConfigError, ExitCode
from penstock.train.prepare import link_latest

SMALL = "--model.width 16 --model.depth 1 --model.heads 2 --model.mlp_width 32 --model.patch_size 4"


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    path = desk(tmp_path)
    rest = f"--recipe.steps 4 --log_every 2 --machine {path} --output {tmp_path / 'run'}"
    return [*SMALL.split(), *rest.split(), "--recipe.warmup_steps", "1"]


def test_a_preset_is_trained_with_its_own_recipe(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "vit-digits", *options]) == 0
    told = capsys.readouterr().out
    assert "plan    micro_batch=64\n" in told
    assert f"output  {tmp_path / 'run'}\n" in told
    assert "done: top-1" in told
    assert " % is no more than chance for 10 classes" in told  # after four steps
    assert f"weights in {tmp_path / 'run' / 'export'}" in told
    stored = load(RunConfig, file=tmp_path / "run" / "run.toml")
    assert stored.recipe.augment == load_run(overrides={"model": "vit-digits"}).recipe.augment
    assert stored.recipe.augment.flip == 0.0
    assert (stored.recipe.steps, stored.model.width) == (4, 16)


def test_a_stored_run_runs_again_and_is_found_complete(options: list[str], tmp_path: Path) -> None:
    assert main(["train", "vit-digits", *options]) == 0
    again = tmp_path / "again"
    assert main(["train", "--config", str(tmp_path / "run" / "run.toml"), "--output", str(again)]) == 0

    def losses(folder: Path) -> list[float]:
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [loss for record in records if record["event"] == "steps" for loss in record["losses"]]

    assert len(losses(again)) == 4
    assert losses(again) == losses(tmp_path / "run")
    assert main(["train", "--config", str(again / "run.toml")]) == 0
    assert losses(again) == losses(tmp_path / "run")


def test_plan_and_dotted_settings_reach_the_run(options: list[str], tmp_path: Path) -> None:
    plan = "precision=O1 optimizer=fused micro_batch=32"
    assert (
        main(
            ["train", "vit-digits", *options, "--plan", plan, "--recipe.augment.mixup", "0.2", "--seed", "7"]
        )
        == 0
    )
    stored = load(RunConfig, file=tmp_path / "run" / "run.toml")
    assert stored.plan.line() == plan
    assert (stored.recipe.augment.mixup, stored.seed) == (0.2, 7)


def test_exit_codes(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "vit-digit", *options]) == 2
    assert "vit-digits" in capsys.readouterr().err
    assert main(["train", "vit-digits", *options, "--device", "cuda:7"]) == 3
    assert "cuda:7" in capsys.readouterr().err
    assert main(["train", "vit-digits", *options[:-1], "9"]) == 2
    assert "recipe.warmup_steps is 9 steps" in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert main(["train", "vit-digits", *options]) == 0
    assert main(["train", "vit-digits", *options, "--recipe.lr", "0.5"]) == 2
    told = capsys.readouterr().err
    assert "recipe.lr is 0.5" in told
    assert "--no-resume" in told
    assert main(["train", "vit-digits", *options, "--recipe.lr", "0.5", "--no-resume"]) == 0
    for file in (tmp_path / "run" / "checkpoints").glob("step-*/weights.safetensors"):
        file.write_bytes(b"")
    assert main(["train", "vit-digits", *options, "--recipe.lr", "0.5"]) == 5
    assert "weights.safetensors has 0 bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("gradients=fp32", ["gradients=fp32"]),
        ("gradients=fp32 overlap=false", ["overlap=false", "gradients=fp32"]),
    ],
)
def test_settings_that_training_cannot_run_are_refused_by_name(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, named: list[str]
) -> None:
    """Not for want of processes, nor of a device: with these it would be refused all the same."""
    assert main(["train", "vit-digits", *options, "--plan", line, "--device", "cuda:7"]) == 2
    told = capsys.readouterr().err
    for word in named:
        assert f"plan.{word} can be predicted by `penstock plan`, but training cannot run it yet" in told
    assert "torchrun" not in told
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("known_machine")
@pytest.mark.parametrize("classifier", ["pooled", "token"])
def test_classes_keep_the_names_of_their_folders(
    classifier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where transformers writes the configuration, whose own names are LABEL_0 and so on."""
    images, run, small = write_folder(tmp_path / "pets", per_class=12), tmp_path / "run", tmp_path / "small"
    sizes = {
        "image_size": 32, "channels": 3, "width": 16, "depth": 1, "heads": 2, "mlp_width": 32, "classes": 2,
    }  # fmt: skip
    model = [word for name, value in sizes.items() for word in (f"--model.{name}", str(value))]
    words = ["--model.classifier", classifier, "--data", f"imagefolder:{images}", "--output", str(run)]
    few = ["--recipe.steps", "1", "--recipe.warmup_steps", "0", "--plan.micro_batch", "4"]
    assert main(["train", "vit-digits", *model, *words, *few]) == 0
    assert main(["compress", str(run), "--quantise", "int8", "--output", str(small)]) == 0
    for folder in (run, small):
        capsys.readouterr()
        assert main(["classify", str(folder), str(images / "cat" / "0000.jpg")]) == 0
        assert capsys.readouterr().out.split("\t")[0] in ("cat", "dog")


def test_short_options_are_the_settings_that_they_stand_for(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[RunConfig] = []

    def only_read(config: RunConfig, **options: object) -> None:
        read.append(config)
        raise ConfigError("read")

    monkeypatch.setattr("penstock.train.train", only_read)
    words = "train bert-tiny --lr 3e-4 --epochs 2 --batch-size 16 --seed 7"
    assert main(words.split()) == ExitCode.CONFIG
    run = read.pop()
    assert (run.recipe.lr, run.recipe.epochs, run.recipe.steps) == (3e-4, 2.0, None)
    assert (run.plan.micro_batch, run.plan.optimizer, run.seed) == (16, "fused", 7)
    assert main(["train", "bert-tiny", "--steps", "9", "--batch_size", "4"]) == ExitCode.CONFIG
    run = read.pop()
    assert (run.recipe.steps, run.plan.micro_batch) == (9, 4)


def test_a_setting_that_is_typed_under_both_names_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for pair in ("--lr 1 --recipe.lr 2", "--steps 3 --epochs 4"):
        assert main(["train", "bert-tiny", *pair.split()]) == ExitCode.CONFIG, pair
    assert "recipe.steps is 3 and recipe.epochs is 4.0" in capsys.readouterr().err


def test_each_task_ends_with_three_commands_that_exist() -> None:
    for task in set(get_args(TaskName)) - {"auto"}:
        lines = next_commands(task, Path("runs/my run"))
        assert len(lines) == 3
        for line in lines:
            words = shlex.split(line)[1:]
            assert "runs/my run" in words
            app.parse_args(words, exit_on_error=False, print_error=False)


def test_the_newest_run_is_runs_latest(
    tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = options[: options.index("--output")] + options[options.index("--output") + 2 :]
    runs = tmp_path / "runs"
    for name in ("first", "second"):
        assert main(["train", *options, "--output", str(runs / name)]) == 0
        assert (runs / "latest").resolve() == runs / name
    told = capsys.readouterr().out
    assert told.rstrip().endswith(f"penstock serve {runs / 'second'}")
    assert main(["evaluate", str(runs / "latest")]) == 0


def test_what_is_called_latest_already_stays(tmp_path: Path) -> None:
    (tmp_path / "runs" / "latest").mkdir(parents=True)
    link_latest(tmp_path / "runs" / "new")
    assert not (tmp_path / "runs" / "latest").is_symlink()
    link_latest(tmp_path / "elsewhere" / "new")
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_without_weights_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "unfinished/checkpoints/step-4").mkdir(parents=True)
    (tmp_path / "unfinished/checkpoints/step-4/tensors.json").touch()
    said = {"empty": "has no config.json", "unfinished": "penstock checkpoint export", "no": "There is no"}
    for name, words in said.items():
        for model in ([], ["bert-tiny"]):
            assert (
                main(["train", *model, "--from", str(tmp_path / name), "--output", str(tmp_path / "run")])
                != 0
            )
            told = capsys.readouterr().err
            assert words in told
            assert len(told.splitlines()) < 4
