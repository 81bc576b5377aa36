"""Top-1, top-5 and loss are those of all samples, however they are batched."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.images import write_folder
from helpers.runs import records_of
from penstock.cli import main
from penstock.data import Batch
from penstock.tasks import ImageClassification
from penstock.train.evaluate import evaluate

TASK = ImageClassification()


def batches(images: torch.Tensor, targets: torch.Tensor, size: int) -> list[Batch]:
    return [
        Batch(i, t, np.arange(len(t))) for i, t in zip(images.split(size), targets.split(size), strict=True)
    ]


def test_the_last_short_batch_counts_by_its_samples() -> None:
    model = nn.Sequential(nn.Linear(6, 11), nn.Dropout(0.5))
    images, targets = torch.randn(23, 6), torch.randint(11, (23,))
    state = torch.get_rng_state()
    found = evaluate(TASK, model, batches(images, targets, 10))
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    logits = model[0](images)
    order = logits.argsort(dim=1, descending=True)
    assert found.samples == 23
    assert found.top1 == pytest.approx((order[:, 0] == targets).float().mean().item())
    assert found.top5 == pytest.approx((order[:, :5] == targets[:, None]).any(1).float().mean().item())
    assert found.loss == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-6)
    assert found.top1 < found.top5 < 1


@pytest.mark.parametrize("classes", [3, 10, 11])
def test_five_best_are_counted_of_more_than_ten_classes(classes: int) -> None:
    found = evaluate(TASK, nn.Identity(), batches(torch.eye(classes), torch.arange(classes), 2))
    assert ("top5" in found.metrics) == (classes > 10)
    assert ("top-5" in TASK.describe(found.metrics)) == (classes > 10)


@pytest.mark.parametrize("most", [1024, 2], ids=["matrix", "counts"])
def test_classes_are_counted_over_all_batches(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.tasks.class_counts.MOST_CLASSES", most)
    outputs = torch.eye(3)[[0, 1, 1, 2, 0]]
    found = evaluate(TASK, nn.Identity(), batches(outputs, torch.tensor([0, 1, 0, 0, 0]), 2))
    assert found.metrics == {"top1": pytest.approx(3 / 5), "loss": pytest.approx(found.loss)}
    assert found.counts is not None
    first, second, third = found.counts.table(("a", "b", "c"))
    assert first == {
        "name": "a", "samples": 4, "predicted": 2, "right": 2, "precision": 1.0, "recall": 0.5, "f1": 4 / 6,
    }  # fmt: skip
    assert (second["precision"], second["recall"]) == (0.5, 1.0)
    assert (third["samples"], third["precision"], third["recall"], third["f1"]) == (0, 0.0, None, 0.0)
    confusion = found.counts.confusion
    if most == 2:
        assert confusion is None
    else:
        assert confusion is not None
        assert confusion.tolist() == [[2, 1, 1], [0, 1, 0], [0, 0, 0]]


def test_a_model_in_evaluation_mode_stays_there() -> None:
    model = nn.Linear(2, 2).eval()
    evaluate(TASK, model, batches(torch.randn(2, 2), torch.tensor([0, 1]), 2))
    assert not model.training


def test_nothing_to_evaluate_is_said() -> None:
    with pytest.raises(ValueError, match="nothing to evaluate"):
        evaluate(TASK, nn.Identity(), [])


# A trained model is evaluated from its run, its export or a checkpoint, on its own data or on others.


PETS = ("ant", "bee", "cat")
SMALL = "--recipe.warmup_steps 0 --plan.micro_batch 4 --recipe.steps 3 --device cpu --machine machine.json"
VIT = "--model.image_size 16 --model.channels 3 --model.width 16 --model.depth 1 --model.heads 2 --model.mlp_width 32"
TEXT = "--model.width 32 --model.depth 1 --model.heads 2 --model.mlp_width 48 --model.sequence 48"


def _pets(*words: str) -> None:
    write_folder(Path("pets"), per_class=10, classes=PETS)
    assert main(["train", "vit-digits", *VIT.split(), *SMALL.split(), "--model.classes", "3",
                 "--data", "imagefolder:pets", "--output", "run", *words]) == 0  # fmt: skip


def _evaluated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["evaluate", *words, "--json"]) == 0
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    return values


def _last(run: str) -> dict[str, Any]:
    return records_of(run, "evaluation")[-1]


def test_a_run_its_export_and_its_checkpoint_are_evaluated_alike(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _pets("--recipe.ema_decay", "0.5")
    ended = _last("run")
    for model in ("run", "run/export", "run/checkpoints", "run/checkpoints/step-3"):
        found = _evaluated(capsys, model)
        assert found["samples"] == ended["samples"] == 6
        assert found["metrics"] == pytest.approx({name: ended[name] for name in ("top1", "loss")}, rel=1e-5)
        assert [row["name"] for row in found["classes"]] == [*PETS]
        assert [sum(row) for row in found["confusion"]] == [2, 2, 2]
    assert ("EMA" in found["weights"], found["macro"]["recall"]) == (True, pytest.approx(ended["top1"]))
    assert _evaluated(capsys, "run", "--split", "all")["samples"] == 30
    shutil.rmtree("run/export")  # as of a run that was stopped
    assert "step-3" in _evaluated(capsys, "run")["weights"]


def test_the_terminal_and_the_page_have_every_class(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _pets()
    capsys.readouterr()
    assert main(["evaluate", "run", "--report", "page.html"]) == 0
    said, page = capsys.readouterr().out, Path("page.html").read_text()
    for word in ("precision", "recall", "F1", "mean of classes", "Confusion matrix", *PETS):
        assert word in said
        assert word in page
    assert "top-5" not in said
    assert "http" not in page.replace("http://www.w3.org", "")


def test_classes_of_other_data_are_matched_by_their_names(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whose own numbers are others: `bee` and `cat` are 0 and 1 there."""
    _pets()
    write_folder(Path("others"), per_class=10, classes=PETS[1:])
    found = _evaluated(capsys, "run", "--data", "imagefolder:others", "--split", "all")
    assert [row["samples"] for row in found["classes"]] == [0, 10, 10]
    own = _evaluated(capsys, "run", "--split", "all")
    recalls = [[row["recall"] for row in each["classes"][1:]] for each in (found, own)]
    assert recalls[0] == recalls[1]  # the same images
    write_folder(Path("strange"), per_class=10, classes=["cat", "dog"])
    assert main(["evaluate", "run", "--data", "imagefolder:strange"]) == 2
    assert "'dog'" in capsys.readouterr().err


def test_without_data_it_is_said_what_is_missing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _pets()
    shutil.move("run/export", "elsewhere")
    assert main(["evaluate", "elsewhere"]) == 2
    assert "--data" in capsys.readouterr().err
    assert _evaluated(capsys, "elsewhere", "--data", "imagefolder:pets")["samples"] == 6


def test_classes_of_texts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{'good' if n % 3 else 'bad'} {n},{'yes' if n % 3 else 'no'}" for n in range(60)]
    Path("train.csv").write_text("\n".join(["text,label", *rows]))
    Path("test.csv").write_text("text,label\n" + "\n".join(f"good {n},yes" for n in range(10)))
    assert main(["train", "bert-tiny", "--task", "sentences", "--data", "text:train.csv", *TEXT.split(),
                 *SMALL.split(), "--output", "run"]) == 0  # fmt: skip
    found, ended = _evaluated(capsys, "run"), _last("run")
    for name in ("accuracy", "f1", "matthews", "loss"):
        assert found["metrics"][name] == pytest.approx(ended[name], rel=1e-5)
    assert {row["name"] for row in found["classes"]} == {"no", "yes"}
    other = _evaluated(capsys, "run", "--data", "text:test.csv", "--split", "all")
    assert [row["samples"] for row in other["classes"] if row["name"] == "yes"] == [10]


def test_perplexity_of_texts_and_pairs_won(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chats = [{"prompt": f"{n % 9}?", "completion": "yes" if n % 2 else "no"} for n in range(60)]
    pairs = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(60)]
    for name, lines in (("chats", chats), ("pairs", pairs)):
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    tiny = [*TEXT.split(), *SMALL.split()]
    assert (
        main(["train", "gpt-tiny", "--task", "chat", "--data", "text:chats.jsonl", *tiny, "--output", "base"])
        == 0
    )
    found = _evaluated(capsys, "base")
    assert found["metrics"]["perplexity"] == pytest.approx(_last("base")["perplexity"], rel=1e-4)
    assert main(["train", "--from", "base", "--task", "preferences", "--data", "text:pairs.jsonl", *SMALL.split(),
                 "--output", "won"]) == 0  # fmt: skip
    for words in (["won"], ["won/export", "--reference", "base"]):
        found = _evaluated(capsys, *words)
        assert found["metrics"] == pytest.approx(
            {name: _last("won")[name] for name in ("loss", "accuracy", "margin")}, rel=1e-3, abs=1e-5
        )
    shutil.move("won/export", "elsewhere")
    assert main(["evaluate", "elsewhere", "--task", "preferences", "--data", "text:pairs.jsonl"]) == 2
    assert "--reference" in capsys.readouterr().err
