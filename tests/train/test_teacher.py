"""A run with a teacher: resumed exactly, saved without it, and refused where the teacher is gone or another."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from helpers.jobs import texts_in
from helpers.runs import train_into, train_whole_and_in_parts
from helpers.trained_tokenizers import LINES, trained_tokenizer
from penstock.cli import main
from penstock.config.model import PRESETS
from penstock.data.text.tokenizers import LibraryTokenizer
from penstock.infer.encode import Classifier, read_images
from penstock.models import create
from penstock.models.convert import from_pretrained, model_in, save_pretrained

pytest.importorskip("tokenizers")

WORDS = "--model.depth 1 --model.heads 2 --model.mlp_width 48 --model.sequence 24 --data text:words --recipe.steps 4"
MORE = (
    "--checkpoint_every 2 --log_every 1 --plan.micro_batch 4 --recipe.warmup_share 0 --machine machine.json"
)


def _train(output: str, *words: str, code: int = 0) -> list[float]:
    return train_into(output, "gpt-tiny", WORDS, MORE, *words, code=code)


def test_a_distilled_image_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hard targets for a token of its own: learned from, resumed exactly, and served as the mean of both heads."""
    sizes = (
        "vit-digits --model.width 16 --model.depth 1 --model.heads 2 --model.mlp_width 32 --recipe.steps 4"
    )
    words = (sizes, "--model.classifier token", MORE)
    train_into("teacher", *words)
    distilled, taught = "--model.distilled true", "--recipe.teacher teacher --recipe.teacher_targets hard"
    whole = train_whole_and_in_parts(monkeypatch, 4, *words, distilled, taught)
    assert whole != train_into("alone", *words, distilled)

    model: Any = from_pretrained("whole").eval()
    images = [Path("zero.png"), Path("noise.png")]
    rng = np.random.default_rng(0)
    for path, scale in zip(images, (0, 255)):
        Image.fromarray((rng.random((8, 8)) * scale).astype(np.uint8)).save(path)
    model.both_logits = True
    both = model(read_images(model, images, crop_share=0.875))
    shares = [row.probabilities for row in Classifier("whole").classify(images)]
    assert both.shape == (2, 2, 10)
    assert not torch.allclose(both[:, 0], both[:, 1])
    torch.testing.assert_close(torch.tensor(shares), both.mean(1).softmax(1))


def test_a_run_with_a_teacher(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    texts_in(folder)
    _train("teacher", "--model.width", "48")
    beside = ("--model.width", "32", "--recipe.teacher", "teacher")
    # Cut off in the fourth step, after the checkpoint of the second.
    whole = train_whole_and_in_parts(monkeypatch, 4, "gpt-tiny", WORDS, MORE, *beside)
    assert whole != _train("alone", "--model.width", "32")

    # What is saved is as large as without the teacher, and says where it is.
    sizes = []
    for name in ("whole", "alone"):
        shapes = []
        for file in sorted(Path(name, "checkpoints").rglob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                shapes += [(key, tuple(tensors.get_slice(key).get_shape())) for key in sorted(tensors.keys())]
        sizes.append(sorted(shapes))
    assert sizes[0] == sizes[1] != []
    assert "teacher" in Path("whole", "run.toml").read_text()
    config: Any = model_in("whole")
    assert config.width == 32

    capsys.readouterr()
    _train("whole", *beside, "--recipe.temperature", "3", code=2)
    assert "recipe.temperature is 3.0" in capsys.readouterr().err
    _train("teacher/more", *beside)  # inside the teacher's folder, but beside its export
    _train("teacher", *beside, code=2)
    assert "will overwrite it" in " ".join(capsys.readouterr().err.split())
    assert json.loads(Path("teacher/export/tokenizer.json").read_text())["model"]["vocab"]
    shutil.rmtree("teacher")
    _train("whole", *beside, code=2)
    assert "no folder teacher" in " ".join(capsys.readouterr().err.split())


def test_a_teacher_of_other_words_is_refused(folder: Path, capsys: Any) -> None:
    """Its vocabulary is as large, but two tokens have changed places."""
    text = trained_tokenizer("BPE")
    words = LibraryTokenizer(text, "words")
    words.save(Path("words"), words.size)
    model = replace(PRESETS["gpt-tiny"], width=32, depth=1, heads=2, mlp_width=48, vocabulary=words.size)
    save_pretrained(create(model), "teacher", beside=Path("words"))
    Path("lines.txt").write_text("\n".join(LINES))
    given = [
        "train", "gpt-tiny", *WORDS.split(), "--model.width", "32", *MORE.split(), "--recipe.teacher",
        "teacher",
    ]  # fmt: skip
    given[given.index("text:words")] = "text:lines.txt"
    given += ["--data.tokenizer", "words", "--output", "student"]
    assert main(given) == 0
    tree = json.loads(text)
    vocabulary = tree["model"]["vocab"]
    *_, first, second = vocabulary
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    Path("teacher/tokenizer.json").write_text(json.dumps(tree))
    capsys.readouterr()
    assert main([*given[:-1], "other"]) == 2
    assert "the numbers of their words differ" in " ".join(capsys.readouterr().err.split())
    assert not Path("other/checkpoints").exists()
