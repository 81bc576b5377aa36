"""What `penstock plan` refuses, and what it keeps of what it is given."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.cli.plan_config import check_base
from penstock.config.plan import Plan
from penstock.errors import ConfigError, ExitCode

SMALL = ("plan", "gpt-7.5b", "--machine", "a100-80g", "--gpus", "16", "--global-batch", "128")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize(
    "words",
    [
        "gpt2 --tokens -1", "gpt2 --tokens 0", "gpt2 --tokens nan", "gpt2 --tokens inf",
        "gpt2 --tokens 1e9 --epochs 0", "gpt2 --tokens 1e9 --epochs nan", "gpt2 --tokens 1e9 --price -2",
        "gpt2 --tokens 1e9 --price inf", "gpt2 --global-batch 0", "gpt2 --global-batch -8", "gpt2 --gpus 0",
        "gpt2 --gpus 8.5", "gpt2 --gpus inf", "gpt2 --global-batch 8.5", "gpt2 --model.sequence 0", "gpt2 --top 0",
        "gpt2 --top 1.5", "gpt2 --top nonsense", "--budget-gpu-hours 0", "--budget-gpu-hours nan", "--compute nan",
        "--compute inf", "--compute 1e22 --served-tokens -1", "--compute 1e22 --served-tokens nan",
    ],
)  # fmt: skip
def test_numbers_that_cannot_be_are_refused(capsys: pytest.CaptureFixture[str], words: str) -> None:
    code, out, err = run(capsys, "plan", *words.split())
    assert code == ExitCode.CONFIG
    assert not out
    *_, option, value = words.split()
    name = option.removeprefix("--").replace("-", "_")
    assert re.search(
        rf"^penstock: In the command line: {name} is '?{re.escape(value)}(\.0)?'?, but must be ", err
    )
    assert err.count("\n") == 1


def test_every_wrong_number_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = run(capsys, "plan", "gpt2", "--tokens", "-1", "--price", "nan", "--top", "0")
    assert [word in err for word in ("tokens is -1", "price is nan", "top is 0")] == [True] * 3


def test_whole_numbers_may_be_written_as_powers_of_ten(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", "gpt2", "--gpus", "8.0", "--global-batch", "16e0", "--top", "1")
    assert code == 0
    assert "on 8 h100, 16 samples a step" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("gpt2 --price 2", "--price has no effect without --tokens, which"),
        ("vit-b16 --price 2", "--price has no effect without --images or --tokens, which"),
        ("gpt2 --epochs 3", "--epochs has no effect without --tokens"),
        ("gpt2 --explain dp=8 --price 2", "--price has no effect without"),
        ("gpt2 --images 1e6", "--images is for vision models; say with --tokens"),
        ("gpt2 --served-tokens 1e9", "A model was given with --served-tokens"),
        ("gpt2 --explain dp=8 --top 3", "--explain was given with --top"),
        ("--compute 1e20 --epochs 3", "--compute was given with --epochs"),
        ("--compute 1e20 --top 3", "--compute was given with --top"),
    ],
)
def test_what_would_have_no_effect_is_refused(
    capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    code, out, err = run(capsys, "plan", *words.split())
    assert code == ExitCode.CONFIG
    assert not out
    assert message in err


def test_a_file_that_cannot_be_written_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, _, err = run(capsys, *SMALL, "--html", str(tmp_path))
    assert code == ExitCode.ENVIRONMENT
    assert err == f"penstock: {tmp_path} cannot be written: it is a folder. Give the path of a file.\n"
    (tmp_path / "file").write_text("")
    under = tmp_path / "file" / "plan"
    code, _, err = run(capsys, *SMALL, "--html", str(under))
    assert code == ExitCode.ENVIRONMENT
    assert f"{under} cannot be written: a part of its path is a file, not a folder. Check the path." in err


def test_what_a_search_without_layouts_would_overwrite_stays(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    kept = tmp_path / "kept.html"
    kept.write_text("mine")
    words = ("--gpus", "1", "--global-batch", "1", "--html", str(kept))
    code, _, _ = run(capsys, "plan", "gpt-1t", "--machine", "a100-80g", *words)
    assert code == ExitCode.OUT_OF_MEMORY
    assert kept.read_text() == "mine"


@pytest.mark.parametrize("model", ["t5-base", "gpt2", "bert-large"])
def test_days_are_of_the_tokens_that_the_rate_counts(capsys: pytest.CaptureFixture[str], model: str) -> None:
    """An encoder–decoder counts its decoder's tokens, whatever its encoder reads."""
    words = (
        "--model.sequence", "256", "--gpus", "8", "--global-batch", "64", "--tokens", "1e9", "--top", "1",
    )  # fmt: skip
    _, out, _ = run(capsys, "plan", model, *words, "--json")
    best = json.loads(out)["layouts"][0]
    seen = best["days"] * 86400 * best["tokens_per_second_per_gpu"] * best["gpus"]
    assert seen == pytest.approx(1e9)
    assert best["tokens_per_sample"] == (512 if model == "t5-base" else 256)


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("tp=2 pp=2 dp=2 cp=1", "--gpus is 16, but --base fixes 8 by dp=2 tp=2 pp=2 cp=1; change one"),
        ("tp=3", "--gpus is 16, which tp=3 of --base (3) does not divide"),
        ("tp=8 pp=4", "--gpus is 16, which tp=8 pp=4 of --base (32) does not divide"),
        (
            "micro_batch=2 accumulate=4 dp=4",
            "--global-batch is 64, but --base fixes 32 by micro_batch=2 accumulate=4 dp=4",
        ),
        ("micro_batch=3", "does not divide; change one of them, --global-batch to 63 or 66 for example."),
        ("shard=4", "--base has shard=4, which needs sharding=hsdp"),
    ],
)
def test_what_is_fixed_and_contradicts_the_request_is_told(
    capsys: pytest.CaptureFixture[str], base: str, message: str
) -> None:
    words = ("--gpus", "16", "--global-batch", "64", "--base", base)
    code, out, err = run(capsys, "plan", "gpt-7.5b", "--machine", "a100-80g", *words)
    assert code == ExitCode.CONFIG
    assert not out
    assert message in err


def test_a_line_that_fixes_the_whole_batch_says_the_batch() -> None:
    line = "micro_batch=2 accumulate=4 dp=4"
    assert check_base(Plan.parse(line), Plan.named(line), 16, None) == 32
    assert check_base(Plan.parse("dp=4"), frozenset({"dp"}), 16, None) is None
    assert check_base(Plan.parse("dp=4"), frozenset({"dp"}), 16, 8) == 8
    with pytest.raises(ConfigError, match="--gpus is 16"):
        check_base(Plan(tp=3), frozenset({"tp"}), 16, None)


@pytest.mark.parametrize(
    "fixed",
    [
        "tp=4 pp=2 micro_batch=2 sharding=zero1", "tp=1 pp=1 sharding=fsdp recompute=full", "pp=2 schedule=gpipe",
        "pp=2 schedule=zero_bubble", "tp=1 pp=1 sharding=hsdp shard=8", "micro_batch=1 accumulate=8 dp=16",
    ],
)  # fmt: skip
def test_what_is_fixed_is_kept(capsys: pytest.CaptureFixture[str], tmp_path: Path, fixed: str) -> None:
    usual = "precision=O2 optimizer=fused attention=flash compile=blocks"
    page = tmp_path / "plan.html"
    code, out, err = run(
        capsys, *SMALL, "--base", f"{usual} {fixed}", "--json", "--sensitivity", "--html", str(page)
    )
    assert code == 0, err
    data = json.loads(out)
    asked = Plan.parse(fixed)
    plans = [one["plan"] for one in data["layouts"] + data["sensitivity"]]
    # The page's other numbers of devices, which it names beside their points.
    plans += re.findall(r"precision=O2 [\w= ]+", page.read_text(encoding="utf-8"))
    for line in plans:
        plan = Plan.parse(line)
        assert {name: getattr(plan, name) for name in Plan.named(fixed)} == {
            name: getattr(asked, name) for name in Plan.named(fixed)
        }


QWEN = {
    "model_type": "qwen2", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "vocab_size": 5000,
    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.mark.parametrize("verb", ["plan", "deploy"])
def test_any_config_of_transformers_is_planned_under_its_folders_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, verb: str
) -> None:
    folder = tmp_path / "Qwen9-Mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN))
    more = ("--base", "tp=1") if verb == "plan" else ("--requests", "rate=1 in=8 out=4", "--count", "10")
    for place in (folder, folder / "config.json"):
        code, out, err = run(capsys, verb, str(place), "--gpus", "1", *more, "--model.sequence", "128")
        assert code == 0, err
        assert out.startswith("Qwen9-Mine ")
    _, out, _ = run(capsys, verb, str(folder), "--gpus", "1", *more, "--json", "--name", "other")
    assert json.loads(out)["model"] == "other"
    (folder / "config.json").write_text(json.dumps(QWEN | {"model_type": "mamba"}))
    code, _, err = run(capsys, verb, str(folder), "--gpus", "1")
    assert (code, "model_type 'mamba'" in err) == (ExitCode.CONFIG, True)
    (folder / "config.json").write_text("{}")
    code, _, err = run(capsys, verb, str(folder / "config.json"), "--gpus", "1")
    assert (code, "has no model_type" in err) == (ExitCode.CONFIG, True)
    (folder / "config.json").unlink()
    code, _, err = run(capsys, verb, str(folder), "--gpus", "1")
    assert (code, "has no config.json" in err) == (ExitCode.CONFIG, True)


def test_a_length_of_samples_of_a_config_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    words = ("plan", str(tmp_path), "--gpus", "1", "--base", "tp=1", "--top", "1")
    assert "samples of 512 tokens; --model.sequence sets how many." in run(capsys, *words)[1]
    assert "samples of 64 tokens;" in run(capsys, *words, "--model.sequence", "64")[1]
