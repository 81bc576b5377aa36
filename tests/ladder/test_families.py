"""Climbs with a language model of every family, ours and transformers': which rungs are measured, however fast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.sweeps import sweep
from helpers.toy import toy_machine
from penstock.cli import main
from penstock.ladder import ladder

SHORT: dict[str, Any] = {"rounds": 2, "round_seconds": 0.01, "loss_steps": 0, "device": "cpu"}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A Machine file, so that nothing is probed; and races that end undecided."""
    monkeypatch.setattr("penstock.ladder.models.Models.most_rounds", 2)
    return toy_machine(tmp_path)


TEXT = {
    "gpt-tiny --data text:words": {"loss-chunked"},
    "bert-tiny --data text:words": {"loss-chunked"},
    "gpt-tiny --data text:lines.jsonl --data.packed false --model.sequence 64": {"loss-chunked", "packed"},
    "bert-tiny --data text:lines.jsonl --data.packed false": {"loss-chunked", "padding", "packed"},
    "bert-tiny --task pairs --data pairs:rows.tsv --data.columns source,target,label": {
        "padding",
        "length-groups",
    },
    "t5-tiny --data text:words": {"loss-chunked"},
    "marian-tiny --data pairs:rows.tsv --data.columns source,target": {
        "loss-chunked",
        "padding",
        "length-groups",
    },
}
"""A family's task and the rungs of text that it has."""


@pytest.mark.parametrize(
    "words", sweep(TEXT, (), slow=[words for words in TEXT if words.startswith("gpt") and "packed" in words])
)
def test_the_ladder_of_a_family_of_text(
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
    sides = ("encoder.", "decoder.") if words.startswith(("t5", "marian")) else ("",)
    sizes = {"width": 32, "depth": 1, "heads": 2, "mlp_width": 48}
    options = [f"--model.{side}{name}={size}" for side in sides for name, size in sizes.items()]
    options += [
        "--rounds=2", "--round_seconds=0.01", "--loss_steps=0", "--batch=8", "--device=cpu", "--output=out",
    ]  # fmt: skip
    options += [
        "--rungs=optimizer-fused,attention-plain,loss-chunked,padding,packed,length-groups,classifier"
    ]
    assert main(["ladder", *words.split(), *options, "--machine", machine]) == 0
    found = json.loads(Path("out", "ladder.json").read_text(encoding="utf-8"))
    measured = {rung["name"] for rung in found["rungs"] if rung["to_baseline"] is not None}
    if "packed" in measured:
        measured.discard("length-groups")  # measured only where packing does not pay
    assert measured - {"baseline"} == {"optimizer-fused", "attention-plain", *TEXT[words]}
    assert all(rung["reason"] for rung in found["rungs"] if rung["status"] == "unsupported")
    preset, *rest = words.split()
    assert found["train_command"].startswith(f"penstock train {preset} --model.")
    assert all(word in found["train_command"] for word in rest)


SEVERAL: dict[str, tuple[list[str], set[str]]] = {
    "ddigits-tiny": ([""], set()),
    "ddigits-moe-tiny": ([""], {"experts-loop"}),
    "universal-tiny --data text:words": (["shared.", "understanding.", "generating."], {"loss-chunked"}),
    "multimodal-tiny --data captions:en,de": (["vision.", "text.", "writer."], {"loss-chunked", "padding"}),
}
"""A model of noisy images, of two branches, or of images and texts: its runs, and rungs that others lack."""


@pytest.mark.parametrize("words", sweep(SEVERAL, ["ddigits-moe-tiny"]))
def test_the_ladder_of_a_model_of_several_kinds_in_one(
    words: str, machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("words").mkdir()
    Path("words", "all.txt").write_text("\n".join(f"{n} and {n + 1} are {2 * n + 1}" for n in range(400)))
    runs, rungs = SEVERAL[words]
    sizes = {"width": 32, "depth": 1, "heads": 2, "mlp_width": 48}
    options = [f"--model.{run}{name}={size}" for run in runs for name, size in sizes.items()]
    options += [
        "--rounds=2", "--round_seconds=0.01", "--loss_steps=0", "--batch=4", "--device=cpu", "--output=out",
    ]  # fmt: skip
    options += ["--rungs=optimizer-fused,attention-plain,token-order,loss-chunked,padding,experts-loop"]
    assert main(["ladder", *words.split(), *options, "--machine", machine]) == 0
    found = json.loads(Path("out", "ladder.json").read_text(encoding="utf-8"))
    measured = {rung["name"] for rung in found["rungs"] if rung["to_baseline"] is not None}
    assert measured - {"baseline"} == {"optimizer-fused", "attention-plain", "token-order", *rungs}
    assert all(rung["reason"] for rung in found["rungs"] if rung["status"] == "unsupported")
    assert found["train_command"].startswith(f"penstock train {words.split()[0]} --model.")


_ENCODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_STACKS = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
}  # fmt: skip
FOREIGN: dict[str, dict[str, Any]] = {
    "ViTForImageClassification": {**_ENCODER, "image_size": 16, "patch_size": 8, "num_labels": 4},
    "BertForMaskedLM": {**_ENCODER, "vocab_size": 99},
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 99},
    "LlamaForCausalLM": {**_ENCODER, "vocab_size": 99},
    "MarianMTModel": {**_STACKS, "vocab_size": 99, "pad_token_id": 98, "decoder_start_token_id": 98},
    "T5ForConditionalGeneration": {
        "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 99,
        "decoder_start_token_id": 0,
    },
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", sweep(FOREIGN, ["GPT2LMHeadModel"], slow=["ViTForImageClassification"]))
def test_the_ladder_of_a_foreign_transformer(name: str, machine: str) -> None:
    transformers = pytest.importorskip("transformers")

    def factory() -> tuple[nn.Module, Any, Any]:
        kind = getattr(transformers, name)
        config = kind.config_class(**FOREIGN[name])
        if "ViT" in name:
            batch = {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.tensor([0, 1, 2, 3])}
        else:
            batch = {"input_ids": torch.randint(1, 90, (4, 12)), "labels": torch.randint(1, 90, (4, 12))}
            batch["attention_mask"] = (torch.arange(12) < torch.tensor([[12], [4], [5], [6]])).long()
        return kind(config), batch, lambda model, batch: model(**batch).loss

    report = ladder(
        factory=factory,
        rungs=("matmul", "optimizer-fused", "attention-plain", "token-order", "loss-chunked", "padding"),
        machine=machine,
        **SHORT,
    )
    status = {rung.name: rung.status for rung in report.rungs}
    assert status["token-order"] == "unsupported"
    measured = {name for name, found in status.items() if found in ("kept", "not kept")}
    has = {"loss-chunked": "ViT" not in name, "padding": name in ("BertForMaskedLM", "MarianMTModel")}
    assert measured - {"matmul"} == {
        "attention-plain",
        "optimizer-fused",
        *(rung for rung, there in has.items() if there),
    }
    assert all(status[rung] == "unsupported" for rung, there in has.items() if not there)
