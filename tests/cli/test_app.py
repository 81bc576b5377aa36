"""The command line: options from dataclasses, errors as messages with exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App

import penstock.cli
from penstock.cli import main
from penstock.cli._app import configured
from penstock.config.load import dump_toml
from penstock.config.model import PRESETS
from penstock.config.plan import Plan
from penstock.config.run import DataConfig, Recipe, RunConfig
from penstock.errors import ExitCode, NumericError, PenstockError


def _verb(**arguments: Any) -> tuple[App, list[tuple[RunConfig, bool]]]:
    """An app with one verb `go`, and the list that its calls are written to."""
    calls: list[tuple[RunConfig, bool]] = []

    def go(config: RunConfig, *, resume: bool = True) -> None:
        """Go.

        Parameters
        ----------
        resume
            Go on.
        """
        calls.append((config, resume))

    app = App(name="penstock", help_format="plaintext")
    app.command(configured(RunConfig, **arguments)(go))
    return app, calls


def _run(line: list[str], **arguments: Any) -> tuple[RunConfig, bool]:
    app, calls = _verb(**arguments)
    app(line, exit_on_error=False, result_action="return_value")
    (call,) = calls
    return call


def test_options_reach_the_configuration() -> None:
    config, resume = _run(
        ["go", "vit-s16", "--model.classifier=pooled", "--plan", "precision=O1 optimizer=fused",
         "--plan.optimizer", "contiguous", "--recipe.lr", "1e-4", "--recipe.clip_norm", "none",
         "--data", "pack:x", "--data.workers", "2", "--seed", "5", "--no-resume"],
        positional="model",
    )  # fmt: skip
    assert config == RunConfig(
        model=replace(PRESETS["vit-s16"], classifier="pooled"),
        plan=Plan(precision="O1", optimizer="contiguous"),
        recipe=Recipe(lr=1e-4, clip_norm=None),
        data=DataConfig(source="pack:x", workers=2),
        seed=5,
    )
    assert resume is False


def test_the_command_line_goes_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(dump_toml(RunConfig(seed=3, recipe=Recipe(lr=0.5))), encoding="utf-8")
    config, resume = _run(["go", "--config", str(file), "--seed", "4"])
    assert config == RunConfig(seed=4, recipe=Recipe(lr=0.5))
    assert resume is True


def test_negative_numbers_are_values() -> None:
    with pytest.raises(PenstockError, match=r"recipe\.lr is -0\.001, but must be above 0"):
        _run(["go", "--recipe.lr", "-1e-3"])


def test_a_preset_and_its_option_are_the_same() -> None:
    assert _run(["go", "vit-b32"], positional="model") == _run(["go", "--model", "vit-b32"])


def test_a_flag_takes_no_value() -> None:
    config, _ = _run(["go", "--save_in_background", "--seed", "3"], flags=("save_in_background",))
    assert config.save_in_background
    assert not _run(["go", "--seed", "3"], flags=("save_in_background",))[0].save_in_background


def test_families_that_help_does_not_list_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    app, _ = _verb(positional="model")
    app(["go", "--help"], exit_on_error=False, result_action="return_value")
    told = capsys.readouterr().out
    assert "--model.patch_size" in told
    assert "--model.vocabulary" not in told
    config, _ = _run(
        ["go", "gpt2", "--model.vocabulary", "512", "--model.width=64", "--model.heads", "4"],
        positional="model",
    )
    assert config.model == replace(PRESETS["gpt2"], vocabulary=512, width=64, heads=4)
    config, _ = _run(["go", "t5-small", "--model.encoder.depth", "2"], positional="model")
    assert config.model.encoder.depth == 2  # type: ignore[union-attr]
    with pytest.raises(Exception, match=r"--model\.vocabluary.*Did you mean 'vocabulary'"):
        _run(["go", "gpt2", "--model.vocabluary", "512"], positional="model")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train --epoch=3", "There is no option --epoch. Did you mean --epochs?"),
        ("train --batchsize 3", "There is no option --batchsize. Did you mean --batch-size?"),
        ("train --micro-batch 3", "There is no option --micro-batch. Did you mean --plan.micro_batch?"),
        ("train --recipe.lrr 3", "There is no option --recipe.lrr. Did you mean --lr?"),
        ("train --widht 3", "There is no option --widht. Did you mean --model.width?"),
        ("train --learning-rate 3", "There is no option --learning-rate. Did you mean --recipe.lr?"),
        ("train --zzz 3", "There is no option --zzz. `penstock train --help-all` lists those there are."),
        ("plan gpt2 --num-gpus 8", "There is no option --num-gpus. Did you mean --gpus?"),
        (
            "launch -- vit-digits --max-steps 3",
            "There is no option --max-steps. Did you mean --recipe.steps?",
        ),
    ],
)
def test_an_unknown_option_is_answered_with_the_one_that_was_meant(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    told = capsys.readouterr()
    assert (told.out + told.err).strip() == f"penstock: {said}"


def test_the_shell_completes_verbs_and_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", "/bin/bash")
    assert main(["--install-completion", "--shell", "bash"]) == 0
    written = tmp_path / ".local/share/bash-completion/completions/penstock"
    script = written.read_text()
    assert "ladder" in script
    assert "--recipe.lr" in script
    assert "--machine" in script


def test_a_loader_of_ones_own() -> None:
    seen: dict[str, Any] = {}

    def loader(cls: type[RunConfig], **given: Any) -> RunConfig:
        seen.update(given, cls=cls)
        return RunConfig(seed=9)

    config, _ = _run(["go", "--seed", "3"], loader=loader)
    assert config.seed == 9
    assert seen == {"cls": RunConfig, "file": None, "overrides": {"seed": "3"}}


def test_help_tells_type_default_and_meaning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "400")  # one line per option
    app, _ = _verb(positional="model")
    app(["go", "--help"], exit_on_error=False, result_action="return_value")
    told = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--plan.compile none|blocks|whole" in told
    assert "[default: vit-digits]" in told
    assert "--recipe.clip_norm" in told
    assert "Peak learning rate, reached after the warm-up. [default: 0.001]" in told
    assert "--resume --no-resume Go on. [default: True]" in told


def test_every_verb_can_be_loaded() -> None:
    for name in ("train", "ladder", "pack", "probe", "doctor"):
        assert penstock.cli.app[name].default_command is not None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["train", "--recip.lr", "3"], "Did you mean --lr or --recipe.lr?"),
        (["trian"], 'Did you mean "train"?'),
        (["probe", "--device", "tpu"], "There is no device 'tpu'; use auto, cpu, cuda or cuda:N."),
        (["train", "--plan", "precision=O7"], "plan.precision is 'O7', but must be 'O0', "),
        (
            ["train", "--config", "nowhere.toml"],
            "The configuration file nowhere.toml cannot be read: it does not exist.",
        ),
    ],
)
def test_mistakes_are_messages(line: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(line)
    told = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert message in told
    assert "Traceback" not in told
    assert code == (ExitCode.ENVIRONMENT if line[0] == "probe" else ExitCode.CONFIG)


@pytest.mark.parametrize("code", list(ExitCode))
def test_every_error_has_its_exit_code(
    code: ExitCode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        if code is ExitCode.DONE:
            return 0
        error = PenstockError("It failed.")
        error.exit_code = code
        raise error

    app = App(name="penstock")
    app.command(fail)
    monkeypatch.setattr(penstock.cli, "app", app)
    assert main(["fail"]) == code
    assert capsys.readouterr().err == ("" if code is ExitCode.DONE else "penstock: It failed.\n")


def test_results_and_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    app = App(name="penstock", suppress_keyboard_interrupt=False)
    app.command(lambda: 3, name="three")
    app.command(lambda: True, name="truth")
    app.command(lambda: None, name="nothing")

    @app.command
    def interrupted() -> None:
        raise KeyboardInterrupt

    @app.command
    def broken() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(penstock.cli, "app", app)
    assert main(["three"]) == 3
    assert main(["truth"]) == 0
    assert main(["nothing"]) == 0
    assert main(["interrupted"]) == 130
    with pytest.raises(ZeroDivisionError):
        main(["broken"])


def test_error_types_carry_their_codes() -> None:
    assert NumericError("x").exit_code == 6
    assert [int(code) for code in ExitCode] == [0, 2, 3, 4, 5, 6, 7, 8, 9, 75, 130]


def test_a_reader_that_leaves_is_no_error() -> None:
    """`penstock … | head -0`: the pipe closes before the help page is written."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "penstock", "train", "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    told = process.stderr.read()
    process.stderr.close()
    assert process.wait() in (0, 1, 141)  # 1 is rich's own answer to a broken pipe
    assert told == ""


# What the command line tells the OpenMP runtime, before anything has loaded it.


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that whatever main sets is undone
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("chosen", "spins"),
    [({}, "3000"), ({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)],
)
def test_threads_sleep_soon_unless_the_user_has_chosen(
    chosen: dict[str, str], spins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    assert main(["--version"]) == 0
    assert os.environ.get("GOMP_SPINCOUNT") == spins


# Options that nobody means are answered with a sentence and code 2, before anything is built or read.


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "--budget-gpu-hours", "1e308"], "budget_gpu_hours is 1e+308, but must be at most 1e+30."),
        (["plan", "--compute", "nan"], "compute is nan, but must be above 0 and finite."),
        (["plan", "gpt2", "--gpus", str(10**30)], "must have at most 64 bits."),
        (["plan", "gpt2", "--gpus", "9" * 5000], "must be a whole number or none."),
        (["plan", "gpt2", "--machine", " "], "machine is ' ', but must not be empty"),
        (["plan", "gpt2", "--explain", "dp=0"], "plan.dp is 0, but must be at least 1."),
        (["plan", *["--json"] * 20_000], "has 20,001 words, and at most 1,000 are read"),
        (["plan", *["x" * 50] * 900], "Unused Tokens"),
        (["plan", "gpt\x1b[2J"], "has the control character '\\x1b'"),
        (["train", "--init_from", ""], "init_from is '', but must not be empty"),
        (["train", "--output", ""], "output is '', but must not be empty"),
        (
            ["train", "--data", ""],
            "data.source is '', but must be auto, digits, captions, stdlib, numbers, names, captions:PATH, ",
        ),
        (["train", "--seed", "-1"], "seed is -1, but must be at least 0."),
        (["train", "--seed", str(2**64)], "but must have at most 64 bits."),
        (["train", "--device", "cuda:99999999999999"], "but must be auto, cpu, cuda or cuda:N."),
        (["train", "--model.image_size", "1e18"], "but must be at most 65,536."),
        (["train", "--model.norm_eps", "0"], "model.norm_eps is 0.0, but must be above 0."),
        (["train", "--model.norm_eps", "1e-300"], "must be 0, or at least 1e-30 in size."),
        (["train", "--recipe.lr", "1e400"], "recipe.lr is inf, but must be above 0 and finite."),
        (["train", "--recipe.beta1", "1"], "recipe.beta1 is 1.0, but must be at least 0 and below 1."),
        (["ladder", "--rungs", ""], "rungs is '', but must name something; write none for an empty list."),
        (["ladder", ":"], "factory is ':', but must be package.module:function."),
        (["scale", "..a:b"], "factory is '..a:b', but must be package.module:function."),
        (["pack", "a", "b", "--threads", "-1"], "threads is -1, but must be at least 0."),
        (["run", "--option", "level=1", "x.py"], "--option 'level=1' is not a setting"),
        (["launch", "--hang-seconds", "nan", "--", "vit-digits"], "hang_seconds is nan"),
        (["launch", "--procs", "9" * 30, "--", "vit-digits"], "must have at most 64 bits."),
        (["launch", "--", "vit-digits", "--\x1b"], "has the control character '\\x1b'"),
        (["checkpoint", "export", "a", "b", "--shard-gb", "nan"], "--shard-gb is nan, but must be above 0"),
    ],
    ids=lambda given: (
        " ".join(given)[:50].encode("unicode_escape").decode() if isinstance(given, list) else ""
    ),
)
def test_nonsense_is_answered(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == ExitCode.CONFIG
    told = capsys.readouterr().err
    assert said in told
    assert len(told) < 5000
