"""Well-known checkpoints in the form in which they lie on the hub: options that no class of transformers reads, names
of weights from other times, and buffers. Each is a small random model with what the real one's files have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.errors import ConfigError
from penstock.models.convert import from_pretrained

transformers = pytest.importorskip("transformers")

State = dict[str, Tensor]
WORDS, LENGTH = 40, 16
TEXT: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
SIZES: dict[str, Any] = {**TEXT, "vocab_size": WORDS, "max_position_embeddings": LENGTH}
BART: dict[str, Any] = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": WORDS,
    "max_position_embeddings": LENGTH,
}  # fmt: skip
T5: dict[str, Any] = {
    "d_model": 16, "d_kv": 8, "num_layers": 2, "num_heads": 2, "d_ff": 24, "vocab_size": WORDS,
}  # fmt: skip
GPT2: dict[str, Any] = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": WORDS, "n_positions": LENGTH}
OLD_ROPE: dict[str, Any] = {"rope_parameters": None, "rope_theta": 1000000.0, "rope_scaling": None}


class Found(NamedTuple):
    """One checkpoint: transformers' class, its sizes, and how its files differ from those that it would write now."""

    cls: str
    sizes: dict[str, Any]
    options: dict[str, Any]
    weights: Callable[[State], State] = lambda state: state


def _masks(state: State) -> State:
    """GPT-2's, without the base model's prefix and with the masks of its attention."""
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, LENGTH, LENGTH).tril() for i in range(2)}
    return {name.removeprefix("transformer."): value for name, value in state.items()} | masks


def _old_norms(state: State) -> State:
    """BERT's, as TensorFlow named them, with the head of the next sentence and the positions' numbers."""
    renamed = {
        re.sub(
            r"LayerNorm\.bias$", "LayerNorm.beta", re.sub(r"LayerNorm\.weight$", "LayerNorm.gamma", name)
        ): value
        for name, value in state.items()
    }
    words, bias = state["bert.embeddings.word_embeddings.weight"], state["cls.predictions.bias"]
    return renamed | {
        "cls.predictions.decoder.weight": words.clone(), "cls.predictions.decoder.bias": bias.clone(),
        "cls.seq_relationship.weight": torch.zeros(2, 16), "cls.seq_relationship.bias": torch.zeros(2),
        "bert.embeddings.position_ids": torch.arange(LENGTH)[None],
    }  # fmt: skip


def _all_tables(state: State) -> State:
    """T5's, with the shared table under all of its names and a bias that nothing reads."""
    words = state["shared.weight"]
    return state | {
        "encoder.embed_tokens.weight": words.clone(), "decoder.embed_tokens.weight": words.clone(),
        "lm_head.weight": words.clone(),
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": torch.zeros(32, 2),
    }  # fmt: skip


def _own_head(state: State) -> State:
    """T5 1.1's, whose head is a table of its own."""
    return state | {"lm_head.weight": torch.full((WORDS, 16), 0.5)}


def _bare(state: State) -> State:
    """BART's, without the prefix of the model inside."""
    return {name.removeprefix("model."): value for name, value in state.items()}


def _frequencies(state: State) -> State:
    return state | {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)}


def _untied_places(state: State) -> State:
    """RoBERTa's, with a pooler and the numbers of positions."""
    more = {"roberta.pooler.dense.weight": torch.zeros(16, 16), "roberta.pooler.dense.bias": torch.zeros(16)}
    return state | more | {"roberta.embeddings.position_ids": torch.arange(LENGTH)[None]}


FOUND = {
    "gpt2": Found(
        "GPT2LMHeadModel", GPT2,
        {"n_ctx": LENGTH, "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}}, _masks,
    ),
    "gpt2-medium": Found("GPT2LMHeadModel", GPT2, {"n_special": 0, "predict_special_tokens": True}),
    "bert-base-uncased": Found(
        "BertForMaskedLM", SIZES, {"gradient_checkpointing": False, "position_embedding_type": "absolute"}, _old_norms
    ),
    "bert-base-multilingual-cased": Found(
        "BertForMaskedLM", SIZES,
        {"directionality": "bidi", "pooler_fc_size": 768, "pooler_num_attention_heads": 12, "pooler_num_fc_layers": 3,
         "pooler_size_per_head": 128, "pooler_type": "first_token_transform"},
    ),
    "roberta-base": Found("RobertaForMaskedLM", {**SIZES, "type_vocab_size": 1}, {}, _untied_places),
    "xlm-roberta-base": Found("XLMRobertaForMaskedLM", {**SIZES, "type_vocab_size": 1}, {"output_past": True}),
    "distilbert-base-uncased": Found(
        "DistilBertForMaskedLM",
        {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "vocab_size": WORDS,
         "max_position_embeddings": LENGTH},
        {"sinusoidal_pos_embds": False, "tie_weights_": True},
    ),
    "ModernBERT-base": Found(
        "ModernBertForMaskedLM",
        {**SIZES, "num_hidden_layers": 4, "local_attention": 4, "pad_token_id": 0, "eos_token_id": 2,
         "bos_token_id": 1, "cls_token_id": 1, "sep_token_id": 2},
        {"layer_types": None, "rope_parameters": None, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0,
         "global_attn_every_n_layers": 3, "classifier_pooling": "mean", "position_embedding_type": "absolute",
         "layer_norm_eps": 1e-5, "gradient_checkpointing": False},
    ),
    "t5-small": Found(
        "T5ForConditionalGeneration", T5,
        {"n_positions": 512, "output_past": True, "task_specific_params": {"summarization": {"num_beams": 4}}},
        _all_tables,
    ),
    "flan-t5-small": Found(
        "T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu"},
        {"n_positions": 512, "tie_word_embeddings": False, "scale_decoder_outputs": None}, _own_head,
    ),
    "mt5-small": Found(
        "MT5ForConditionalGeneration", T5, {"tie_word_embeddings": False, "tokenizer_class": "T5Tokenizer"}, _own_head
    ),
    "bart-base": Found(
        "BartForConditionalGeneration", BART,
        {"architectures": ["BartModel"], "add_bias_logits": False, "add_final_layer_norm": False,
         "normalize_before": False, "normalize_embedding": True, "classif_dropout": 0.1, "early_stopping": True,
         "no_repeat_ngram_size": 3, "forced_bos_token_id": 0, "forced_eos_token_id": 2}, _bare,
    ),
    "bart-large-cnn": Found(
        "BartForConditionalGeneration", BART,
        {"_num_labels": 3, "force_bos_token_to_be_generated": True, "length_penalty": 2.0, "prefix": " "},
    ),
    "opus-mt-en-de": Found(
        "MarianMTModel", {**BART, "scale_embedding": True, "activation_function": "swish", "pad_token_id": WORDS - 1},
        {"bad_words_ids": [[WORDS - 1]], "normalize_embedding": False, "static_position_embeddings": True,
         "share_encoder_decoder_embeddings": True, "extra_pos_embeddings": 39, "num_beams": 6},
    ),
    "Llama-2-7b": Found("LlamaForCausalLM", SIZES, {**OLD_ROPE, "pretraining_tp": 1}, _frequencies),
    "SmolLM2-135M": Found(
        "LlamaForCausalLM", {**SIZES, "tie_word_embeddings": True},
        {**OLD_ROPE, "is_llama_config": True, "rope_interleaved": False,
         "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
    ),
    "Mistral-7B-v0.3": Found(
        "MistralForCausalLM", {**SIZES, "num_key_value_heads": 1}, {**OLD_ROPE, "sliding_window": None}
    ),
    "Qwen2.5-0.5B": Found(
        "Qwen2ForCausalLM", {**SIZES, "num_key_value_heads": 1},
        {**OLD_ROPE, "layer_types": None, "use_mrope": False, "use_sliding_window": False, "sliding_window": 131072,
         "max_window_layers": 28},
    ),
}  # fmt: skip


def _written(name: str, folder: Path) -> Any:
    """The checkpoint in a folder, and transformers' model that it was made of, which computes what it should."""
    found = FOUND[name]
    torch.manual_seed(0)
    cls = getattr(transformers, found.cls)
    given = {key: value for key, value in found.options.items() if key.startswith(("rope_theta", "sliding"))}
    model = cls(cls.config_class(**found.sizes, **given)).eval()
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    weights = found.weights(load_file(folder / "model.safetensors"))
    save_file({key: value.contiguous() for key, value in weights.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | found.options
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    if found.weights is _own_head:
        model.lm_head.weight = torch.nn.Parameter(weights["lm_head.weight"])
        model.config.scale_decoder_outputs = False
    return model


@pytest.mark.parametrize("name", FOUND)
def test_a_checkpoint_of_the_hub_computes_what_it_does_in_transformers(name: str, tmp_path: Path) -> None:
    theirs = _written(name, tmp_path)
    ours: Any = from_pretrained(tmp_path).eval()
    tokens, target = torch.randint(3, WORDS - 1, (2, 9)), torch.randint(3, WORDS - 1, (2, 5))
    lengths = torch.tensor([9, 9])
    with torch.no_grad():
        if theirs.config.is_encoder_decoder:
            got = ours(tokens, target, lengths)
            expected = theirs(input_ids=tokens, decoder_input_ids=target, use_cache=False).logits
        else:
            got = ours(tokens, lengths) if ours.graph.padded else ours(tokens)
            expected = theirs(input_ids=tokens).logits
    assert float((got - expected).norm() / expected.norm()) < 1e-5


def test_an_option_that_is_on_and_not_known_is_refused_still(tmp_path: Path) -> None:
    _written("Qwen2.5-0.5B", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"use_mrope": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="use_mrope True"):
        from_pretrained(tmp_path)
