"""GGUF files, read back by others: the package gguf, and transformers' own reader."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.models_of_strangers import byte_level, chain, gpt2
from penstock.errors import ConfigError
from penstock.export.export import export

gguf = pytest.importorskip("gguf")
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "eos_token_id": [0, 2], "bos_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


def made(kind: str, folder: Path, **changes: Any) -> Path:
    """A small model of a kind, as transformers writes it."""
    import transformers

    if kind == "gpt2":
        return gpt2(folder, positions=1024)  # as transformers' reader takes for granted
    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    more = {"head_dim": 128} if kind == "qwen3" else {}  # as transformers' reader takes for granted
    size = len(byte_level(folder))
    config = getattr(transformers, f"{names[kind]}Config")(**{"vocab_size": size, **SIZES, **more, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{names[kind]}ForCausalLM")(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.2) if weight.ndim > 1 else weight.add_(torch.randn_like(weight) * 0.1)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2"])
def test_transformers_reads_the_model_that_was_written(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = made(kind, tmp_path / "model")
    path, difference = export(folder, tmp_path / "out", "gguf")
    assert difference == 0
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file=path.name).eval()
    tokens = torch.randint(0, 300, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(read(tokens).logits, theirs(tokens).logits, rtol=1e-4, atol=1e-4)


LLAMA_CPP = """
import json, sys, xllamacpp
path, prompt, text = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.cpuparams.n_threads = path, 256, 1
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = xllamacpp.Server(params)
how = {"max_tokens": 8, "temperature": 0, "logprobs": 1, "ignore_eos": True}
shown = server.handle_completions({"prompt": prompt, **how})["choices"][0]["logprobs"]["content"]
cut = server.handle_completions({"prompt": text, "max_tokens": 1})["usage"]["prompt_tokens"]
print(json.dumps([[[token["id"], token["logprob"]] for token in shown], cut]))
"""


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2"])
def test_llama_cpp_makes_the_same_tokens(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = made(kind, tmp_path / "model")
    path, _ = export(folder, tmp_path / "out", "gguf")
    theirs, text = AutoModelForCausalLM.from_pretrained(folder).eval(), "Hello, wörld! 12345 a  b\nc"
    torch.manual_seed(1)
    tokens = torch.randint(3, 250, (1, 40))
    prompt, expected = tokens[0].tolist(), []
    for _ in range(8):
        with torch.no_grad():
            best = theirs(tokens).logits[0, -1].log_softmax(-1).max(-1)
        expected.append((int(best.indices), float(best.values)))
        tokens = torch.cat((tokens, best.indices.view(1, 1)), 1)
    words = [sys.executable, "-c", LLAMA_CPP, str(path), json.dumps(prompt), text]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    shown, cut = json.loads(done.stdout.splitlines()[-1])
    assert cut == len(AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"])
    assert shown
    rest = iter(expected)
    for token, score in shown:  # it shows no token that ends within a character
        wanted = next((score for other, score in rest if other == token), None)
        assert wanted == pytest.approx(score, abs=0.002)


def test_the_tokenizer_and_the_settings_are_in_the_file(tmp_path: Path) -> None:
    folder = made("llama", tmp_path / "model", rope_parameters=LLAMA3, tie_word_embeddings=True)
    path, _ = export(folder, tmp_path / "out", "gguf", "bf16")
    reader = gguf.GGUFReader(str(path))
    tokenizer = byte_level(tmp_path / "again")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["tokenizer.ggml.model"] == "gpt2"
    assert fields["tokenizer.ggml.pre"] == "gpt-2"
    assert fields["tokenizer.ggml.tokens"] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert fields["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1]
    merges = json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]
    assert fields["tokenizer.ggml.merges"] == [" ".join(pair) for pair in merges]
    assert fields["tokenizer.chat_template"] == tokenizer.chat_template
    assert (fields["tokenizer.ggml.eos_token_id"], fields["tokenizer.ggml.eot_token_id"]) == (0, 2)
    assert (fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]) == (4, 2)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert "output.weight" not in tensors, "it is the table of tokens"
    assert tensors["blk.1.attn_k.weight"].tensor_type.name == "BF16"
    assert tensors["blk.1.attn_norm.weight"].tensor_type.name == "F32"
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = AutoConfig.from_pretrained(folder)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    factors = torch.from_numpy(tensors["rope_freqs.weight"].data.copy())
    torch.testing.assert_close(plain / factors, scaled, rtol=1e-5, atol=1e-8)


def test_what_llama_cpp_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer of the kind Unigram"):
        export(chain(tmp_path / "chain"), tmp_path / "out", "gguf")
    folder = made("qwen2", tmp_path / "model", use_sliding_window=True, sliding_window=5, max_window_layers=0)
    with pytest.raises(ConfigError, match="no qwen2 with a sliding window"):
        export(folder, tmp_path / "out", "gguf")
    with pytest.raises(ConfigError, match="knows no heads"):
        export(folder, tmp_path / "out", "gguf", heads=["head"])
