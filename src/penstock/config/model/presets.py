"""The models that have a name, with where their sizes were published."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.config.layer import Latent, Rotary
from penstock.config.model.diffusion import DiffusionConfig
from penstock.config.model.every import ModelConfig
from penstock.config.model.family import NAMED, ModelFamily
from penstock.config.model.multimodal import MultimodalConfig
from penstock.config.model.text import DecoderConfig, EncoderConfig, Seq2SeqConfig
from penstock.config.model.universal import UniversalConfig
from penstock.config.model.vit import ViTConfig
from penstock.config.stack import Stack


def preset(name: str) -> ModelConfig:
    """The preset called `name`, of any family. Raises `ConfigError` naming the nearest."""
    return ModelFamily.parse(name)  # type: ignore[no-any-return]


def _dit(width: int, depth: int, heads: int) -> DiffusionConfig:
    """DiT over latents of 256 × 256 pixels, without its learned variances; patches of 2 × 2."""
    return DiffusionConfig(
        width=width, depth=depth, heads=heads, mlp_width=4 * width, predicts="eps", schedule="linear"
    )


def _vit(width: int, depth: int, heads: int, mlp_width: int, patch_size: int) -> ViTConfig:
    return ViTConfig(width=width, depth=depth, heads=heads, mlp_width=mlp_width, patch_size=patch_size)


def _dino2(width: int, depth: int, heads: int, **changes: Any) -> ViTConfig:
    """DINOv2 with patches of 14 × 14; its published variants with registers have 4 of them."""
    config = ViTConfig(
        width=width, depth=depth, heads=heads, mlp_width=4 * width, image_size=518, patch_size=14, layer_scale=1.0,
        class_token=True,
    )  # fmt: skip
    return replace(config, **changes)


def _gpt(width: int, depth: int, heads: int) -> DecoderConfig:
    """GPT as Megatron trains it: dropout 0.1, learned positions, tied embeddings, 2,048 tokens."""
    return DecoderConfig(
        width=width, depth=depth, heads=heads, mlp_width=4 * width, vocabulary=51200, sequence=2048, dropout=0.1,
        init="scaled",
    )  # fmt: skip


def _gpt2(width: int, depth: int, heads: int) -> DecoderConfig:
    return DecoderConfig(
        width=width, depth=depth, heads=heads, mlp_width=4 * width, mlp="gelu_tanh", dropout=0.1, init="scaled"
    )  # fmt: skip


def _mpt(width: int, depth: int, heads: int) -> DecoderConfig:
    """MPT of MosaicML's llm-foundry: tied embeddings, learned positions, no dropout."""
    return DecoderConfig(
        width=width, depth=depth, heads=heads, mlp_width=4 * width, vocabulary=50368, sequence=2048
    )  # fmt: skip


def _llama(
    width: int, depth: int, heads: int, kv_heads: int | None, mlp_width: int, **changes: Any
) -> DecoderConfig:
    """Llama 3, with what others change in it."""
    settings: dict[str, Any] = {
        "mlp": "swiglu", "vocabulary": 128256, "sequence": 8192, "positions": "rotary", "norm": "rms", "bias": False,
        "rotary": Rotary(base=500000.0), "qkv_bias": False, "tied": False, **changes,
    }  # fmt: skip
    return DecoderConfig(
        width=width, depth=depth, heads=heads, kv_heads=kv_heads, mlp_width=mlp_width, **settings
    )


def _llama2(width: int, depth: int, heads: int, kv_heads: int, mlp_width: int) -> DecoderConfig:
    return _llama(
        width, depth, heads, kv_heads, mlp_width, vocabulary=32000, sequence=4096, rotary=Rotary()
    )  # fmt: skip


def _llama32(width: int, depth: int, heads: int, features: int) -> DecoderConfig:
    long = Rotary(base=500000.0, scaling="llama3", factor=32.0)
    return _llama(width, depth, heads, 8, 8192, head_features=features, rotary=long, tied=True)


def _qwen(width: int, depth: int, heads: int, kv_heads: int, mlp_width: int, **changes: Any) -> DecoderConfig:
    return _llama(
        width, depth, heads, kv_heads, mlp_width, vocabulary=151936, rotary=Rotary(base=1e6), norm_eps=1e-6,
        tied=True, **changes,
    )  # fmt: skip


def _phi(width: int, depth: int, heads: int, kv_heads: int, mlp_width: int, **changes: Any) -> DecoderConfig:
    config = _llama(
        width, depth, heads, kv_heads, mlp_width, vocabulary=32064, sequence=4096, rotary=Rotary(), saved_as="phi3"
    )  # fmt: skip
    return replace(config, **changes)


def _olmo(width: int, depth: int, heads: int, kv_heads: int, mlp_width: int, **changes: Any) -> DecoderConfig:
    """Norms of what attention and MLP return alone, and of all heads' queries and keys at once."""
    config = _llama(
        width, depth, heads, kv_heads, mlp_width, vocabulary=100352, sequence=4096, norm_eps=1e-6, branch_norms=True,
        qk_norm=True, qk_norm_whole=True,
    )  # fmt: skip
    return replace(config, **changes)


def _glm(width: int, depth: int, heads: int, kv_heads: int, mlp_width: int, **changes: Any) -> DecoderConfig:
    """Norms around each part; pairs of neighbours turn, in half of a head."""
    config = _llama(
        width, depth, heads, kv_heads, mlp_width, vocabulary=151552, sequence=32768, qkv_bias=True, sandwich_norms=True,
        rotary=Rotary(share=0.5, interleaved=True),
    )  # fmt: skip
    return replace(config, **changes)


def _gemma(width: int, depth: int, mlp_width: int, **changes: Any) -> DecoderConfig:
    """Norms around each part, and of queries and keys; the last of six blocks sees all tokens."""
    config = _llama(
        width, depth, 4, 1, mlp_width, mlp="geglu_tanh", head_features=256, vocabulary=262144, sequence=32768,
        rotary=Rotary(base=1e6), window_base=1e4, window=512, global_every=6, global_offset=5, qk_norm=True,
        sandwich_norms=True, norm_zero_centred=True, norm_eps=1e-6, scale_embeddings=True, tied=True,
    )  # fmt: skip
    return replace(config, **changes)


def _gemma2(
    width: int, depth: int, heads: int, kv_heads: int, mlp_width: int, **changes: Any
) -> DecoderConfig:
    """Gemma 3 with soft caps in place of norms of queries and keys, and every second block with a window."""
    caps = {"score_cap": 50.0, "logit_cap": 30.0, "qk_norm": False, "rotary": Rotary(), "window_base": None}
    sizes = {"heads": heads, "kv_heads": kv_heads, "vocabulary": 256000, "sequence": 8192, "window": 4096}
    turns = {"global_every": 2, "global_offset": 1}
    return _gemma(width, depth, mlp_width, **{**caps, **sizes, **turns, **changes})


_LONG_GEMMA: dict[str, Any] = {
    "sequence": 131072, "window": 1024, "vocabulary": 262208, "window_scaled": False,
    "rotary": Rotary(base=1e6, scaling="linear", factor=8.0),
}  # fmt: skip
"""Settings of the larger ones, which are the language models of models that read images, too."""


def _qwen_moe(
    width: int, depth: int, heads: int, kv_heads: int, mlp_width: int, **changes: Any
) -> DecoderConfig:
    sizes = {"head_features": 128, "experts": 128, "experts_per_token": 8, "balance": 0.001, "tied": False}
    return replace(_qwen(width, depth, heads, kv_heads, mlp_width, qk_norm=True), **{**sizes, **changes})


def _gpt_oss(depth: int, experts: int, **changes: Any) -> DecoderConfig:
    """Every second block sees all tokens; heads have sinks, and experts a clamped SwiGLU with biases."""
    config = _llama(
        2880, depth, 64, 8, 2880, mlp="swiglu_clamped", head_features=64, vocabulary=201088, sequence=131072,
        rotary=Rotary(base=150000.0, scaling="yarn", factor=32.0, trained=4096, high=32.0, truncate=False),
        window=128, global_every=2, global_offset=1, sinks=True, bias=True, qkv_bias=True, experts=experts,
        experts_per_token=4, router_bias=True, balance=0.001,
    )  # fmt: skip
    return replace(config, **changes)


_DEEPSEEK: dict[str, Any] = {
    "rotary": Rotary(scaling="yarn", factor=40.0, trained=4096, high=32.0, mscale=0.707, mscale_all=0.707),
    "sequence": 4096, "vocabulary": 102400, "norm_eps": 1e-6, "dense_layers": 1, "experts_per_token": 6,
    "shared_experts": 2, "router_normalised": False, "group_best": 1, "balance": 0.001,
}  # fmt: skip
_DEEPSEEK_V3: dict[str, Any] = {
    **_DEEPSEEK, "rotary": replace(_DEEPSEEK["rotary"], mscale=1.0, mscale_all=1.0), "vocabulary": 129280,
    "dense_layers": 3, "experts": 256, "experts_per_token": 8, "shared_experts": 1, "expert_width": 2048,
    "router": "sigmoid", "router_groups": 8, "groups_per_token": 4, "group_best": 2, "router_normalised": None,
    "router_scale": 2.5, "balance": 0.01, "latent": Latent(),
}  # fmt: skip


def _t5(
    width: int, depth: int, heads: int, mlp_width: int, *, features: int = 64,
    mixtures: dict[str, Any] | None = None, **changes: Any,
) -> Seq2SeqConfig:  # fmt: skip
    stack = Stack(
        width=width, depth=depth, heads=heads, head_features=features, mlp_width=mlp_width, mlp="relu",
        positions="relative", attention_scale=1.0, norm="rms", norm_eps=1e-6, bias=False, qkv_bias=False,
        dropout=0.1, mlp_dropout=None, **(mixtures or {}),
    )  # fmt: skip
    config = Seq2SeqConfig(
        encoder=stack, decoder=stack, vocabulary=32128, sequence=512, decoder_sequence=512, scale_outputs=True,
        init="fan_in",
    )  # fmt: skip
    return replace(config, **changes)


def _translator(width: int, depth: int, heads: int, stack: dict[str, Any], **changes: Any) -> Seq2SeqConfig:
    """An encoder–decoder in the form of Vaswani et al.: a norm after each residual sum, one table of embeddings."""
    both = Stack(
        **{
            "width": width, "depth": depth, "heads": heads, "mlp_width": 4 * width, "norm_first": False,
            "positions": "sinusoidal", "dropout": 0.1, "attention_dropout": 0.0, **stack,
        }
    )  # fmt: skip
    sizes = {"sequence": 512, "decoder_sequence": 512, "scale_embeddings": True, "init": "xavier", **changes}
    return Seq2SeqConfig(encoder=both, decoder=both, **sizes)


def _bert(width: int, depth: int, heads: int, **changes: Any) -> EncoderConfig:
    config = EncoderConfig(
        width=width, depth=depth, heads=heads, mlp_width=4 * width, norm_eps=1e-12, norm_first=False,
        vocabulary=30522, sequence=512, embedding_norm=True, token_types=2, dropout=0.1,
    )  # fmt: skip
    return replace(config, **changes)


def _plain(width: int, depth: int, heads: int, dropout: float = 0.1) -> Stack:
    """Blocks in the form of GPT-2."""
    return Stack(width=width, depth=depth, heads=heads, mlp_width=4 * width, mlp="gelu_tanh", dropout=dropout)


def _universal(shared: Stack, branch: Stack, **changes: Any) -> UniversalConfig:
    return UniversalConfig(shared=shared, understanding=branch, generating=branch, init="scaled", **changes)


_BART: dict[str, Any] = {
    "positions": "learned",
    "mlp": "gelu",
    "attention_dropout": None,
    "mlp_dropout": None,
}
_BART_MODEL: dict[str, Any] = {"embedding_norm": True, "scale_embeddings": False, "init": "normal"}
_MODERN: dict[str, Any] = {
    "positions": "rotary", "rotary": Rotary(base=160000.0), "norm_first": True, "norm_eps": 1e-5, "norm_bias": False,
    "bias": False, "qkv_bias": False, "mlp": "geglu", "window": 128, "window_base": 10000.0, "global_every": 3,
    "token_types": 0, "dropout": 0.0, "first_norm": False, "pooler": "norm",
}  # fmt: skip

_MIXTRAL: dict[str, Any] = {"experts": 8, "experts_per_token": 2, "balance": 0.02}
_SWITCH: dict[str, Any] = {
    "experts": 8, "expert_every": 2, "balance": 0.001, "z_loss": 0.001, "router_jitter": 0.01, "sample_capacity": 64,
}  # fmt: skip
_BY_LANGUAGE = {
    "mlp": "relu", "norm_first": True, "experts": 26, "expert_every": 5, "experts_per_token": 1, "router": "given",
    "labels": 26,
}  # fmt: skip
"""An expert for each of 26 target languages, in every fifth block: 12 of 64."""
_NLLB: dict[str, Any] = {
    "mlp": "relu", "norm_first": True, "positions": "fairseq", "attention_dropout": None, "experts": 128,
    "experts_per_token": 2, "expert_every": 4, "balance": 0.001, "z_loss": 0.001, "expert_dropout": 0.2,
}  # fmt: skip
_VIT_MOE: dict[str, Any] = {
    "experts": 32, "experts_per_token": 2, "expert_every": 2, "router_normalised": False, "capacity": 1.05,
}  # fmt: skip

_DDIGITS = DiffusionConfig(
    image_size=8, patch_size=2, channels=1, width=96, depth=6, heads=3, mlp_width=384, classes=10
)
_TINY = Stack(width=96, depth=3, heads=3, mlp_width=384)

_SIGLIP: dict[str, Any] = {"classifier": "attention", "mlp": "gelu_tanh"}
_CLIP: dict[str, Any] = {
    "class_token": True, "stem_bias": False, "embedding_norm": True, "mlp": "gelu_quick", "norm_eps": 1e-5,
}  # fmt: skip
_DINO3: dict[str, Any] = {
    "class_token": True, "registers": 4, "positions": "axial", "rotary": Rotary(base=100.0), "key_bias": False,
    "layer_scale": 1.0, "norm_eps": 1e-5,
}  # fmt: skip
_TINY_IMAGES: dict[str, Any] = {
    "image_size": 8, "patch_size": 2, "channels": 1, "width": 96, "depth": 2, "heads": 3, "mlp_width": 384,
    "classes": 10,
}  # fmt: skip

PRESETS: dict[str, ModelConfig] = NAMED
PRESETS |= {
    # Dosovitskiy et al. 2021 Table 1 (B, L, H); Touvron et al. 2021 Table 1 (Ti, S); Zhai et al. 2022 Table 2 (g).
    "vit-ti16": _vit(192, 12, 3, 768, 16),
    "vit-s16": _vit(384, 12, 6, 1536, 16),
    "vit-b16": _vit(768, 12, 12, 3072, 16),
    "vit-b32": _vit(768, 12, 12, 3072, 32),
    "vit-l16": _vit(1024, 24, 16, 4096, 16),
    "vit-h14": _vit(1280, 32, 16, 5120, 14),
    "vit-h16": _vit(1280, 32, 16, 5120, 16),
    "vit-g14": _vit(1408, 40, 16, 6144, 14),
    # Oquab et al. 2023, "DINOv2", Table 17, and the published config.json of each.
    "dinov2-s14": _dino2(384, 12, 6),
    "dinov2-b14": _dino2(768, 12, 12),
    "dinov2-l14": _dino2(1024, 24, 16),
    "dinov2-g14": _dino2(1536, 40, 24, mlp="swiglu", mlp_width=4096),
    # Siméoni et al. 2025, "DINOv3", Table 6, and the published config.json of each.
    "dinov3-vits16": ViTConfig(width=384, depth=12, heads=6, mlp_width=1536, **_DINO3),
    "dinov3-vitb16": ViTConfig(**_DINO3),
    "dinov3-vitl16": ViTConfig(width=1024, depth=24, heads=16, mlp_width=4096, **_DINO3),
    # Zhai et al. 2023, "SigLIP", and Radford et al. 2021, "CLIP", Table 20: the towers over images.
    "siglip-b16": ViTConfig(**_SIGLIP),
    "siglip-so400m14": ViTConfig(width=1152, depth=27, heads=16, mlp_width=4304, patch_size=14, **_SIGLIP),
    "clip-vit-b32": ViTConfig(patch_size=32, **_CLIP),
    "clip-vit-l14": ViTConfig(width=1024, depth=24, heads=16, mlp_width=4096, patch_size=14, **_CLIP),
    # Riquelme et al. 2021, "V-MoE", Table 1 and section 3.1: every second block has 32 experts.
    "vit-moe-s32": replace(_vit(512, 8, 8, 2048, 32), **_VIT_MOE),
    "vit-moe-b16": replace(_vit(768, 12, 12, 3072, 16), **_VIT_MOE),
    "vit-moe-l16": replace(_vit(1024, 24, 16, 4096, 16), **_VIT_MOE),
    # Small enough to learn the embedded digits in a minute on a laptop: 8×8 pixels, 16 patches.
    "vit-digits": ViTConfig(
        image_size=8, patch_size=2, channels=1, width=96, depth=6, heads=3, mlp_width=384, classes=10,
        classifier="pooled",
    ),
    "vit-moe-tiny": ViTConfig(
        image_size=32, patch_size=8, width=128, depth=4, heads=4, mlp_width=256, classes=10, classifier="pooled",
        experts=4, experts_per_token=2, expert_every=2,
    ),
    "dinov2-tiny": replace(
        ViTConfig(**_TINY_IMAGES), layer_scale=1.0, class_token=True, registers=4, mlp="swiglu", mlp_width=256,
        classifier="both",
    ),
    "dinov3-tiny": ViTConfig(**_TINY_IMAGES, **_DINO3),
    "siglip-tiny": ViTConfig(**_TINY_IMAGES, **_SIGLIP),
    "clip-vit-tiny": ViTConfig(**_TINY_IMAGES, **_CLIP),
    # Peebles & Xie 2023, Table 1.
    "dit-s2": _dit(384, 12, 6),
    "dit-b2": _dit(768, 12, 12),
    "dit-l2": _dit(1024, 24, 16),
    "dit-xl2": _dit(1152, 28, 16),
    # Feng et al. 2023, "ERNIE-ViLG 2.0", section 3.1: 10 experts, 24 B parameters in all, of which 1.3 B encode texts.
    # Theirs is a U-Net, whose widths and depths are not published: this is a Transformer of as many parameters.
    "ernie-vilg2-24b": DiffusionConfig(
        width=2048, depth=24, heads=16, mlp_width=8704, classes=0, image_size=128, channels=4, patch_size=2,
        predicts="eps", schedule="linear", experts=10, experts_in="block", vocabulary=50000, sequence=77,
        text=Stack(width=2048, depth=24, heads=16, mlp_width=8192),
    ),
    # Small enough to learn the embedded digits in a few minutes: 8×8 pixels, 16 patches.
    "ddigits-tiny": _DDIGITS,
    # Each half of the times has perceptrons of its own in every block.
    "ddigits-moe-tiny": replace(_DDIGITS, experts=2),
    # Radford et al. 2019 Table 2, with the published vocabulary.
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    # Narayanan et al. 2021 Table 1, and Korthikanti et al. 2022 Table 3 (22B, 175B, 530B, 1T).
    "gpt-1.7b": _gpt(2304, 24, 24),
    "gpt-3.6b": _gpt(3072, 30, 32),
    "gpt-7.5b": _gpt(4096, 36, 32),
    "gpt-18b": _gpt(6144, 40, 48),
    "gpt-22b": _gpt(6144, 48, 64),
    "gpt-39b": _gpt(8192, 48, 64),
    "gpt-76b": _gpt(10240, 60, 80),
    "gpt-145b": _gpt(12288, 80, 96),
    "gpt-175b": _gpt(12288, 96, 96),
    "gpt-310b": _gpt(16384, 96, 128),
    "gpt-530b": _gpt(20480, 105, 128),
    "gpt-1t": _gpt(25600, 128, 160),
    # llm-foundry scripts/train/yamls/pretrain.
    "mpt-125m": _mpt(768, 12, 12),
    "mpt-350m": _mpt(1024, 24, 16),
    "mpt-760m": _mpt(1536, 24, 12),
    "mpt-1b": _mpt(2048, 24, 16),
    "mpt-3b": _mpt(2560, 32, 20),
    "mpt-7b": _mpt(4096, 32, 32),
    "mpt-13b": _mpt(5120, 40, 40),
    "mpt-30b": _mpt(7168, 48, 56),
    "mpt-70b": _mpt(8192, 80, 64),
    # Touvron et al. 2023 Table 1; Grattafiori et al. 2024 Table 3.
    "llama2-7b": _llama2(4096, 32, 32, 32, 11008),
    "llama2-13b": _llama2(5120, 40, 40, 40, 13824),
    "llama2-70b": _llama2(8192, 80, 64, 8, 28672),
    "llama3-1b": _llama32(2048, 16, 32, 64),
    "llama3-3b": _llama32(3072, 28, 24, 128),
    "llama3-8b": _llama(4096, 32, 32, 8, 14336),
    "llama3-70b": _llama(8192, 80, 64, 8, 28672),
    "llama3-405b": _llama(16384, 126, 128, 8, 53248),
    # Qwen Team 2024, "Qwen2.5", Table 1; Yang et al. 2025, "Qwen3", Table 1.
    "qwen2-0.5b": _qwen(896, 24, 14, 2, 4864, qkv_bias=True),
    "qwen3-0.6b": _qwen(1024, 28, 16, 8, 3072, head_features=128, qk_norm=True),
    # Abdin et al. 2024, "Phi-3" and "Phi-4", and the published config.json, where the factors of Phi-4-mini's positions
    # stand: the preset is without.
    "phi-3-mini": _phi(3072, 32, 32, 32, 8192, window=2047),
    "phi-4": _phi(5120, 40, 40, 10, 17920, vocabulary=100352, sequence=16384, rotary=Rotary(base=250000.0)),
    "phi-4-mini": _phi(3072, 32, 24, 8, 8192, vocabulary=200064, rotary=Rotary(share=0.75), tied=True),
    # Team OLMo 2024, "2 OLMo 2 Furious", and the published config.json.
    "olmo2-7b": _olmo(4096, 32, 32, 32, 11008),
    "olmo2-13b": _olmo(5120, 40, 40, 40, 13824),
    "olmo2-32b": _olmo(5120, 64, 40, 8, 27648),
    # The published config.json of SmolLM3-3B and of GLM-4-9B-0414.
    "smollm3-3b": _llama(
        2048, 36, 16, 4, 11008, sequence=65536, rotary=Rotary(base=5e6), unturned_every=4, norm_eps=1e-6, tied=True
    ),
    "glm-4-9b": _glm(4096, 40, 32, 2, 13696),
    # Gemma Team 2024, "Gemma 2", Table 1.
    "gemma2-2b": _gemma2(2304, 26, 8, 4, 9216),
    "gemma2-9b": _gemma2(3584, 42, 16, 8, 14336),
    "gemma2-27b": _gemma2(4608, 46, 32, 16, 36864, head_features=128, attention_scale=144**-0.5),
    # Gemma Team 2025, "Gemma 3 Technical Report", and the published config.json of the two.
    "gemma3-270m": _gemma(640, 18, 2048),
    "gemma3-1b": _gemma(1152, 26, 6912),
    "gemma3-4b": _gemma(2560, 34, 10240, heads=8, kv_heads=4, **_LONG_GEMMA),
    "gemma3-12b": _gemma(3840, 48, 15360, heads=16, kv_heads=8, **_LONG_GEMMA),
    "gemma3-27b": _gemma(
        5376, 62, 21504, heads=32, kv_heads=16, head_features=128, attention_scale=168**-0.5, **_LONG_GEMMA
    ),
    # BigScience Workshop 2022, section 3.2.
    "bloom-176b": DecoderConfig(
        width=14336, depth=70, heads=112, mlp_width=57344, vocabulary=250880, sequence=2048, positions="alibi",
        embedding_norm=True,
    ),
    # Jiang et al. 2024 Table 1.
    "mixtral-8x7b": _llama(
        4096, 32, 32, 8, 14336, vocabulary=32000, sequence=4096, rotary=Rotary(base=1e6), **_MIXTRAL,
    ),
    # Yang et al. 2025, "Qwen3", Table 2.
    "qwen3-30b-a3b": _qwen_moe(2048, 48, 32, 4, 6144, expert_width=768),
    "qwen3-235b-a22b": _qwen_moe(4096, 94, 64, 4, 12288, expert_width=1536),
    # OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", and the published config.json of the two.
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    # DeepSeek-AI 2024, "DeepSeek-V2", section 3.1.2 and appendix B, and "DeepSeek-V3", section 4.2, as R1 has them too;
    # their published config.json.
    "deepseek-v2-lite": _llama(
        2048, 27, 16, None, 10944, **_DEEPSEEK, experts=64, expert_width=1408, latent=Latent(query_rank=None),
    ),
    "deepseek-v2": _llama(
        5120, 60, 128, None, 12288, **_DEEPSEEK, experts=160, expert_width=1536, router_groups=8, groups_per_token=3,
        router_scale=16.0, latent=Latent(),
    ),
    "deepseek-v3": _llama(7168, 61, 128, None, 18432, **_DEEPSEEK_V3),
    # Devlin et al. 2019, section 3.
    "bert-base": _bert(768, 12, 12),
    "bert-large": _bert(1024, 24, 16),
    # The sizes and the form of Warner et al. 2024, "ModernBERT", Table 4.
    "modernbert-base": _bert(768, 22, 12, mlp_width=1152, vocabulary=50368, sequence=1024, **_MODERN),
    # Raffel et al. 2020, section 3.1.2 and 3.7.
    "t5-small": _t5(512, 6, 8, 2048),
    "t5-base": _t5(768, 12, 12, 3072),
    "t5-large": _t5(1024, 24, 16, 4096),
    "t5-3b": _t5(1024, 24, 32, 16384, features=128),
    "t5-11b": _t5(1024, 24, 128, 65536, features=128),
    # Fedus et al. 2022, section 4.2: T5 base with experts in every second block; with two of them for each token as
    # Lepikhin et al. 2021 have it. NLLB Team 2022, section 6.2.
    "switch-base-8": _t5(768, 12, 12, 3072, mixtures=_SWITCH),
    "t5-moe-base": _t5(768, 12, 12, 3072, mixtures={"experts": 8, "experts_per_token": 2, "expert_every": 2}),
    "nllb-moe-54b": _translator(
        2048, 24, 16, _NLLB, vocabulary=256206, sequence=1024, decoder_sequence=1024, init="normal"
    ),
    # Vaswani et al. 2017 Table 3; Opus-MT, as transformers' Marian has it; Lewis et al. 2020, section 3.
    "transformer-base": _translator(512, 6, 8, {"mlp": "relu"}, vocabulary=37000),
    "transformer-big": _translator(1024, 6, 16, {"mlp": "relu", "dropout": 0.3}, vocabulary=37000),
    "marian-base": _translator(512, 6, 8, {"mlp": "silu"}, vocabulary=58101, output_bias=True),
    "marian-moe-base": _translator(
        512, 6, 8, {"mlp": "silu", "experts": 8, "experts_per_token": 2}, vocabulary=58101, output_bias=True
    ),
    # A translator of 128 blocks, 24 of them mixtures whose expert the target language chooses, as one was published.
    # Widths, heads, vocabulary and which blocks are mixtures are not published: they are chosen here.
    "translator-moe-128": _translator(1024, 64, 16, _BY_LANGUAGE, vocabulary=64000),
    "bart-base": _translator(
        768, 6, 12, _BART, vocabulary=50265, sequence=1024, decoder_sequence=1024, **_BART_MODEL
    ),
    # The published sizes of Sun et al. 2021, "ERNIE 3.0", section 4.1. Of its Transformer-XL blocks the recurrence is
    # left out; vocabulary, heads' transforms and how 4,096 features become 768 are not published.
    "ernie3-10b": _universal(
        _plain(4096, 48, 64), _plain(768, 12, 12), vocabulary=40000, sequence=512, tied=False, token_types=4,
    ),
    # Small enough for a test or a minute on a laptop.
    "gpt-tiny": replace(_gpt2(128, 4, 4), vocabulary=2048, sequence=128, dropout=0.0),
    "llama-tiny": _llama(128, 4, 4, 2, 352, vocabulary=2048, sequence=128),
    "qwen-tiny": replace(_qwen(128, 4, 4, 2, 352, qk_norm=True), vocabulary=2048, sequence=128),
    "mixtral-tiny": _llama(128, 4, 4, 2, 352, vocabulary=2048, sequence=128, **{**_MIXTRAL, "experts": 4}),
    "phi-tiny": _phi(128, 4, 4, 2, 352, vocabulary=2048, sequence=128, rotary=Rotary(share=0.75)),
    "olmo2-tiny": _olmo(128, 4, 4, 2, 352, vocabulary=2048, sequence=128),
    "smollm3-tiny": _llama(128, 4, 4, 2, 352, vocabulary=2048, sequence=128, unturned_every=4, tied=True),
    "glm-tiny": _glm(128, 4, 4, 2, 352, vocabulary=2048, sequence=128),
    "gemma2-tiny": _gemma2(
        128, 4, 4, 2, 352, head_features=None, window=32, vocabulary=2048, sequence=128, score_cap=5.0, logit_cap=3.0
    ),
    "gemma3-tiny": _gemma(
        128, 4, 352, kv_heads=2, head_features=None, window=32, global_every=3, global_offset=2, vocabulary=2048,
        sequence=128,
    ),
    "qwen3-moe-tiny": _qwen_moe(
        128, 4, 4, 2, 352, vocabulary=2048, sequence=128, head_features=32, experts=8, experts_per_token=2,
        expert_width=96,
    ),
    "gpt-oss-tiny": _gpt_oss(
        4, 8, width=128, heads=4, kv_heads=2, head_features=None, mlp_width=96, experts_per_token=2, window=32,
        vocabulary=2048, sequence=128,
    ),
    "deepseek-tiny": _llama(
        128, 4, 4, None, 352,
        **{
            **_DEEPSEEK_V3, "vocabulary": 2048, "sequence": 128, "dense_layers": 1, "experts": 8,
            "experts_per_token": 2, "expert_width": 96, "router_groups": 4, "groups_per_token": 2,
            "rotary": replace(_DEEPSEEK_V3["rotary"], trained=64),
            "latent": Latent(kv_rank=48, query_rank=64, plain_width=24, rotary_width=8, value_width=24),
        },
    ),
    "universal-tiny": _universal(
        _plain(128, 3, 4, dropout=0.0), _plain(128, 1, 4, dropout=0.0), vocabulary=2048, sequence=128, head="both",
        token_types=2,
    ),
    "bert-tiny": _bert(128, 2, 2, vocabulary=2048, sequence=128),
    "modernbert-tiny": _bert(128, 4, 4, mlp_width=192, vocabulary=2048, sequence=128, **{**_MODERN, "window": 32}),
    "t5-tiny": _t5(128, 2, 4, 512, features=32, vocabulary=2048, sequence=64, decoder_sequence=64),
    # Every other block is a mixture of which a token visits one expert (Fedus et al., JMLR 2022).
    "t5-moe-tiny": _t5(
        128, 2, 4, 512, features=32, vocabulary=2048, sequence=64, decoder_sequence=64,
        mixtures={"experts": 4, "expert_every": 2},
    ),
    "switch-tiny": _t5(
        128, 2, 4, 512, features=32, vocabulary=2048, sequence=64, decoder_sequence=64,
        mixtures={**_SWITCH, "experts": 4},
    ),
    "nllb-moe-tiny": _translator(
        128, 2, 4, {**_NLLB, "experts": 4, "expert_every": 2}, vocabulary=512, sequence=64, decoder_sequence=64,
        init="normal",
    ),
    "marian-moe-tiny": _translator(
        128, 2, 4, {"mlp": "silu", "experts": 4, "experts_per_token": 2}, vocabulary=512, sequence=64,
        decoder_sequence=64, output_bias=True,
    ),
    "marian-tiny": _translator(
        128, 2, 4, {"mlp": "silu"}, vocabulary=512, sequence=64, decoder_sequence=64, output_bias=True
    ),
    # A ViT-L/14 with texts and a writer of 12 blocks, all 1,024 wide, as ERNIE-UniX2 may be (Shan et al., 2022).
    "multimodal-large": MultimodalConfig(
        vision=Stack(width=1024, depth=24, heads=16, mlp_width=4096), patch_size=14,
        text=Stack(width=1024, depth=12, heads=16, mlp_width=4096),
        writer=Stack(width=1024, depth=12, heads=16, mlp_width=4096),
        vocabulary=250002, sequence=128, writer_sequence=128, features=768,
    ),
    # Names of digits in many languages.
    "multimodal-tiny": MultimodalConfig(
        image_size=8, patch_size=2, channels=1, vision=_TINY, text=_TINY, writer=_TINY, vocabulary=368, sequence=24,
        writer_sequence=32, features=32,
    ),
    "bart-tiny": _translator(
        128, 2, 4, _BART, vocabulary=2048, sequence=64, decoder_sequence=64, **_BART_MODEL
    ),
}  # fmt: skip
