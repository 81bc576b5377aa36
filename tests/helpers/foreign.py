"""Tiny models of transformers, unconverted, with batches and a loss. A model is enrolled by a line in `FOREIGN`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

WORDS, CLASSES = 11, 5
"""Neither 2 nor 4 ranks can share them out evenly."""


class Foreign(NamedTuple):
    """A class of transformers, the sizes of its configuration, and how many blocks it then has."""

    cls: str
    sizes: dict[str, Any]
    blocks: int = 2


_SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_TEXT = {**_SIZES, "vocab_size": WORDS, "max_position_embeddings": 16}
_GROUPED = {**_TEXT, "num_key_value_heads": 1}
_GPT2 = {
    "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": WORDS, "n_positions": 8, "pad_token_id": 0,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
_BERT = {**_TEXT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_BART = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": WORDS,
    "max_position_embeddings": 16, "pad_token_id": 0, "decoder_start_token_id": 0, "dropout": 0.0,
}  # fmt: skip
_T5 = {
    "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": WORDS, "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}  # fmt: skip
_IMAGES = {**_SIZES, "image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": CLASSES}
FOREIGN = {
    "vit": Foreign("ViTForImageClassification", _IMAGES), "gpt2": Foreign("GPT2LMHeadModel", _GPT2),
    "gpt2 of classes": Foreign("GPT2ForSequenceClassification", {**_GPT2, "num_labels": CLASSES}),
    "llama": Foreign("LlamaForCausalLM", _GROUPED),
    "mistral": Foreign("MistralForCausalLM", {**_GROUPED, "sliding_window": 4}),
    "qwen2": Foreign("Qwen2ForCausalLM", _GROUPED),
    "qwen3": Foreign("Qwen3ForCausalLM", {**_GROUPED, "head_dim": 8, "tie_word_embeddings": True}),
    "mixtral": Foreign("MixtralForCausalLM", {**_GROUPED, "num_local_experts": 4}),
    "bert": Foreign("BertForMaskedLM", _BERT),
    "bert of classes": Foreign("BertForSequenceClassification", {**_BERT, "num_labels": CLASSES}),
    "roberta": Foreign("RobertaForMaskedLM", {**_BERT, "pad_token_id": 0}),
    "roberta of classes": Foreign("RobertaForSequenceClassification",
    {**_BERT, "pad_token_id": 0, "num_labels": CLASSES}),
    "modernbert": Foreign("ModernBertForMaskedLM",
    {**_TEXT, "num_hidden_layers": 4, "local_attention": 4, "pad_token_id": 0, "eos_token_id": 2}, 4),
    "t5": Foreign("T5ForConditionalGeneration", _T5, 4), "bart": Foreign("BartForConditionalGeneration", _BART, 4),
    "marian": Foreign("MarianMTModel", _BART, 4),
}  # fmt: skip


def create(name: str, **changes: Any) -> Any:
    """A model of it, drawn from torch's global generator; with other sizes where they are given."""
    import transformers

    cls = getattr(transformers, FOREIGN[name].cls)
    return cls(cls.config_class(**{**FOREIGN[name].sizes, **changes}))


def batches(name: str, step: int, samples: int) -> tuple[Tensor, Tensor]:
    """What the model reads and what it is to give, the same for the same step: images (B, 1, 8, 8) or words (B, 6);
    classes (B,) or words (B, 6).
    """
    generator = torch.Generator().manual_seed(step)
    classes = torch.randint(0, CLASSES, (samples,), generator=generator)
    if name == "vit":
        return torch.randn(samples, 1, 8, 8, generator=generator), classes
    words = torch.randint(1, WORDS, (samples, 6), generator=generator)
    return words, classes if "num_labels" in FOREIGN[name].sizes else words.roll(-1, 1)


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Mean cross entropy. A decoder beside an encoder reads the words backwards."""
    given, due = batch
    config: Any = model.config
    more = {"decoder_input_ids": given.flip(1)} if config.is_encoder_decoder else {}
    logits = model(given, **more).logits
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return nn.functional.cross_entropy(logits.flatten(0, -2), due.flatten())
