"""Jobs on text: trained, stopped and resumed, exported, and read by transformers. A job is enrolled by a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from helpers.jobs import texts_in
from helpers.runs import cut_in_step, losses_of
from helpers.sweeps import sweep
from penstock.checkpoint import rewrite
from penstock.cli import main
from penstock.config.load import load
from penstock.config.run import RunConfig
from penstock.config.theirs.text import settled
from penstock.models import create
from penstock.models.convert import from_pretrained
from penstock.train.metrics import read_metrics

pytest.importorskip("tokenizers")


class Job(NamedTuple):
    """Words of the command line, and the transformers class that reads what comes out; none where it has none."""

    words: str
    reader: str | None


_ONE = "--model.width 32 --model.depth 2 --model.heads 2 --model.mlp_width 48 --model.sequence 24"
_BOTH = " ".join(
    f"--model.{side}.width 32 --model.{side}.depth 1 --model.{side}.heads 2 --model.{side}.mlp_width 48"
    for side in ("encoder", "decoder")
)
ENROLLED = {
    "gpt-tiny": Job(f"{_ONE} --data text:words", "AutoModelForCausalLM"),
    "llama-tiny": Job(f"{_ONE} --model.kv_heads 1 --data text:words", "AutoModelForCausalLM"),
    "qwen-tiny": Job(f"{_ONE} --model.kv_heads 1 --data text:words", "AutoModelForCausalLM"),
    "bert-tiny": Job(f"{_ONE} --data text:words", "AutoModelForMaskedLM"),
    "gpt-tiny --data.packed false": Job(f"{_ONE} --data text:words", "AutoModelForCausalLM"),
    "bert-tiny --data.packed false --data.group_by_length true --plan.padding remove": Job(
        f"{_ONE} --data text:words", "AutoModelForMaskedLM"
    ),
    "modernbert-tiny": Job(f"{_ONE} --data text:words", None),
    "bert-tiny --task pairs": Job(f"{_ONE} --data pairs:pairs.tsv", "AutoModelForSequenceClassification"),
    "bert-tiny --task sentences": Job(
        f"{_ONE} --data pairs:labels.tsv", "AutoModelForSequenceClassification"
    ),
    "bert-tiny --task embedding": Job(f"{_ONE} --data pairs:rows.tsv", "AutoModel"),
    "t5-tiny": Job(f"{_BOTH} --data text:words", "AutoModelForSeq2SeqLM"),
    "bart-tiny": Job(f"{_BOTH} --data text:words", "AutoModelForSeq2SeqLM"),
    "marian-tiny": Job(f"{_BOTH} --data pairs:rows.tsv", "AutoModelForSeq2SeqLM"),
}
USUAL = "marian-tiny", "gpt-tiny", "bert-tiny", "bert-tiny --task pairs", "bert-tiny --task embedding"
"""A job of each kind, in whose ways the others go too. Their exports are held by every family's test."""


@pytest.fixture
def folder(folder: Path) -> Path:
    """The working folder with text and pairs too."""
    texts_in(folder)
    labels = [f"{n} is a number\t{'odd' if n % 2 else 'even'}" for n in range(80)]
    Path("labels.tsv").write_text("\n".join(["text\tlabel", *labels]))
    return folder


def _train(name: str, output: str, *words: str, code: int = 0, batch: int = 4) -> list[dict[str, Any]]:
    given = ["--recipe.steps", "6", "--checkpoint_every", "2", "--log_every", "1"]
    given += ["--plan.micro_batch", str(batch)]
    given += ["--recipe.warmup_share", "0", "--machine", "machine.json", "--output", output, *words]
    assert main(["train", *name.split(), *ENROLLED[name].words.split(), *given]) == code
    return read_metrics(Path(output) / "metrics.jsonl")


@pytest.mark.parametrize("line", ["loss=chunked", "padding=remove", "recompute=budget budget=0.0001"])
def test_a_job_goes_on_with_another_plan(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, options = "bert-tiny", ("--data.packed", "false", "--model.dropout", "0")
    _train(name, "whole", *options)
    losses = losses_of("whole")
    with cut_in_step(monkeypatch, 4):
        _train(name, "cut", *options, code=130)
    changed = [word for each in line.split() for word in (f"--plan.{each.split('=')[0]}", each.split("=")[1])]
    again = _train(name, "cut", *options, *changed)
    assert any(record["event"] == "resume" and record["step"] == 2 for record in again)
    assert losses_of("cut") == (losses if "recompute" in line else pytest.approx(losses, rel=1e-5))


@pytest.mark.parametrize("name", sweep(ENROLLED, USUAL))
def test_a_job_trains_resumes_exactly_and_is_read_by_transformers(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--plan.precision", "O1", "--recipe.ema_decay", "0.5")
    records = _train(name, "whole", *options)
    losses = losses_of("whole")
    assert len(losses) == 6
    found = next(record for record in reversed(records) if record["event"] == "evaluation")
    assert found["sample"]
    steps = [record for record in records if record["event"] == "steps"]
    assert all(record["tokens_per_second"] > 0 and record["mfu"] > 0 for record in steps)

    with cut_in_step(monkeypatch, 4):
        _train(name, "cut", *options, code=130)
    again = _train(name, "cut", *options)
    assert any(record["event"] == "resume" and record["step"] == 2 for record in again)
    assert losses_of("cut") == losses
    for file in ("export/model.safetensors", "export/config.json"):
        assert (Path("cut") / file).read_bytes() == (Path("whole") / file).read_bytes()

    reader = ENROLLED[name].reader
    if reader is None:
        _as_it_was_trained("whole")
    else:
        _as_transformers_reads_it(reader, "whole/export")
    assert main(["checkpoint", "export", "whole", "exported"]) == 0
    assert (Path("exported") / "model.safetensors").read_bytes() == Path(
        "whole/export/model.safetensors"
    ).read_bytes()
    assert {file.name for file in Path("exported").iterdir()} == {
        f.name
        for f in Path("whole/export").iterdir()
        if f.name != "README.md"  # of the run, not of its weights
    }


def _as_it_was_trained(run: str) -> None:
    """What is in our own names gives what the averaged weights of the last checkpoint give."""
    ours = from_pretrained(f"{run}/export").eval()
    trained = create(ours.config).eval()
    weights = rewrite.read_weights(rewrite.open_newest(Path(run)), "ema")
    trained.load_state_dict({**weights, "head.weight": weights["tokens.weight"]})
    tokens = torch.arange(20).view(2, 10)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), trained(tokens))


def _as_transformers_reads_it(reader: str, folder: str) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    theirs = getattr(transformers, reader).from_pretrained(folder).eval()
    ours = from_pretrained(folder).eval()
    given = tokenizer(["3 and 4 make 7."], return_tensors="pt", add_special_tokens=False)
    assert tokenizer.decode(given.input_ids[0]) == "3 and 4 make 7."
    assert tokenizer.name_or_path == folder
    second = (given.input_ids,) if ours.config.family == "seq2seq" else ()
    more = {"decoder_input_ids": given.input_ids} if second else {}
    with torch.no_grad():
        expected = ours(given.input_ids, *second)
        output = theirs(input_ids=given.input_ids, **more)
    got = output.last_hidden_state if reader == "AutoModel" else output.logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert json.loads(Path(folder, "config.json").read_text())["pad_token_id"] == tokenizer.pad_token_id


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("marian-tiny", marks=pytest.mark.sweep),
        "gpt-tiny --data.packed false",
        "bert-tiny --data.packed false --data.group_by_length true --plan.padding remove",
    ],
)
def test_a_run_learns_the_same_however_its_steps_are_cut(name: str, folder: Path) -> None:
    """Eight samples a step, of 1 to 13 words, in one micro-batch or in several."""
    texts = [" ".join(str(n * k % 97) for k in range(1, 2 + n * 5 % 13)) for n in range(200)]
    rows = [f"{text}\t{text[::-1]}" for text in texts]
    (folder / "rows.tsv").write_text("\n".join(["source\ttarget", *rows]))
    for part in (folder / "words").iterdir():
        part.unlink()
    (folder / "words" / "all.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    sides = ("encoder.", "decoder.") if name == "marian-tiny" else ("",)
    dropout = [word for side in sides for word in (f"--model.{side}dropout", "0")]
    found = []
    for size in (8, 2, 1):
        words = [*dropout, "--recipe.augment.label_smoothing", "0.1", "--plan.accumulate", str(8 // size)]
        records = _train(name, f"run-{size}", *words, batch=size)
        found.append({
            "losses": losses_of(f"run-{size}"),
            "norms": [record["grad_norm"] for record in records if record["event"] == "steps"],
            **{key: [r[key] for r in records if r["event"] == "evaluation"] for key in ("loss", "perplexity")},
        })  # fmt: skip
    for got in found[1:]:
        for key, values in found[0].items():
            assert got[key] == pytest.approx(values, rel=1e-5), key


def test_augmentations_that_a_task_does_not_know_are_told(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = ("--recipe.augment.mixup", "0.2", "--recipe.augment.label_smoothing", "0.1")
    for name, unknown in (("gpt-tiny", ["mixup", "label_smoothing"]), ("marian-tiny", ["mixup"])):
        caplog.clear()
        _train(name, name, *options)
        told = [record.getMessage() for record in caplog.records if "changes nothing" in record.getMessage()]
        assert [line.split()[0] for line in told] == [f"recipe.augment.{one}" for one in unknown]


def test_flops_of_a_token_do_not_depend_on_how_long_samples_may_be(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, each = "bert-tiny --task pairs", []
    job = ENROLLED[name]
    for length, padding in (("24", "keep"), ("512", "keep"), ("512", "remove")):
        words = job.words.replace("sequence 24", f"sequence {length}")
        monkeypatch.setitem(ENROLLED, name, job._replace(words=words))
        records = _train(name, f"run-{len(each)}", "--plan.padding", padding)
        last = [record for record in records if record["event"] == "steps"][-1]
        each.append(last["model_flops_per_second"] / last["tokens_per_second"])
    assert each[1:] == pytest.approx([each[0]] * 2, rel=0.05)


@pytest.mark.parametrize("name", sweep(ENROLLED, USUAL))
def test_a_run_goes_on_from_the_export_of_another(name: str, folder: Path) -> None:
    """`--from` takes sizes, weights and tokenizer from it, whatever the preset says of sizes."""
    first = _train(name, "first")
    words = [
        "--from", "first/export", "--recipe.steps", "2", "--recipe.warmup_share", "0", "--plan.micro_batch",
        "4",
    ]  # fmt: skip
    words += [
        "--machine", "machine.json", "--recipe.lr", "1e-9", "--data", ENROLLED[name].words.split("--data ")[1],
    ]  # fmt: skip
    assert main(["train", *name.split(), *words, "--output", "second"]) == 0
    before, after = (settled(load(RunConfig, file=f"{run}/run.toml").model) for run in ("first", "second"))  # type: ignore[arg-type]
    assert before == after
    metrics = [
        next(record["loss"] for record in reversed(records) if record["event"] == "evaluation")
        for records in (first, read_metrics(Path("second/metrics.jsonl")))
    ]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4)
