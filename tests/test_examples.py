"""The examples run, in a small form: random weights, tiny images, few steps, two processes."""

from __future__ import annotations

import ast
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import ImageFont

from helpers import forked
from helpers.images import write_folder
from helpers.small_folders import folder
from helpers.sweeps import sweep
from penstock import Plan
from penstock.config.run import DataConfig
from penstock.data.captions import open_captions
from penstock.ladder.own import padding_of
from penstock.models.anatomy import set_switches

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def _run(words: list[str], cwd: Path, *, seconds: float = 280) -> str:
    """The output of a program that is forked from one with torch."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    code, out, error = forked.run_python(words, cwd, timeout=seconds, cwd=cwd, env=environment)
    assert code == 0, out[-2000:] + error[-3000:]
    return out


def test_every_example_is_listed_and_parses() -> None:
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for path in EXAMPLES.glob("[!_]*"):
        assert path.name == "README.md" or f"]({path.name}" in listed, path
    for path in EXAMPLES.rglob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path


def test_emoji_become_images_with_captions(tmp_path: Path) -> None:
    """Letters stand for emoji, and Pillow's own font for one of emoji."""
    loaded: Any = ImageFont.load_default(10)
    for font in ("first.ttf", "second.ttf"):
        (tmp_path / font).write_bytes(loaded.path.getvalue())
    for language, word, letters in (
        ("en", "letter", "abcdefghijklmnopqrstuvwxyz中"),
        ("de", "Buchstabe", "abcdefgh"),
    ):
        (tmp_path / "names" / language).mkdir(parents=True)
        names = {letter: {"tts": [f"{word} {letter}"]} for letter in letters}  # the font lacks the last
        tree = {"annotations": {"identity": {}, "annotations": names}}
        (tmp_path / "names" / language / "annotations.json").write_text(json.dumps(tree))
    for fonts in (["first.ttf"], ["first.ttf", "second.ttf"]):
        out = _run([str(EXAMPLES / "emoji_captions.py"), "made", "names", *fonts], tmp_path)
        assert f"{26 * len(fonts)} images of 26 emoji, with names in 2 languages" in out
        source = open_captions(
            DataConfig(source=f"captions:{tmp_path}/made"), "train", channels=3, image_size=32
        )
        assert source.pictures.images.shape[0] == 26 * len(fonts)
        assert (len(set(source.pictures.concepts)), len(source.words.texts)) == (26, 26 + 8)
        assert len({image.tobytes() for image in source.pictures.images}) == 26


@pytest.mark.parametrize("path", sorted((EXAMPLES / "slurm").glob("*.s*")), ids=lambda path: path.name)
def test_the_batch_scripts_are_shell_and_ask_for_a_warning(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text(encoding="utf-8")
    assert "#SBATCH --signal=USR1@120" in text
    assert "scontrol requeue" in text


@pytest.mark.slow
def test_a_vision_transformer_is_fine_tuned_on_a_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8,
        num_labels=7,
    )  # fmt: skip
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "model")
    write_folder(tmp_path / "photos", per_class=10)
    words = ["photos", "--model", "model", "--plan", "optimizer=fused micro_batch=4", "--epochs", "2"]
    told = _run([str(EXAMPLES / "finetune_vit.py"), *words, "--output", "out/weights.safetensors"], tmp_path)
    assert "of 4 validation images" in told
    from safetensors import safe_open

    with safe_open(tmp_path / "out" / "weights.safetensors", "pt") as file:
        assert file.get_tensor("classifier.weight").shape == (2, 32)


@pytest.mark.slow
def test_a_model_of_ones_own_is_trained_and_learns(tmp_path: Path) -> None:
    words = ["--plan", "optimizer=fused compile=none", "--steps", "40"]
    told = _run([str(EXAMPLES / "own_model.py"), *words], tmp_path)
    losses = [float(line.rpartition(" ")[2]) for line in told.splitlines() if line.startswith("step")]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_fsdp_trains_on_two_ranks_and_resumes(tmp_path: Path) -> None:
    words = ["-m", "penstock", "launch", "--procs", "2", "--", str(EXAMPLES / "slurm" / "fsdp.py")]
    small = ["--width", "32", "--depth", "2", "--plan", "optimizer=fused micro_batch=1", "--every", "1"]
    told = _run([*words, *small, "--steps", "2", "--output", "run"], tmp_path)
    assert "step 2/2" in told
    told = _run([*words, *small, "--steps", "3", "--output", "run"], tmp_path)
    assert "step 3/3" in told
    assert "step 2/3" not in told


NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def _cells(path: Path) -> list[tuple[str, str]]:
    """Kind and text of each cell."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]


def _shown(text: str, names: dict[str, Any]) -> str:
    """Run a cell as Jupyter does; what it shows of the cell's last expression, and "" where it ends with none."""
    body = ast.parse(text).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "cell", "exec"), names)
    if last is None:
        return ""
    value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    return "" if value is None else str(value._repr_html_())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_whole_and_hold_no_outputs(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["language"] == "python"
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len({*ids}) == len(ids)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
    kinds = [kind for kind, _ in _cells(path)]
    assert kinds[0] == "markdown"
    assert kinds.count("code") >= 3


@pytest.mark.usefixtures("known_machine")
@pytest.mark.parametrize(
    "path",
    sweep(NOTEBOOKS, [path for path in NOTEBOOKS if path.stem.startswith("plan")]),
    ids=lambda path: path.stem,
)
def test_notebooks_run_from_top_to_bottom(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    figures = [_shown(text, names) for kind, text in _cells(path) if kind == "code"]
    assert capsys.readouterr().out
    if path.stem != "train_and_generate":
        assert any("<svg" in figure for figure in figures)


def _first_hour(script: str, *words: object, cwd: Path, **settings: object) -> str:
    """The output of a script of examples/first_hour, whose `penstock` is this Python's."""
    (cwd / "penstock").write_text(f'#!/bin/sh\nexec {sys.executable} -m penstock "$@"\n')
    (cwd / "penstock").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{cwd}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        ["bash", str(EXAMPLES / "first_hour" / script), *map(str, words)], cwd=cwd, capture_output=True, text=True,
        env=environment | {name: str(value) for name, value in settings.items()}, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.sweep
@pytest.mark.usefixtures("known_machine")
def test_the_first_hour_with_photographs(tmp_path: Path) -> None:
    write_folder(tmp_path / "photos", per_class=8)
    small = "--model.image_size 32 --model.patch_size 8 --model.depth 2"
    said = _first_hour("photos.sh", "photos", cwd=tmp_path, MODEL="vit-ti16", EPOCHS=1, BATCH=4, MORE=small)
    assert "precision" in said
    assert "recall" in said
    run = tmp_path / "runs" / "photos"
    rows = (run / "predictions.csv").read_text(encoding="utf-8").splitlines()
    assert len(rows) == 1 + len([path for path in (tmp_path / "photos").rglob("*.*") if path.is_file()])
    assert (run / "train.html").is_file()
    assert (run / "onnx" / "model.onnx").is_file()


@pytest.mark.sweep
@pytest.mark.usefixtures("known_machine")
def test_the_first_hour_with_a_chat_model(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    weights = folder("llama-tiny", tmp_path)
    chats = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}."}]}
        for n in range(40)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    said = _first_hour(
        "chat.sh", weights, "chats.jsonl", "3?", cwd=tmp_path, EPOCHS=1, RANK=2, LENGTH=48, TOKENS=8
    )
    assert "perplexity" in said


@pytest.mark.slow
def test_the_first_hour_before_renting(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "My-Llama").mkdir()
    (tmp_path / "My-Llama" / "config.json").write_text(json.dumps(config))
    said = _first_hour("rent.sh", "My-Llama/config.json", cwd=tmp_path, GPUS=8, BATCH=64)
    for words in ("My-Llama (", "best of all", "tp=8", "a100-80g", "per million", "US$"):
        assert words in said, words


def test_half_of_the_padded_texts_is_padding() -> None:
    """The ladder can leave it out of the model, which then computes the same."""
    pytest.importorskip("transformers")
    model, batch, loss = runpy.run_path(str(EXAMPLES / "padded_texts.py"))["bert"]()
    assert 0.4 < padding_of(batch) < 0.7
    model.eval()
    kept = loss(model, batch)
    set_switches(model, Plan(padding="remove"))
    torch.testing.assert_close(loss(model, batch), kept)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("known_machine")
def test_a_short_demo_runs_to_its_end(tmp_path: Path) -> None:
    words = [str(EXAMPLES / "demo.py"), "--output", "demo", "--budget", "14", "--epochs", "1"]
    told = _run(words, tmp_path, seconds=560)
    assert "baseline " in told
    assert "GPT-3 on 1,024 A100 GPUs" in told
    assert "transformers' BERT, padded texts: baseline" in told
    assert (tmp_path / "demo" / "ladder" / "ladder.html").is_file()
    assert (tmp_path / "demo" / "train" / "export" / "model.safetensors").is_file()
    again = _run(words, tmp_path)
    assert "This demo is complete" in again
    assert "with tp=" in again
