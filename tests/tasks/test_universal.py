"""Understanding and generating at once: what is asked, and that no head asks for more than it should."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.families import small
from helpers.texts import TEXT, Windows
from penstock import checkpoint
from penstock.build import build
from penstock.checkpoint import rewrite
from penstock.cli import main
from penstock.config.load import to_dict
from penstock.config.model import with_stacks
from penstock.config.plan import Plan
from penstock.config.run import Augment, RunConfig
from penstock.data import Loader
from penstock.decode.kv_cache import Columns, KVCache, run_pass
from penstock.errors import ConfigError
from penstock.infer.encode import Classifier
from penstock.infer.generator import Generator
from penstock.kernels.cross_entropy import IGNORED
from penstock.models import create
from penstock.models.convert import from_pretrained
from penstock.tasks import Universal, task_of
from penstock.train.metrics import read_metrics

SMALL: Any = small("universal-tiny", head="both")


def _fitted(**changes: Any) -> tuple[Universal, Any, Windows]:
    source, task = Windows(TEXT, 17, stride=16, ends=50), Universal()
    return task, task.fit(replace(SMALL, **changes), source), source


def _batch(
    task: Universal, model: Any, source: Windows, size: int = 8, **options: Any
) -> tuple[Any, dict[str, Any]]:
    prepare = task.prepare(source, model, **options)
    with Loader(source, prepare, batch=size, seed=0, device=torch.device("cpu"), endless=False) as loader:
        batch = next(iter(loader))
    return batch, dict(zip(model.graph.arguments, batch.inputs))


def test_halves_are_swapped_or_in_order_and_a_separator_is_between_them() -> None:
    task, model, source = _fitted()
    batch, given = _batch(task, model, source, 64)
    tokenizer, seen = source.tokenizer, given["hidden"].clone()
    half = 6  # 16 tokens less three special ones, of which one is left over
    rows, targets = given["rows"]["masked"], given["targets"]["masked"]
    seen.view(-1)[rows[targets != IGNORED]] = targets[targets != IGNORED]
    assert (seen[:, 0] == tokenizer.classify).all()
    assert (seen[:, 1 + half] == tokenizer.separator).all()
    assert ((given["segments"] == 1) == (torch.arange(16) > 1 + half)).all()
    first, second = seen[:, 1 : 1 + half], seen[:, 2 + half : 2 + 2 * half]
    kinds = batch.labels.tolist()
    assert {0, 1, IGNORED} == set(kinds)
    for row, kind in enumerate(kinds):
        window = given["tokens"][row]
        ended = bool((window[: 2 * half] == tokenizer.end).any())
        assert ended == (kind == IGNORED)
        if not ended:
            sides = (second, first) if kind else (first, second)
            assert torch.equal(torch.cat([side[row] for side in sides]), window[: 2 * half])
    assert batch.counts.tolist() == [
        64 * 16,
        float((targets != IGNORED).sum()),
        float(64 - kinds.count(IGNORED)),
    ]


@pytest.mark.parametrize(("continued", "masked"), [(0.5, 0.5), (0.25, 0.75), (1.0, 0.25)])
def test_shares_of_samples_are_asked_for_each(continued: float, masked: float) -> None:
    task, model, source = _fitted(continued=continued, masked=masked)
    _, given = _batch(task, model, source, augment=Augment())
    assert len(given["tokens"]) == 8 * continued
    assert len(given["hidden"]) == 8 * masked
    # One of which nothing is asked stands for none, so that every step has every parameter's gradient.
    batch, given = _batch(task, model, source, 1, augment=Augment())
    assert len(given["tokens"]) == len(given["hidden"]) == 1
    if continued + masked == 1.0:
        assert batch.counts[:2].gt(0).sum() == 1
    _, given = _batch(task, model, source)  # an evaluation asks all
    assert len(given["tokens"]) == len(given["hidden"]) == 8


def test_what_a_prefix_shows_is_not_asked_for() -> None:
    task, model, source = _fitted(prefix=0.5)
    batch, given = _batch(task, model, source, 32, augment=Augment())
    prefixes, targets = given["prefixes"], given["targets"]["next"]
    plain = _batch(*_fitted(), 32, augment=Augment())[1]
    assert 8 < (prefixes > 0).sum() < 24
    assert torch.equal(given["tokens"], plain["tokens"])
    shown = torch.arange(16) < prefixes[:, None] - 1
    assert torch.equal(targets, plain["targets"]["next"].where(~shown, IGNORED))
    assert batch.counts[0] == (~shown).sum()
    # Of one place in the stream, whatever the batch.
    assert torch.equal(_batch(task, model, source, 8, augment=Augment())[1]["prefixes"], prefixes[:8])
    assert "prefixes" not in {
        name for name, value in _batch(task, model, source)[1].items() if value is not None
    }
    built = build(model, Plan(micro_batch=32), loss=task)
    assert torch.isfinite(built.step([batch]).loss)
    alone = task_of(replace(model, branches=("generating",)))
    one, given = _batch(alone, replace(model, branches=("generating",)), source, 32, augment=Augment())
    assert torch.equal(given["prefixes"], prefixes)
    assert torch.equal(given["targets"], targets)
    assert one.count == batch.counts[0]


def test_weights_and_heads_of_the_loss() -> None:
    task, model, source = _fitted()
    torch.manual_seed(0)
    built = build(model, Plan(micro_batch=8), loss=task)
    batch, _ = _batch(task, model, source)
    with built.inference():
        plain = task.separate(built.model, batch)
    other = _fitted(next_weight=2.0, words_weight=0.5, classes_weight=0.0)[1]
    weighed, _ = _batch(task, other, source)
    with built.inference():
        torch.testing.assert_close(task.separate(built.model, weighed), plain * torch.tensor([2.0, 0.5, 0.0]))
    built.model.head_squares = {}
    result = built.step([batch])
    torch.testing.assert_close(result.parts.sum(), result.loss)
    assert set(built.model.head_squares) == {"next", "masked", "kind"}
    # What one head sends back is the gradient of its own loss.
    alone = build(other, Plan(micro_batch=8), loss=task)
    alone.model.load_state_dict(build(model, Plan(micro_batch=8), loss=task).model.state_dict())
    alone.model.head_squares = {}
    alone.step([_batch(task, _fitted(classes_weight=0.0)[1], source)[0]])
    assert alone.model.head_squares["kind"] == 0
    assert alone.model.head_squares["next"] > 0


def test_what_no_head_can_learn_is_refused() -> None:
    task, _, source = _fitted()
    with pytest.raises(ConfigError, match=r"model\.classes is 3, but two halves have 2 orders"):
        task.fit(replace(SMALL, classes=3), source)
    with pytest.raises(ConfigError, match="supports only models with one head"):
        task.taught_by(lambda *_: torch.zeros(()))
    assert isinstance(task_of(replace(SMALL, branches=("understanding",))), Universal)
    assert type(task_of(replace(SMALL, branches=("generating",)))).__name__ == "NextToken"


@pytest.mark.sweep
def test_a_run_generates_classifies_and_gives_its_branches_away(tmp_path: Path) -> None:
    """Trained, logged, reloaded; each branch exported alone, and fine-tuned without the other."""
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("\n".join(f"{n} and {n + 1} are {2 * n + 1}" for n in range(400)))
    few = ["--recipe.steps", "4", "--plan.micro_batch", "4", "--log-every", "2"]
    sizes = [
        f"--model.{part}.{name}" + f"={size}" for part in ("shared", "understanding", "generating")
        for name, size in (("width", 16), ("heads", 2), ("mlp_width", 32), ("depth", 1))
    ]  # fmt: skip
    words = [
        "train", "universal-tiny", "--data", f"text:{text}", "--output", str(run), "--model.sequence", "32",
    ]  # fmt: skip
    assert main([*words, *sizes, *few]) == 0
    logs = [record["heads"] for record in read_metrics(run / "metrics.jsonl") if record["event"] == "steps"]
    assert len(logs) == 2
    for heads in logs:
        assert heads.keys() == {"next", "masked", "kind"}
        assert sum(one["gradient"] for one in heads.values()) == pytest.approx(1.0, abs=1e-5)
    assert main(["generate", str(run), "3 and 4", "--max-tokens", "4"]) == 0
    found = Classifier(run / "export").classify(["3 and 4 are 7"])
    assert found[0].label in ("in order", "swapped")

    whole = from_pretrained(run / "export").eval()
    tokens = torch.randint(0, 256, (2, 9))
    newest = rewrite.open_newest(run)
    rewrite.export_model(newest, tmp_path / "gpt", "weights", branch="generating")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "gpt").eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, whole(tokens)["next"], rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match=r"transformers' bert has no model\.norm_first=True"):
        rewrite.export_model(newest, tmp_path / "bert", "weights", branch="understanding")

    tuned = tmp_path / "tuned"
    rows = tmp_path / "pairs.tsv"
    rows.write_text(
        "sentence1\tsentence2\tlabel\n"
        + "\n".join(f"{n}\t{n + n % 2}\t{'same' if n % 2 == 0 else 'other'}" for n in range(80))
    )
    words = [
        "train", "--from", str(run), "--task", "pairs", "--data", f"pairs:{rows}", "--output", str(tuned),
    ]  # fmt: skip
    branch = ["--model.branches", "understanding", "--model.head", "classes"]
    assert main([*words, *branch, *few, "--recipe.freeze", "shared,tokens"]) == 0
    state = from_pretrained(tuned / "export").state_dict()
    assert not any(name.startswith("generating.") for name in state)
    for name, value in whole.state_dict().items():
        if name.startswith("shared."):
            assert torch.equal(state[name], value), name
    assert json.loads((tuned / "export" / "config.json").read_text())["penstock"]["branches"] == [
        "understanding"
    ]


@pytest.mark.parametrize(
    ("head", "reader"),
    [
        ("words", "AutoModelForMaskedLM"),
        ("both", "AutoModelForMaskedLM"),
        ("classes", "AutoModelForSequenceClassification"),
    ],
)
def test_a_branch_whose_norms_come_last_is_a_folder_that_transformers_reads(
    head: Any, reader: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The form of BERT, of a run's checkpoint; that of the decoder is refused by name."""
    transformers = pytest.importorskip("transformers")
    bert: Any = with_stacks(
        replace(SMALL, embedding_norm=True, output_bias=True, head=head),
        lambda stack: replace(stack, norm_first=False, norm_eps=1e-12, mlp="gelu"),
    )
    torch.manual_seed(0)
    model = create(bert).eval()
    snapshot = checkpoint.Snapshot(1, {"weights": model.state_dict()}, {}, to_dict(RunConfig(model=bert)))
    checkpoint.save(tmp_path / "run" / "checkpoints", snapshot)
    newest = rewrite.open_newest(tmp_path / "run")
    rewrite.export_model(newest, tmp_path / "bert", "weights", branch="understanding")
    assert ("with one head, head: kind is left out" in caplog.text) is (head == "both")
    theirs = getattr(transformers, reader).from_pretrained(tmp_path / "bert").eval()
    tokens = torch.from_numpy(np.arange(18).reshape(2, 9) % 13)
    with torch.no_grad():
        ours = model(None, tokens)["kind" if head == "classes" else "masked"]
        torch.testing.assert_close(theirs(tokens).logits, ours, rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match=r"transformers' gpt2 has no model\.embedding_norm=True"):
        rewrite.export_model(newest, tmp_path / "gpt", "weights", branch="generating")
    uneven = replace(SMALL, generating=replace(SMALL.generating, mlp_width=48))
    with pytest.raises(ConfigError, match=r"differ in mlp_width"):
        uneven.branch("generating")


def test_the_branch_that_generates_alone_has_a_cache() -> None:
    """With it a text goes on as by computing all of it again for each token; the other branch computes nothing."""
    torch.manual_seed(0)
    model = create(SMALL, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.5)
        for name, parameter in model.named_parameters():
            if name.startswith(("understanding.", "masked", "kind")):
                parameter.fill_(torch.nan)
        expected = [1, 2, 3]
        for _ in range(8):
            expected.append(int(model(torch.tensor([expected]))["next"][0, -1].argmax()))
    made = Generator(model, start=0, ends=()).generate([[1, 2, 3], [4, 5, 6, 7]], max_tokens=8)
    assert list(made[0].ids) == expected[3:]
    assert len(set(made[0].ids)) > 1
    past = KVCache(Columns(1, 16), rows=1, columns=16, device=torch.device("cpu"))
    past.at(torch.arange(3), columns=0, width=3, first=True)
    run_pass(model, past, torch.tensor([[1, 2, 3]]))
    assert len(past.store.layers) == SMALL.shared.depth + SMALL.generating.depth
