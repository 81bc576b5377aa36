"""A chat model of transformers tuned by adapters beside weights of 4 bits: learned, resumed exactly, merged, asked, and
tuned on by preferences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from helpers.runs import train_into, train_whole_and_in_parts
from penstock.config.plan import Plan
from penstock.data.text.tokenizers import Bytes
from penstock.infer.load import loaded

SHARED = "--checkpoint_every 4 --log_every 1 --plan.micro_batch 8 --machine machine.json --device cpu"
ADAPTERS = "--recipe.lora.rank 4 --recipe.lora.base int4 --recipe.lr 3e-2 --recipe.steps 8"


def test_a_chat_model_beside_whose_weights_of_4_bits_adapters_learn(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        **sizes, num_key_value_heads=1, vocab_size=len(Bytes().words()), max_position_embeddings=96,
        initializer_range=0.1,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained("qwen")
    chats = [{"prompt": f"{n % 9}?", "completion": "yes" if n % 2 else "no"} for n in range(240)]
    Path("chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    given = "--from qwen --task chat --data text:chats.jsonl --data.tokenizer bytes --model.sequence 96"
    whole = train_whole_and_in_parts(monkeypatch, 7, given, ADAPTERS, SHARED)
    assert whole[-1] < whole[0] - 0.3

    # The export is a plain folder, of transformers' names, of the values beside which adapters learned.
    theirs = transformers.AutoModelForCausalLM.from_pretrained("whole/export").eval()
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        for weights in ("auto", "int4"):
            ours = loaded(Path("whole/export"), Plan(), weights=weights, tokenizer=None).model  # type: ignore[arg-type]
            # Rounded to 4 bits again it moves by as much as the weights moved in tuning at most.
            within = 1e-4 if weights == "auto" else 0.5
            torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=within)

    pairs = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(240)]
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    given = "--from whole --task preferences --data text:pairs.jsonl --model.sequence 96"
    preferred = train_into("preferred", given, ADAPTERS, SHARED)
    assert preferred[0] == pytest.approx(0.693147, abs=1e-5)
    assert preferred[-1] < 0.6
