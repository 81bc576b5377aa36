"""A run from a folder of transformers' Marian with its tokenizer, and on from what that run exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.marian import NUMBERS, write_files
from helpers.runs import records_of
from penstock.cli import main
from penstock.data.text.marian import Marian
from penstock.data.text.open import in_folder
from penstock.models.convert import from_pretrained

pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 48,
    "decoder_attention_heads": 2, "decoder_ffn_dim": 48, "max_position_embeddings": 32,
}  # fmt: skip
OPUS = {
    "add_bias_logits": False, "add_final_layer_norm": False, "bad_words_ids": [[len(NUMBERS) - 1]], "bos_token_id": 0,
    "extra_pos_embeddings": len(NUMBERS), "normalize_before": False, "normalize_embedding": False,
    "static_position_embeddings": True,
}  # fmt: skip
"""Options that the folders of Opus-MT hold besides."""


@pytest.fixture
def folder(folder: Path) -> Path:
    rows = [f"{n} in tens\t{n // 10} and {n % 10}" for n in range(120)]
    Path("rows.tsv").write_text("\n".join(["source\ttarget", *rows]))
    size = len(NUMBERS)
    config = transformers.MarianConfig(
        **SIZES, vocab_size=size, pad_token_id=size - 1, decoder_start_token_id=size - 1, scale_embedding=True,
        activation_function="swish",
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.MarianMTModel(config).save_pretrained("opus")
    file = Path("opus", "config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **OPUS}))
    write_files(Path("opus"))
    return folder


def _train(start: str, output: str) -> dict[str, Any]:
    words = f"--from {start} --task translation --data pairs:rows.tsv --recipe.steps 2 --recipe.lr 1e-3"
    more = f"--recipe.warmup_share 0 --plan.micro_batch 4 --machine machine.json --output {output}"
    assert main(["train", "marian-base", *words.split(), *more.split()]) == 0
    return records_of(output, "evaluation")[-1]


def test_a_run_goes_from_opus_mt_to_exports_and_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = _train("opus", "first")
    assert found["loss"] > 0
    assert "(reference: " in found["sample"]
    export = folder / "first" / "export"
    given, exported = in_folder(folder / "opus"), in_folder(export)
    assert isinstance(exported, Marian)
    assert exported.fingerprint == given.fingerprint
    said = json.loads((export / "config.json").read_text())
    assert said["model_type"] == "marian"
    assert [said[f"{name}_token_id"] for name in ("eos", "pad", "decoder_start")] == [
        0,
        *[len(NUMBERS) - 1] * 2,
    ]
    before, after = from_pretrained(folder / "opus"), from_pretrained(export)
    assert before.config == after.config
    assert not torch.equal(before.state_dict()["tokens.weight"], after.state_dict()["tokens.weight"])
    theirs, problems = transformers.MarianMTModel.from_pretrained(export, output_loading_info=True)
    assert not any(problems.values())
    source = torch.tensor([[*exported.encode(["3 in tens"])[0].tolist(), exported.end]])
    target = torch.tensor([[exported.start, *exported.encode_target(["0 and 3"])[0].tolist()]])
    with torch.no_grad():
        expected = theirs.eval()(input_ids=source, decoder_input_ids=target).logits
        torch.testing.assert_close(after.eval()(source, target), expected, rtol=1e-4, atol=1e-5)

    capsys.readouterr()
    assert main(["generate", "first", "3 in tens", "--max-tokens", "5", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["text"] == exported.decode(told["ids"])

    _train("first/export", "second")
    assert in_folder(folder / "second" / "export").fingerprint == given.fingerprint


def test_a_part_of_the_tokenizer_stops_a_run_before_it_begins(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "opus" / "target.spm").unlink()
    assert (
        main(["train", "marian-base", "--from", "opus", "--task", "translation", "--data", "pairs:rows.tsv"])
        == 4
    )
    assert "lacks target.spm" in capsys.readouterr().err
