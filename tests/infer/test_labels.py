"""Experts that labels choose, after training: each way to generate, prompts, options, the command line, the server."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.generation import logits_after, routed, tiny
from helpers.generation import served as engine_makes
from helpers.served import served
from penstock.cli import main
from penstock.config.decoding import Decoding
from penstock.config.machine import Machine, save_machine
from penstock.config.plan import Plan
from penstock.config.run import DataConfig
from penstock.decode.engine import Engine, Request
from penstock.errors import CheckpointError, ConfigError
from penstock.infer.generator import Generator
from penstock.infer.labels import TextLabels, labels_of
from penstock.kernels.cross_entropy import IGNORED
from penstock.models.convert import from_pretrained
from penstock.tasks.text import first_samples
from penstock.tasks.translation import Translation

ROWS = [[1, 2, 3], [4, 5, 6, 7, 8], [9], [1, 2, 3], [2, 9]]
LABELS = ["0", "2", "1", "1", "0"]
LANGUAGES = ("en", "sw", "yo")


@pytest.mark.parametrize("name", ["gpt", "marian-tiny"])
def test_a_label_chooses_the_experts_however_a_text_is_made(name: str) -> None:
    """Texts are those that the whole model makes without a cache, alone and in a batch of several labels."""
    model = routed(name)
    made = Generator(model, start=0, ends=())
    expected = []
    for row, label in zip(ROWS, LABELS):
        text = [0] if model.graph.remembered else list(row)
        begin = len(text)
        for _ in range(7):
            text.append(int(logits_after(model, text, row, routes=torch.tensor([int(label)])).argmax()))
        expected.append(tuple(text[begin:]))
    assert expected[0] != expected[3], "the label decides, where prompts are the same"

    def ids(rows: Any = ROWS, label: Any = LABELS, **settings: Any) -> list[tuple[int, ...]]:
        return [one.ids for one in made.generate(rows, label=label, max_tokens=7, **settings)]

    assert ids() == ids(speculate=3) == expected
    for settings in ({"beams": 3}, {"temperature": 1.0, "seed": 3}):
        both = ids([*ROWS[:1], *ROWS[1:2]], LABELS[:2], **settings)
        assert both[0] == ids(ROWS[0], LABELS[0], **settings)[0], settings
        if "seed" not in settings:
            assert both[1] == ids(ROWS[1], LABELS[1], **settings)[0], settings
        assert ids(ROWS[0], "1", **settings) != ids(ROWS[0], "0", **settings), settings
        # Labels 0 and 2 have the same expert.
        assert ids(ROWS[0], "2", **settings) == ids(ROWS[0], "0", **settings), settings
    for end in {token for text in expected for token in text}:  # texts that end leave the others theirs
        ending = Generator(model, start=0, ends=(end,))
        for settings in ({}, {"beams": 2, "early_stopping": "full"}):
            both = ending.generate(ROWS, label=LABELS, max_tokens=7, **settings)
            alone = (
                ending.generate(row, label=label, max_tokens=7, **settings)[0]
                for row, label in zip(ROWS, LABELS)
            )
            assert [one.ids for one in both] == [one.ids for one in alone], (end, settings)
    drafted = Generator(model, start=0, ends=(), draft=routed(name))
    assert [one.ids for one in drafted.generate(ROWS, label=LABELS, max_tokens=7, speculate=2)] == expected
    decoding = Decoding(max_tokens=7, ignore_end=True)
    wanted = [Request(ids=tuple(row), decoding=decoding, route=int(to)) for row, to in zip(ROWS, LABELS)]
    for cache in ("slots", "paged"):
        engine = Engine(model, slots=2, context=32, cache=cache, block=2, chunk=3, start=0)  # type: ignore[arg-type]
        assert [tuple(tokens) for tokens, _ in engine_makes(engine, wanted, late=2)] == expected, cache
    with pytest.raises(ConfigError, match="compiled step does not support labels"):
        Generator(model, Plan(compile="whole"), start=0, ends=())


def test_labels_come_from_prompts_or_options_and_others_are_refused() -> None:
    labels = TextLabels(LANGUAGES, in_prompts=True)
    assert labels.numbers(["en>sw: Germany", "sw>en: a>yo: b"]) == [1, 0]
    assert labels.numbers(["en>sw: Germany", [1, 2]], "yo") == [2, 2]
    assert labels.numbers(["a", "b"], ["yo", "en"]) == [2, 0]
    assert TextLabels().numbers(["en>sw: a", [3]]) == [None, None]
    for prompts, label, words in (
        (["en>de: a"], None, "'de' is not a label .* en, sw, yo"),
        (["en>sw: a"], "de", "'de' is not a label .* en, sw, yo"),
        (["en>sw: a", "a"], None, "a prompt has none.*or begin the prompt.* en, sw, yo"),
        ([[1, 2]], None, "a prompt has none.* en, sw, yo"),
        (["a", "b"], ["en"], "1 labels for 2 prompts"),
    ):
        with pytest.raises(ConfigError, match=words):
            labels.numbers(prompts, label)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"as label\. Its labels are en, sw, yo"):
        TextLabels(LANGUAGES).numbers(["en>sw: a"])
    with pytest.raises(ConfigError, match="leave label out"):
        TextLabels().numbers(["a"], "en")
    graph = routed("gpt").graph
    assert labels_of(graph, {}) == TextLabels(("0", "1", "2"))
    assert labels_of(graph, {"labels": [*LANGUAGES]}) == TextLabels(LANGUAGES)
    assert labels_of(tiny("gpt").graph, {"labels": [*LANGUAGES]}) == TextLabels()
    for wrong in (["en", "sw"], ["en", "en", "sw"], ["en", "sw", "sw", "yo"], [1, 2, 3], 3):
        with pytest.raises(CheckpointError, match="3 labels"):
            labels_of(graph, {"labels": wrong})


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export alone of a run whose labels choose experts, with other weights of the same shapes."""
    pytest.importorskip("babel")
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("run")
    peaks = {"fp32": 1e11, "bf16": 1e11, "fp16": 1e11}
    machine = Machine(name="desk", device="cpu", source="measured", peak_flops=peaks, launch_seconds=1e-6)
    save_machine(machine, folder / "machine.json")
    sides = "".join(
        f" --model.{side}.router given --model.{side}.experts_per_token 1 --model.{side}.depth 1"
        for side in ("encoder", "decoder")
    )
    words = (
        f"marian-moe-tiny --data names:en,sw,yo --data.limit 60 --recipe.steps 2 --plan.micro_batch 8{sides}"
    )
    where = ["--machine", str(folder / "machine.json"), "--output", str(folder / "run")]
    assert main(["train", *words.split(), *where]) == 0
    shutil.copytree(folder / "run" / "export", folder / "alone")
    shutil.rmtree(folder / "run")
    weights = load_file(folder / "alone" / "model.safetensors")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for weight in weights.values():
            if weight.ndim > 1:  # so few steps leave texts alike; these depend on every expert
                weight.normal_(std=0.5)
    save_file(weights, folder / "alone" / "model.safetensors")
    return folder / "alone"


def test_an_export_translates_as_evaluation_did(export: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = from_pretrained(export).eval()
    task = Translation()
    source = task.open(DataConfig(source="names:en,sw,yo", limit=60), model.config, "val")
    batch = task.prepare(source, model.config)(first_samples(source, 8), torch.device("cpu"))
    limits = ((batch.inputs[3] != IGNORED).sum(1) * 3 // 2 + 1).tolist()
    steps = min(batch.most - 1, *limits)
    expected = task._texts(task._translated(model, batch)[:, :steps])
    made = Generator(export)
    assert made.labels == TextLabels(LANGUAGES, in_prompts=True)
    assert made.tokenizer is not None
    prompts = task._texts(batch.inputs[0])
    assert len({prompt[:5] for prompt in prompts}) > 1
    found = made.generate(prompts, max_tokens=steps)
    assert [one.text for one in found] == expected
    assert len({*expected}) > 1
    of_each = [made.labels.names[number] for number in batch.inputs[7].tolist()]
    assert made.generate(prompts, label=of_each, max_tokens=steps) == found
    assert "".join(made.stream(prompts[0], max_tokens=steps)) == found[0].text

    words = ["generate", str(export), "--max_tokens", "12"]
    both = [one.text for one in made.generate(["en>sw: Germany", "en>yo: Germany"], max_tokens=12)]
    assert main([*words, "en>sw: Germany", "en>yo: Germany"]) == 0
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in both)
    other = made.generate("en>sw: Germany", label="yo", max_tokens=12)[0].text
    assert other != both[0]
    assert main([*words, "en>sw: Germany", "--label", "yo"]) == 0
    said = capsys.readouterr()
    assert said.out == f"{other}\n"
    assert re.match(r"Only the experts of label yo are loaded: [\d.]+ MB of weights, of [\d.]+ MB", said.err)
    for more in (["en>de: Germany"], ["Germany"], ["en>sw: Germany", "--label", "de"]):
        assert main([*words, *more]) == 2
        assert "labels are en, sw, yo." in " ".join(capsys.readouterr().err.split())


@pytest.mark.sweep
def test_an_export_is_served(export: Path) -> None:
    pytest.importorskip("uvicorn")
    made = Generator(export)
    expected = [one.text for one in made.generate(["en>sw: Germany", "en>yo: Germany"], max_tokens=12)]
    other = made.generate("en>sw: Germany", label="yo", max_tokens=12)[0].text
    with served(export, "slots=2", opener="penstock.serve.worker:opened") as running:

        def texts(body: dict[str, Any]) -> list[str]:
            status, answer, _ = running.ask("/v1/translate", body | {"max_tokens": 12})
            assert status == 200, answer
            return [one["text"] for one in answer["translations"]]

        both = ["en>sw: Germany", "en>yo: Germany"]
        assert texts({"text": both}) == expected
        assert texts({"text": both[0], "label": "yo"}) == [other]
        assert texts({"text": [both[0], both[0]], "label": ["sw", "yo"]}) == [expected[0], other]
        body = {"prompt": both[0], "label": "yo", "max_tokens": 12, "temperature": 0, "stream": True}
        lines = [line[6:] for line in running.ask("/v1/completions", body)[1].split("\n") if line]
        pieces = [json.loads(line)["choices"][0].get("text") for line in lines if line != "[DONE]"]
        assert "".join(piece or "" for piece in pieces) == other
        for wrong in ({"text": "Germany"}, {"text": "en>de: a"}, {"text": both[0], "label": "de"}):
            status, answer, _ = running.ask("/v1/translate", wrong)
            assert status == 400
            assert "labels are en, sw, yo." in answer["error"]["message"]
        status, answer, _ = running.ask("/v1/translate", {"text": both[0], "label": 3})
        assert (status, answer["error"]["message"][:10]) == (400, "label must")
