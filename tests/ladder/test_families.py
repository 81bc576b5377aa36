"""Climbs with a language model of every family, ours and transformers': which rungs are measured, however fast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers import foreign
from helpers.sweeps import sweep
from helpers.toy import toy_machine
from penstock.cli import main
from penstock.ladder import ladder

SHORT: dict[str, Any] = {"rounds": 2, "round_seconds": 0.01, "loss_steps": 0, "device": "cpu"}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A Machine file, so that nothing is probed; and races that end undecided."""
    monkeypatch.setattr("penstock.ladder.measure.Models.most_rounds", 2)
    return toy_machine(tmp_path)


PAIRS = "pairs:rows.tsv --data.columns source,target"
SIDES = ("encoder.", "decoder.")
TASKS: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "gpt-tiny --data text:words": (("",), {"loss-chunked"}),
    "bert-tiny --data text:words": (("",), {"loss-chunked"}),
    "gpt-tiny --data text:lines.jsonl --data.packed false --model.sequence 64": (("",), {"loss-chunked", "packed"}),
    "bert-tiny --data text:lines.jsonl --data.packed false": (("",), {"loss-chunked", "padding", "packed"}),
    f"bert-tiny --task pairs --data {PAIRS},label": (("",), {"padding", "length-groups"}),
    "t5-tiny --data text:words": (SIDES, {"loss-chunked"}),
    f"marian-tiny --data {PAIRS}": (SIDES, {"loss-chunked", "padding", "length-groups"}),
    "ddigits-tiny": (("",), {"token-order"}),
    "ddigits-moe-tiny": (("",), {"token-order", "experts-loop"}),
    "universal-tiny --data text:words": (("shared.", "understanding.", "generating."), {"token-order", "loss-chunked"}),
    "multimodal-tiny --data captions:en,de": (
        ("vision.", "text.", "writer."), {"token-order", "loss-chunked", "padding"},
    ),
}  # fmt: skip
"""A model's task, with its runs, and the rungs that not every model has."""
SLOW = [words for words in TASKS if words.startswith("gpt") and "packed" in words]


@pytest.mark.parametrize("words", sweep(TASKS, ["ddigits-moe-tiny"], slow=SLOW))
def test_the_ladder_of_a_task(
    words: str, machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        f"{'word ' * (1 + number % 9)}\t{'wort ' * (1 + number % 9)}\t{number % 2}" for number in range(400)
    ]
    lines = [json.dumps({"text": "word " * (1 + number % 9)}) for number in range(400)]
    Path("lines.jsonl").write_text("\n".join(lines))
    Path("words").mkdir()
    Path("words", "all.txt").write_text("\n".join(rows))
    Path("rows.tsv").write_text("\n".join(["source\ttarget\tlabel", *rows]))
    runs, rungs = TASKS[words]
    sizes = {"width": 32, "depth": 1, "heads": 2, "mlp_width": 48}
    options = [f"--model.{run}{name}={size}" for run in runs for name, size in sizes.items()]
    options += [
        "--rounds=2", "--round_seconds=0.01", "--loss_steps=0", "--batch=8", "--device=cpu", "--output=out",
        "--rungs=optimizer-fused,attention-plain,loss-chunked,padding,packed,length-groups,classifier,experts-loop"
        + ",token-order" * ("token-order" in rungs),
    ]  # fmt: skip
    assert main(["ladder", *words.split(), *options, "--machine", machine]) == 0
    found = json.loads(Path("out", "ladder.json").read_text(encoding="utf-8"))
    measured = {rung["name"] for rung in found["rungs"] if rung["to_baseline"] is not None}
    if "packed" in measured:
        measured.discard("length-groups")  # measured only where packing does not pay
    assert measured - {"baseline"} == {"optimizer-fused", "attention-plain", *rungs}
    assert all(rung["reason"] for rung in found["rungs"] if rung["status"] == "unsupported")
    preset, *rest = words.split()
    assert found["train_command"].startswith(f"penstock train {preset} --model.")
    assert all(word in found["train_command"] for word in rest)


FOREIGN = ("vit", "bert", "gpt2", "llama", "marian", "t5")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", sweep(FOREIGN, ["gpt2"], slow=["vit"]))
def test_the_ladder_of_a_foreign_transformer(name: str, machine: str) -> None:
    pytest.importorskip("transformers")

    def factory() -> tuple[nn.Module, Any, Any]:
        given, due = foreign.batches(name, 0, 4)
        batch = {"pixel_values" if name == "vit" else "input_ids": given, "labels": due}
        if name != "vit":
            batch["attention_mask"] = (torch.arange(6) < torch.tensor([[6], [2], [3], [3]])).long()
        return foreign.create(name), batch, lambda model, batch: model(**batch).loss

    rungs = ("matmul", "optimizer-fused", "attention-plain", "token-order", "loss-chunked", "padding")
    report = ladder(factory=factory, rungs=rungs, machine=machine, **SHORT)
    status = {rung.name: rung.status for rung in report.rungs}
    assert status["token-order"] == "unsupported"
    measured = {name for name, found in status.items() if found in ("kept", "not kept")}
    has = {"loss-chunked": name != "vit", "padding": name in ("bert", "marian")}
    assert measured - {"matmul"} == {
        "attention-plain",
        "optimizer-fused",
        *(rung for rung, there in has.items() if there),
    }
    assert all(status[rung] == "unsupported" for rung, there in has.items() if not there)
