"""The text models of transformers as data: what each option of their config.json is here, and which cannot be honoured.

An option is one of our fields, or has a value that must be, or changes nothing that a model computes. Any other is
refused by name unless it is off, so that no model is read as another. Off are false, null and what is empty.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.config.activations import GATED_NAMES, PLAIN_NAMES, Mlp
from penstock.config.layer import Latent, Rotary
from penstock.config.model import DecoderConfig, EncoderConfig, Seq2SeqConfig
from penstock.config.stack import Stack
from penstock.config.theirs import names as tables
from penstock.config.theirs.library import Library, Option, WindowTurns

FEED_FORWARD: dict[str, Mlp] = {**PLAIN_NAMES, "gated-gelu": "geglu_tanh", "gated-silu": "swiglu"}
"""T5's, whose `gated-gelu` is the tanh approximation."""
_ROPED: dict[str, Any] = {
    "norm": "rms", "bias": False, "qkv_bias": False, "positions": "rotary", "mlp": "swiglu",
}  # fmt: skip
_LLAMA: dict[str, Option] = {
    "vocab_size": (32000, ("vocabulary",)),
    "hidden_size": (4096, ("width",)),
    "intermediate_size": (11008, ("mlp_width",)),
    "num_hidden_layers": (32, ("depth",)),
    "num_attention_heads": (32, ("heads",)),
    "num_key_value_heads": ("=num_attention_heads", ("kv_heads",)),
    "rms_norm_eps": (1e-6, ("norm_eps",)),
    "max_position_embeddings": (2048, ("sequence",)),
    "tie_word_embeddings": (False, ("tied",)),
    "attention_dropout": (0.0, ("attention_dropout",)),
}
_LIKE_LLAMA: dict[str, Any] = {
    "activation": ("hidden_act", GATED_NAMES), "default": "silu", "names": tables.llama_names, "prefix": "model.",
    "heads": ("lm_head.",), "ignored": r"rotary_emb\.inv_freq$", "rotary": True,
}  # fmt: skip
_GEMMA: dict[str, Any] = {
    **_LIKE_LLAMA, "activation": ("hidden_activation", GATED_NAMES), "default": "gelu_pytorch_tanh",
    "names": tables.gemma_names,
}  # fmt: skip
_GEMMA_BASE: dict[str, Any] = {
    **_ROPED, "sandwich_norms": True, "norm_zero_centred": True, "scale_embeddings": True,
}  # fmt: skip
_GEMMA_OPTIONS: dict[str, Option] = {
    **_LLAMA,
    "vocab_size": (256000, ("vocabulary",)),
    "hidden_size": (2304, ("width",)),
    "intermediate_size": (9216, ("mlp_width",)),
    "num_hidden_layers": (26, ("depth",)),
    "num_attention_heads": (8, ("heads",)),
    "num_key_value_heads": (4, ("kv_heads",)),
    "head_dim": (256, ("head_features",)),
    "max_position_embeddings": (8192, ("sequence",)),
    "tie_word_embeddings": (True, ("tied",)),
}
_QWEN: dict[str, Option] = {
    **_LLAMA,
    "vocab_size": (151936, ("vocabulary",)),
    "intermediate_size": (22016, ("mlp_width",)),
    "num_key_value_heads": (32, ("kv_heads",)),
    "max_position_embeddings": (32768, ("sequence",)),
}
_LATENT: dict[str, Any] = {
    **_ROPED, "latent": Latent(), "experts": 1, "experts_per_token": 1, "router_normalised": False,
}  # fmt: skip
_DEEPSEEK: dict[str, Option] = {
    **{name: option for name, option in _LLAMA.items() if name != "num_key_value_heads"},
    "num_key_value_heads": ("=num_attention_heads", ("heads",)), "kv_lora_rank": (512, ("latent.kv_rank",)),
    "q_lora_rank": (1536, ("latent.query_rank",)), "qk_nope_head_dim": (128, ("latent.plain_width",)),
    "qk_rope_head_dim": (64, ("latent.rotary_width",)), "v_head_dim": (128, ("latent.value_width",)),
}  # fmt: skip
_DEEPSEEK_MUST: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,), "attention_bias": (False,), "moe_layer_freq": (1,),
}  # fmt: skip
_LIKE_DEEPSEEK: dict[str, Any] = {
    **_LIKE_LLAMA, "names": tables.deepseek_names, "nulls": frozenset({"q_lora_rank"}),
    "renamed": {"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"},
    # Heads that predict further tokens are a block behind the last.
    "ignored": _LIKE_LLAMA["ignored"] + r"|^model\.layers\.{depth}\.",
    "free": frozenset({
        "head_dim", "qk_head_dim", "ep_size", "seq_aux", "output_router_logits", "num_nextn_predict_layers",
        "num_mtp_layers",
    }),
}  # fmt: skip
_CAUSAL: dict[str, tuple[Any, ...]] = {"is_encoder_decoder": (False,), "partial_rotary_factor": (1.0, None)}
_BOTH = ("encoder", "decoder")


def _sides(name: str) -> tuple[str, ...]:
    return tuple(f"{side}.{name}" for side in _BOTH)


_BART: dict[str, Option] = {
    "vocab_size": (50265, ("vocabulary",)),
    "max_position_embeddings": (1024, ("max_positions",)),
    "d_model": (1024, _sides("width")),
    "encoder_layers": (12, ("encoder.depth",)),
    "encoder_ffn_dim": (4096, ("encoder.mlp_width",)),
    "encoder_attention_heads": (16, ("encoder.heads",)),
    "decoder_layers": (12, ("decoder.depth",)),
    "decoder_ffn_dim": (4096, ("decoder.mlp_width",)),
    "decoder_attention_heads": (16, ("decoder.heads",)),
    "dropout": (0.1, _sides("dropout")),
    "attention_dropout": (0.0, _sides("attention_dropout")),
    "activation_dropout": (0.0, _sides("mlp_dropout")),
    "scale_embedding": (False, ("scale_embeddings",)),
    "tie_word_embeddings": (True, ("tied",)),
}
_BART_MUST: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (True,), "is_decoder": (False,), "encoder_layerdrop": (0.0,), "decoder_layerdrop": (0.0,),
    "normalize_before": (False,), "add_final_layer_norm": (False,), "add_bias_logits": (False,),
}  # fmt: skip
_POST = Stack(norm_first=False)
_SINE = Stack(norm_first=False, positions="sinusoidal")
_T5_STACK = Stack(
    norm="rms", bias=False, qkv_bias=False, positions="relative", attention_scale=1.0, mlp="relu",
    mlp_dropout=None,
)  # fmt: skip

_T5: dict[str, Option] = {
    "vocab_size": (32128, ("vocabulary",)),
    "d_model": (512, _sides("width")),
    "d_kv": (64, _sides("head_features")),
    "d_ff": (2048, _sides("mlp_width")),
    "num_layers": (6, ("encoder.depth",)),
    "num_decoder_layers": ("=num_layers", ("decoder.depth",)),
    "num_heads": (8, _sides("heads")),
    "relative_attention_num_buckets": (32, _sides("relative_buckets")),
    "relative_attention_max_distance": (128, _sides("relative_distance")),
    "dropout_rate": (0.1, _sides("dropout")),
    "layer_norm_epsilon": (1e-6, _sides("norm_eps")),
    "tie_word_embeddings": (True, ("tied",)),
    "scale_decoder_outputs": ("=tie_word_embeddings", ("scale_outputs",)),
}
_LIKE_T5: dict[str, Any] = {
    "must": {"is_encoder_decoder": (True,), "is_decoder": (False,)},
    "activation": ("feed_forward_proj", FEED_FORWARD), "names": tables.t5_names, "prefix": "", "heads": (),
    "ignored": r"EncDecAttention\.relative_attention_bias",
}  # fmt: skip
_NLLB = Stack(mlp="relu", positions="fairseq", experts_per_token=2, router_normalised=True)
_ENCODER = EncoderConfig(norm_first=False, embedding_norm=True)
_BERT: dict[str, Option] = {
    "vocab_size": (30522, ("vocabulary",)),
    "hidden_size": (768, ("width",)),
    "num_hidden_layers": (12, ("depth",)),
    "num_attention_heads": (12, ("heads",)),
    "intermediate_size": (3072, ("mlp_width",)),
    "hidden_dropout_prob": (0.1, ("dropout",)),
    "attention_probs_dropout_prob": (0.1, ("attention_dropout",)),
    "max_position_embeddings": (512, ("max_positions",)),
    "type_vocab_size": (2, ("token_types",)),
    "layer_norm_eps": (1e-12, ("norm_eps",)),
    "tie_word_embeddings": (True, ("tied",)),
}
_BERT_MUST: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,), "is_decoder": (False,), "add_cross_attention": (False,),
    "position_embedding_type": ("absolute",), "classifier_dropout": (None,),
}  # fmt: skip
_LIKE_BERT: dict[str, Any] = {
    "default": "gelu", "names": tables.bert_names, "prefix": "bert.", "heads": ("cls.", "classifier."),
    "ignored": r"position_ids$|^cls\.seq_relationship\.|^cls\.predictions\.(decoder\.|bias$)|^bert\.pooler\.",
}  # fmt: skip

LIBRARIES: tuple[Library, ...] = (
    Library(
        model_type="gpt2",
        architectures={"words": "GPT2LMHeadModel"},
        base=DecoderConfig(init="scaled"),
        options={
            "vocab_size": (50257, ("vocabulary",)), "n_positions": (1024, ("max_positions",)),
            "n_embd": (768, ("width",)), "n_layer": (12, ("depth",)), "n_head": (12, ("heads",)),
            "n_inner": (None, ("mlp_width",)), "resid_pdrop": (0.1, ("dropout",)), "embd_pdrop": (0.1, ("dropout",)),
            "attn_pdrop": (0.1, ("attention_dropout",)), "layer_norm_epsilon": (1e-5, ("norm_eps",)),
            "tie_word_embeddings": (True, ("tied",)),
        },
        must={
            **_CAUSAL, "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
            "reorder_and_upcast_attn": (False,), "add_cross_attention": (False,),
        },
        activation=("activation_function", PLAIN_NAMES), default="gelu_new",
        names=tables.gpt2_names, prefix="transformer.", heads=("lm_head.",), ignored=r"\.attn\.(masked_)?bias$",
    ),
    Library(
        model_type="llama",
        architectures={"words": "LlamaForCausalLM"},
        base=DecoderConfig(**_ROPED),
        options={
            **_LLAMA, "head_dim": (None, ("head_features",)), "attention_bias": (False, ("qkv_bias", "bias")),
            "mlp_bias": (False, ("bias",)),
        },
        # transformers' Llama knows no window: it would see all tokens in spite of these.
        must={**_CAUSAL, "sliding_window": (None,), "use_sliding_window": (False, None)},
        **_LIKE_LLAMA,
    ),
    Library(
        model_type="mistral",
        architectures={"words": "MistralForCausalLM"},
        base=DecoderConfig(**_ROPED),
        options={
            **_LLAMA, "intermediate_size": (14336, ("mlp_width",)), "num_key_value_heads": (8, ("kv_heads",)),
            "max_position_embeddings": (131072, ("sequence",)), "head_dim": (None, ("head_features",)),
        },
        must={**_CAUSAL, "layer_types": (None,)},
        **_LIKE_LLAMA, window="always",
    ),
    Library(
        model_type="phi3",
        architectures={"words": "Phi3ForCausalLM"},
        base=DecoderConfig(**_ROPED),
        options={
            **_LLAMA, "vocab_size": (32064, ("vocabulary",)), "hidden_size": (3072, ("width",)),
            "intermediate_size": (8192, ("mlp_width",)), "rms_norm_eps": (1e-5, ("norm_eps",)),
            "max_position_embeddings": (4096, ("sequence",)),
        },
        must={"is_encoder_decoder": (False,), "resid_pdrop": (0.0,)},
        free=frozenset({"embd_pdrop", "full_attn_mod", "interpolate_factor"}),
        **{**_LIKE_LLAMA, "names": tables.phi_names}, window="given", partial=True, saves_itself=True,
        last_token=("pad_token_id",),
    ),
    Library(
        model_type="olmo2",
        architectures={"words": "Olmo2ForCausalLM"},
        base=DecoderConfig(**_ROPED, branch_norms=True, qk_norm=True, qk_norm_whole=True),
        options={
            **_LLAMA, "vocab_size": (50304, ("vocabulary",)), "rms_norm_eps": (1e-5, ("norm_eps",)),
        },
        must={**_CAUSAL, "attention_bias": (False,)},
        **{**_LIKE_LLAMA, "names": tables.olmo_names},
    ),
    Library(
        model_type="smollm3",
        architectures={"words": "SmolLM3ForCausalLM"},
        base=DecoderConfig(**_ROPED, rotary=Rotary(base=2e6)),
        options={
            **_LLAMA, "vocab_size": (128256, ("vocabulary",)), "hidden_size": (2048, ("width",)),
            "num_hidden_layers": (36, ("depth",)), "num_attention_heads": (16, ("heads",)),
            "num_key_value_heads": (4, ("kv_heads",)), "max_position_embeddings": (32768, ("sequence",)),
            "tie_word_embeddings": (True, ("tied",)), "attention_bias": (False, ("qkv_bias", "bias")),
            "mlp_bias": (False, ("bias",)),
        },
        # Only blocks without positions would have its windows.
        must={**_CAUSAL, "use_sliding_window": (False, None)},
        **_LIKE_LLAMA, window="flagged", unturned=True, last_token=("pad_token_id",),
    ),
    *(
        Library(
            model_type=kind,
            architectures={"words": f"{name}ForCausalLM"},
            base=DecoderConfig(
                **{**_ROPED, "qkv_bias": True}, sandwich_norms=after, rotary=Rotary(share=0.5, interleaved=True),
            ),
            options={
                **_LLAMA, "vocab_size": (151552, ("vocabulary",)), "intermediate_size": (13696, ("mlp_width",)),
                "num_hidden_layers": (40, ("depth",)), "num_key_value_heads": (2, ("kv_heads",)),
                "head_dim": (128, ("head_features",)), "max_position_embeddings": (131072, ("sequence",)),
                "rms_norm_eps": (1.5625e-07, ("norm_eps",)), "attention_bias": (True, ("qkv_bias",)),
            },
            must={"is_encoder_decoder": (False,)},
            **{**_LIKE_LLAMA, "names": names}, partial=True, last_token=("pad_token_id",),
        )
        for kind, name, names, after in (
            ("glm", "Glm", tables.glm_names, False), ("glm4", "Glm4", tables.glm4_names, True),
        )
    ),
    Library(
        model_type="qwen2",
        architectures={"words": "Qwen2ForCausalLM"},
        base=DecoderConfig(**{**_ROPED, "qkv_bias": True}),
        options=_QWEN,
        must=_CAUSAL,
        **_LIKE_LLAMA, window="flagged",
    ),
    Library(
        model_type="qwen3",
        architectures={"words": "Qwen3ForCausalLM"},
        base=DecoderConfig(**_ROPED, qk_norm=True),
        options={**_QWEN, "head_dim": (128, ("head_features",))},
        must={**_CAUSAL, "attention_bias": (False,)},
        **_LIKE_LLAMA, window="flagged",
    ),
    Library(
        model_type="gemma2",
        architectures={"words": "Gemma2ForCausalLM"},
        base=DecoderConfig(**_GEMMA_BASE),
        options={
            **_GEMMA_OPTIONS, "final_logit_softcapping": (30.0, ("logit_cap",)),
            "attn_logit_softcapping": (50.0, ("score_cap",)),
        },
        must={**_CAUSAL, "attention_bias": (False,), "use_bidirectional_attention": (False, None)},
        free=frozenset({"cache_implementation"}),
        **_GEMMA,
        window=WindowTurns(
            window=("sliding_window", 4096), every=("", 2), last=True, scale=("query_pre_attn_scalar", 256),
        ),
    ),
    Library(
        model_type="gemma3_text",
        architectures={"words": "Gemma3ForCausalLM"},
        base=DecoderConfig(**_GEMMA_BASE, qk_norm=True),
        options={
            **_GEMMA_OPTIONS, "vocab_size": (262208, ("vocabulary",)),
            "max_position_embeddings": (131072, ("sequence",)),
        },
        must={
            **_CAUSAL, "attention_bias": (False,), "use_bidirectional_attention": (False, None),
            "final_logit_softcapping": (None,), "attn_logit_softcapping": (None,),
        },
        free=frozenset({"cache_implementation"}),
        **{**_GEMMA, "rotary": False, "ignored": r"^(model\.)?(vision_tower|multi_modal_projector)\."},
        window=WindowTurns(
            window=("sliding_window", 4096), every=("sliding_window_pattern", 6), last=True, base=("rope_theta", 1e6),
            near_base=("rope_local_base_freq", 1e4), scale=("query_pre_attn_scalar", 256),
        ),
    ),
    Library(
        model_type="mixtral",
        architectures={"words": "MixtralForCausalLM"},
        # transformers divides the weight of a token's only expert by itself, of which we say that it cannot learn.
        base=DecoderConfig(
            **_ROPED, rotary=Rotary(base=1e6), experts=8, experts_per_token=2, router_normalised=True,
        ),
        options={
            **_LLAMA, "intermediate_size": (14336, ("mlp_width",)), "num_key_value_heads": (8, ("kv_heads",)),
            "max_position_embeddings": (131072, ("sequence",)), "head_dim": (None, ("head_features",)),
            "rms_norm_eps": (1e-5, ("norm_eps",)), "num_local_experts": (8, ("experts",)),
            "num_experts_per_tok": (2, ("experts_per_token",)), "router_aux_loss_coef": (0.001, ("balance",)),
            "router_jitter_noise": (0.0, ("router_jitter",)),
        },
        must={**_CAUSAL, "sliding_window": (None,)},
        free=frozenset({"output_router_logits"}),
        **{**_LIKE_LLAMA, "names": tables.mixtral_names},
    ),
    Library(
        model_type="qwen3_moe",
        architectures={"words": "Qwen3MoeForCausalLM"},
        base=DecoderConfig(**_ROPED, qk_norm=True, experts=128, experts_per_token=8),
        options={
            **_QWEN, "hidden_size": (2048, ("width",)), "num_hidden_layers": (24, ("depth",)),
            "intermediate_size": (6144, ("mlp_width",)), "num_key_value_heads": (4, ("kv_heads",)),
            "head_dim": (None, ("head_features",)), "num_experts": (128, ("experts",)),
            "num_experts_per_tok": (8, ("experts_per_token",)), "moe_intermediate_size": (768, ("expert_width",)),
            "norm_topk_prob": (False, ("router_normalised",)), "decoder_sparse_step": (1, ("expert_every",)),
            "router_aux_loss_coef": (0.001, ("balance",)),
        },
        must={**_CAUSAL, "attention_bias": (False,)},
        renamed={"num_local_experts": "num_experts"},
        free=frozenset({"output_router_logits"}),
        **{**_LIKE_LLAMA, "names": tables.qwen_moe_names}, window="flagged",
    ),
    Library(
        model_type="gpt_oss",
        architectures={"words": "GptOssForCausalLM"},
        base=DecoderConfig(
            **{**_ROPED, "bias": True, "qkv_bias": True, "router_normalised": True}, sinks=True, router_bias=True,
            balance=0.0,
            rotary=Rotary(
                base=150000.0, scaling="yarn", factor=32.0, trained=4096, low=1.0, high=32.0, truncate=False,
            ),
        ),
        options={
            **_LLAMA, "vocab_size": (201088, ("vocabulary",)), "hidden_size": (2880, ("width",)),
            "intermediate_size": (2880, ("mlp_width",)), "num_hidden_layers": (36, ("depth",)),
            "num_attention_heads": (64, ("heads",)), "num_key_value_heads": (8, ("kv_heads",)),
            "head_dim": (64, ("head_features",)), "rms_norm_eps": (1e-5, ("norm_eps",)),
            "max_position_embeddings": (131072, ("sequence",)), "num_local_experts": (128, ("experts",)),
            "num_experts_per_tok": (4, ("experts_per_token",)),
        },
        # Its balance loss is added with output_router_logits alone.
        must={
            **_CAUSAL, "attention_bias": (True,), "swiglu_limit": (7.0,), "swiglu_alpha": (1.702,),
            "output_router_logits": (False,),
        },
        renamed={"num_experts": "num_local_experts"}, own=("balance",),
        free=frozenset({"experts_per_token", "initial_context_length", "router_aux_loss_coef"}),
        **{**_LIKE_LLAMA, "activation": ("hidden_act", {"silu": "swiglu_clamped"}), "names": tables.gpt_oss_names},
        window=WindowTurns(window=("sliding_window", 128), every=("", 2), last=True),
    ),
    Library(
        model_type="deepseek_v2",
        architectures={"words": "DeepseekV2ForCausalLM"},
        base=DecoderConfig(**_LATENT, group_best=1, balance=0.0),
        options={
            **_DEEPSEEK, "vocab_size": (102400, ("vocabulary",)), "aux_loss_alpha": (0.0, ("balance",)),
            "first_k_dense_replace": (0, ("dense_layers",)), "n_routed_experts": (64, ("experts",)),
            "n_shared_experts": (2, ("shared_experts",)), "moe_intermediate_size": (1407, ("expert_width",)),
            "num_experts_per_tok": (6, ("experts_per_token",)), "routed_scaling_factor": (1.0, ("router_scale",)),
            "n_group": (None, ("router_groups",)), "topk_group": (None, ("groups_per_token",)),
        },
        # With `greedy` all experts are one group.
        must={
            **_DEEPSEEK_MUST, "topk_method": ("group_limited_greedy", "greedy"), "scoring_func": ("softmax",),
            "norm_topk_prob": (False,), "mlp_bias": (False,),
        },
        **_LIKE_DEEPSEEK,
    ),
    Library(
        model_type="deepseek_v3",
        architectures={"words": "DeepseekV3ForCausalLM"},
        base=DecoderConfig(**_LATENT, router="sigmoid"),
        options={
            **_DEEPSEEK, "vocab_size": (129280, ("vocabulary",)), "hidden_size": (7168, ("width",)),
            "intermediate_size": (18432, ("mlp_width",)), "num_hidden_layers": (61, ("depth",)),
            "num_attention_heads": (128, ("heads",)), "max_position_embeddings": (4096, ("sequence",)),
            "first_k_dense_replace": (3, ("dense_layers",)), "n_routed_experts": (256, ("experts",)),
            "n_shared_experts": (1, ("shared_experts",)), "moe_intermediate_size": (2048, ("expert_width",)),
            "num_experts_per_tok": (8, ("experts_per_token",)), "routed_scaling_factor": (2.5, ("router_scale",)),
            "n_group": (8, ("router_groups",)), "topk_group": (4, ("groups_per_token",)),
            "norm_topk_prob": (True, ("router_normalised",)), "rope_interleave": (True, ("latent.interleaved",)),
        },
        must={**_DEEPSEEK_MUST, "topk_method": ("noaux_tc", None), "scoring_func": ("sigmoid",)}, own=("bias_rate",),
        **_LIKE_DEEPSEEK,
    ),
    Library(
        model_type="bert",
        architectures={
            "words": "BertForMaskedLM", "classes": "BertForSequenceClassification", "none": "BertModel",
        },
        base=_ENCODER,
        options=_BERT,
        must=_BERT_MUST,
        activation=("hidden_act", PLAIN_NAMES), **_LIKE_BERT,
    ),
    *(
        Library(
            model_type=kind,
            architectures={
                "words": f"{name}ForMaskedLM", "classes": f"{name}ForSequenceClassification", "none": f"{name}Model",
            },
            base=_ENCODER,
            options={**_BERT, "vocab_size": (words, ("vocabulary",))},
            # Numbers of positions begin behind that of the padding. In training, transformers' head for classes has one
            # more dropout than BERT's.
            must={**_BERT_MUST, "pad_token_id": (1,)}, shift=2,
            activation=("hidden_act", PLAIN_NAMES), **_LIKE_BERT, written=False,
        )
        for kind, name, words in (
            ("roberta", "Roberta", 50265), ("xlm-roberta", "XLMRoberta", 30522), ("camembert", "Camembert", 30522),
        )
    ),
    Library(
        model_type="distilbert",
        # Its head for classes has a ReLU where BERT's has a tanh.
        architectures={"words": "DistilBertForMaskedLM", "none": "DistilBertModel"},
        base=replace(_ENCODER, token_types=1, norm_eps=1e-12),
        options={
            "vocab_size": (30522, ("vocabulary",)), "max_position_embeddings": (512, ("max_positions",)),
            "n_layers": (6, ("depth",)), "n_heads": (12, ("heads",)), "dim": (768, ("width",)),
            "hidden_dim": (3072, ("mlp_width",)), "dropout": (0.1, ("dropout",)),
            "attention_dropout": (0.1, ("attention_dropout",)), "tie_word_embeddings": (True, ("tied",)),
        },
        must={"is_encoder_decoder": (False,), "is_decoder": (False,)},
        activation=("activation", PLAIN_NAMES), **_LIKE_BERT, written=False,
    ),
    Library(
        model_type="modernbert",
        architectures={
            "words": "ModernBertForMaskedLM", "classes": "ModernBertForSequenceClassification",
            "none": "ModernBertModel",
        },
        base=EncoderConfig(
            embedding_norm=True, first_norm=False, positions="rotary", token_types=0, pooler="norm",
        ),
        options={
            "vocab_size": (50368, ("vocabulary",)), "hidden_size": (768, ("width",)),
            "intermediate_size": (1152, ("mlp_width",)), "num_hidden_layers": (22, ("depth",)),
            "num_attention_heads": (12, ("heads",)), "max_position_embeddings": (8192, ("sequence",)),
            "norm_eps": (1e-5, ("norm_eps",)), "norm_bias": (False, ("norm_bias",)),
            "attention_bias": (False, ("qkv_bias", "bias")), "mlp_bias": (False, ("bias",)),
            "classifier_bias": (False, ("bias",)), "decoder_bias": (True, ("output_bias",)),
            "mlp_dropout": (0.0, ("mlp_dropout",)), "tie_word_embeddings": (True, ("tied",)),
        },
        must={
            "is_encoder_decoder": (False,), "is_decoder": (False,), "embedding_dropout": (0.0,),
            "attention_dropout": (0.0,), "classifier_activation": ("gelu",),
        },
        of_classes={"classifier_pooling": ("cls",), "classifier_dropout": (0.0,)},
        free=frozenset({
            "cls_token_id", "deterministic_flash_attn", "initializer_cutoff_factor", "layer_norm_eps",
            "position_embedding_type", "reference_compile", "repad_logits_with_grad", "sparse_pred_ignore_index",
            "sparse_prediction",
        }),
        activation=("hidden_activation", {"gelu": "geglu"}), default="gelu",
        names=tables.modernbert_names, prefix="model.", heads=("head.", "decoder.", "classifier."),
        ignored=r"^head\.|^decoder\.",
        window=WindowTurns(
            window=("local_attention", 128), every=("global_attn_every_n_layers", 3),
            base=("global_rope_theta", 160000.0), near_base=("local_rope_theta", 10000.0),
        ),
        last_token=("pad_token_id",),
    ),
    Library(
        model_type="t5",
        architectures={"words": "T5ForConditionalGeneration"},
        base=Seq2SeqConfig(encoder=_T5_STACK, decoder=_T5_STACK, init="fan_in"),
        options=_T5,
        default="relu", **_LIKE_T5,
    ),
    Library(
        model_type="mt5",
        architectures={"words": "MT5ForConditionalGeneration"},
        base=Seq2SeqConfig(encoder=_T5_STACK, decoder=_T5_STACK, init="fan_in", scale_outputs=False),
        options={
            **{name: option for name, option in _T5.items() if name != "scale_decoder_outputs"},
            "vocab_size": (250112, ("vocabulary",)), "d_ff": (1024, _sides("mlp_width")),
            "num_layers": (8, ("encoder.depth",)), "num_heads": (6, _sides("heads")),
        },
        default="gated-gelu", **_LIKE_T5, written=False,
    ),
    Library(
        model_type="switch_transformers",
        architectures={"words": "SwitchTransformersForConditionalGeneration"},
        base=Seq2SeqConfig(encoder=_T5_STACK, decoder=_T5_STACK, init="fan_in", scale_outputs=True),
        options={
            **{name: option for name, option in _T5.items() if not name.startswith(("scale_", "tie_"))},
            "d_model": (768, _sides("width")), "num_layers": (12, ("encoder.depth",)),
            "num_decoder_layers": (12, ("decoder.depth",)), "num_heads": (12, _sides("heads")),
            "num_experts": (8, _sides("experts")),
            "expert_capacity": (64, _sides("sample_capacity")),
            "num_sparse_encoder_layers": (3, ("encoder.expert_every",)),
            "num_sparse_decoder_layers": (3, ("decoder.expert_every",)),
            "router_jitter_noise": (0.01, _sides("router_jitter")),
            "router_aux_loss_coef": (0.001, _sides("balance")), "router_z_loss_coef": (0.001, _sides("z_loss")),
        },
        # Where nothing is tied, encoder and decoder have tables of their own.
        must={
            "is_encoder_decoder": (True,), "is_decoder": (False,), "add_cross_attention": (False,),
            "tie_word_embeddings": (True,), "router_bias": (False,), "router_dtype": ("float32",),
            "num_selected_experts": (1, None), "router_type": ("tokens_masked", None),
            "batch_prioritized_routing": (False, None),
        },
        # transformers counts steps itself, and puts padding, which comes last, behind all other tokens.
        free=frozenset({
            "add_router_probs", "encoder_sparse_step", "decoder_sparse_step", "router_ignore_padding_tokens",
            "feed_forward_proj",
        }),
        mixtures={"num_sparse_encoder_layers": "num_layers", "num_sparse_decoder_layers": "num_decoder_layers"},
        activation=("dense_act_fn", PLAIN_NAMES), default="relu", names=tables.switch_names, prefix="", heads=(),
        ignored=_LIKE_T5["ignored"],
    ),
    Library(
        model_type="nllb-moe",
        architectures={"words": "NllbMoeForConditionalGeneration"},
        base=Seq2SeqConfig(encoder=_NLLB, decoder=_NLLB),
        options={
            **_BART, "vocab_size": (128112, ("vocabulary",)), "encoder_layers": (12, ("encoder.depth",)),
            "decoder_layers": (12, ("decoder.depth",)), "decoder_ffn_dim": (4096, ("decoder.mlp_width",)),
            "attention_dropout": (0.1, _sides("attention_dropout")), "scale_embedding": (True, ("scale_embeddings",)),
            "num_experts": (128, _sides("experts")), "encoder_sparse_step": (4, ("encoder.expert_every",)),
            "decoder_sparse_step": (4, ("decoder.expert_every",)), "moe_token_dropout": (0.2, _sides("expert_dropout")),
            "router_aux_loss_coef": (0.001, _sides("balance")), "router_z_loss_coef": (0.001, _sides("z_loss")),
            "max_position_embeddings": (1024, ("sequence",)),
        },
        # Numbers of positions begin behind that of the padding. All but the last are what nllb-moe-54b has.
        must={
            **_BART_MUST, "pad_token_id": (1,), "router_bias": (False,), "router_dtype": ("float32",),
            "second_expert_policy": ("all",), "batch_prioritized_routing": (False,),
            "moe_eval_capacity_token_fraction": (1.0,),
        },
        # `expert_capacity` limits training alone, where ours has `capacity`; otherwise nothing is dropped before
        # normalising or after it.
        free=frozenset({
            "expert_capacity", "normalize_router_prob_before_dropping", "output_router_logits",
            "router_ignore_padding_tokens",
        }),
        activation=("activation_function", PLAIN_NAMES), default="relu",
        names=tables.nllb_moe_names, prefix="model.", heads=("lm_head.",),
        ignored=r"embed_positions\.weights?$",
    ),
    Library(
        model_type="bart",
        architectures={"words": "BartForConditionalGeneration"},
        base=Seq2SeqConfig(encoder=_POST, decoder=_POST, embedding_norm=True),
        options=_BART,
        must={**_BART_MUST, "normalize_embedding": (True,), "static_position_embeddings": (False,)},
        activation=("activation_function", PLAIN_NAMES), default="gelu",
        names=tables.bart_names, prefix="model.", heads=("lm_head.", "final_logits_bias"),
        ignored=r"^final_logits_bias$",
    ),
    Library(
        model_type="marian",
        architectures={"words": "MarianMTModel"},
        base=Seq2SeqConfig(encoder=_SINE, decoder=_SINE, init="xavier", output_bias=True),
        options={
            **_BART, "vocab_size": (58101, ("vocabulary",)), "decoder_vocab_size": ("=vocab_size", ("vocabulary",)),
        },
        must={
            **_BART_MUST, "share_encoder_decoder_embeddings": (True,), "normalize_embedding": (False,),
            "static_position_embeddings": (True,),
        },
        activation=("activation_function", PLAIN_NAMES), default="gelu",
        names=tables.bart_names, prefix="model.", heads=("lm_head.", "final_logits_bias"),
        ignored=r"embed_positions\.weight$|^final_logits_bias$", own=("output_bias",),
        last_token=("pad_token_id", "decoder_start_token_id"),
    ),
)  # fmt: skip
