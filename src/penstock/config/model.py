"""The configuration of models: their family and sizes, but not how they run.

`ModelConfig` is a union of one dataclass per family, distinguished by `family`. All families use the sizes of
a `Stack` of blocks. Code that needs only these calls `stacks(config)` and does not depend on the family.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar, Literal

from penstock.config.convert import Checked, Count, Natural, Positive, Probability, nearest, word
from penstock.config.stack import Stack
from penstock.errors import ConfigError

Classifier = Literal["token", "pooled"]
Stem = Literal["patchify", "conv"]
PoolNorm = Literal["before", "after"]


class _Family(Checked, where="model"):
    """What the configurations of all families have in common."""

    @classmethod
    def parse(cls, name: str) -> ModelConfig:
        """The preset called `name`, of any family. Raises `ConfigError` naming the nearest."""
        return preset(name)

    def short_form(self) -> str:
        """The name of the equal preset, or `custom`."""
        return next((name for name, found in PRESETS.items() if found == self), "custom")


@dataclass(frozen=True, kw_only=True)
class ViTConfig(Stack, _Family):
    """A Vision Transformer (Dosovitskiy et al., ICLR 2021, "An Image is Worth 16x16 Words", Table 1).

    Image and patch sizes count pixels.
    """

    RENAMED: ClassVar[dict[str, str]] = {"activation": "mlp"}
    """Old names of settings, mapped to their present names."""

    family: Literal["vit"] = "vit"
    image_size: Count = 224
    patch_size: Count = 16
    channels: Count = 3
    classes: Count = 1000
    classifier: Classifier = "token"
    """What the head reads: a learned class token (`token`), or the mean over patches (`pooled`), which means
    196 tokens instead of 197."""
    stem: Stem = "patchify"
    """`patchify`: one linear map per patch. `conv`: 3×3 stride-2 convolutions (Xiao et al., NeurIPS 2021)."""
    pool_norm: PoolNorm = "before"
    """Whether the final norm acts on the tokens before pooling, or on the pooled vector (timm's
    `fc_norm`)."""
    layer_scale: float | None = None
    """Initial value of LayerScale (Touvron et al., ICCV 2021); none: no LayerScale."""
    drop_path: Probability = 0.0
    """Stochastic depth at the last block; rises linearly from 0 at the first."""
    norm_eps: Positive = 1e-6

    def _problems(self) -> Iterator[str]:
        yield from self.problems("model")
        if self.image_size % self.patch_size:
            down = self.image_size // self.patch_size * self.patch_size
            near = f"{down} or {down + self.patch_size}" if down else f"{self.patch_size}"
            yield (
                f"model.image_size {self.image_size} is not a multiple of model.patch_size {self.patch_size}; "
                f"the nearest multiples are {near}."
            )
        if self.stem == "conv" and (self.patch_size < 2 or self.patch_size & (self.patch_size - 1)):
            yield (
                f"model.stem 'conv' halves the image with each layer, so model.patch_size must be a power of two "
                f"of at least 2, not {self.patch_size}; use stem 'patchify'."
            )

    @property
    def patches(self) -> int:
        """Patches in an image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def tokens(self) -> int:
        """Tokens that the blocks process: the patches, and the class token if there is one."""
        return self.patches + (self.classifier == "token")

    @property
    def stem_widths(self) -> tuple[int, ...]:
        """Output channels of each stride-2 convolution of the `conv` stem. They double up to the model's
        width."""
        halvings = self.patch_size.bit_length() - 1
        return tuple(max(8, self.width >> (halvings - 1 - i)) for i in range(halvings))


@dataclass(frozen=True, kw_only=True)
class _Text(_Family):
    """Fields of all text models besides their blocks."""

    vocabulary: Count = 50257
    sequence: Count = 1024
    """Tokens of a sample; for an encoder–decoder, those of the encoder."""
    max_positions: Count | None = None
    """Rows in the table of learned positions; none: `sequence`."""
    embedding_norm: bool = False
    """Whether a norm follows the embeddings."""
    tied: bool = True
    """Whether the output projection is the token embedding."""


@dataclass(frozen=True, kw_only=True)
class _OneStack(Stack, _Text):
    """A text model with one stack of blocks."""

    def _problems(self) -> Iterator[str]:
        yield from self.problems("model")

    @property
    def tokens(self) -> int:
        """Tokens of one sample that the blocks process."""
        return self.sequence


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(_OneStack):
    """A causal language model (Radford et al., 2019, "Language Models are Unsupervised Multitask Learners")."""

    family: Literal["decoder"] = "decoder"


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(_OneStack):
    """A bidirectional encoder with a head for masked words (Devlin et al., NAACL 2019, "BERT")."""

    family: Literal["encoder"] = "encoder"
    token_types: Natural = 0
    """Rows in the table of segment embeddings; 0 means no table."""


@dataclass(frozen=True, kw_only=True)
class Seq2SeqConfig(_Text):
    """An encoder–decoder, whose decoder blocks also attend to the encoder's output (Raffel et al., JMLR
    2020)."""

    family: Literal["seq2seq"] = "seq2seq"
    encoder: Stack = field(default_factory=Stack)
    decoder: Stack = field(default_factory=Stack)
    decoder_sequence: Count = 1024
    """Tokens of a sample in the decoder."""

    def _problems(self) -> Iterator[str]:
        yield from self.encoder.problems("model.encoder")
        yield from self.decoder.problems("model.decoder")
        if self.encoder.width != self.decoder.width:
            yield (
                f"model.encoder.width {self.encoder.width} and model.decoder.width {self.decoder.width} differ, but "
                "both read the same embedding table; make them equal."
            )

    @property
    def tokens(self) -> int:
        """Tokens of one sample that the encoder processes."""
        return self.sequence


ModelConfig = ViTConfig | DecoderConfig | EncoderConfig | Seq2SeqConfig
"""The configuration of a model of any family."""


def stacks(config: ModelConfig) -> tuple[Stack, ...]:
    """The stacks of blocks of a model, in the order in which they run."""
    return (config.encoder, config.decoder) if isinstance(config, Seq2SeqConfig) else (config,)


def sequences(config: ModelConfig) -> tuple[int, ...]:
    """Tokens of one sample that each of `stacks` processes."""
    return (
        (config.sequence, config.decoder_sequence) if isinstance(config, Seq2SeqConfig) else (config.tokens,)
    )


def preset(name: str) -> ModelConfig:
    """The preset called `name`, of any family. Raises `ConfigError` naming the nearest."""
    if name not in PRESETS:
        raise ConfigError(
            f"There is no model preset {name!r}.{nearest(name, PRESETS)} Presets are {', '.join(PRESETS)}."
        )
    return PRESETS[name]


def option_words(config: ModelConfig) -> list[str]:
    """The command-line words for a model: the nearest preset of its family, and an option for each changed
    field."""
    near = (
        [name, *_changes(found, config, "model")]
        for name, found in PRESETS.items()
        if type(found) is type(config)
    )
    return min(near, key=len)


def title(config: ModelConfig) -> str:
    """The model's name for a headline: `vit-s16 (classifier pooled)`."""
    name, *changes = option_words(config)
    told = ", ".join(change.removeprefix("--model.") for change in changes)
    return f"{name} ({told})" if told else name


def _changes(before: Any, after: Any, path: str) -> Iterator[str]:
    for one in fields(after):
        old, new = getattr(before, one.name), getattr(after, one.name)
        if is_dataclass(new):
            yield from _changes(old, new, f"{path}.{one.name}")
        elif new != old:
            yield f"--{path}.{one.name} {word(new)}"


def _vit(width: int, depth: int, heads: int, mlp_width: int, patch_size: int) -> ViTConfig:
    return ViTConfig(width=width, depth=depth, heads=heads, mlp_width=mlp_width, patch_size=patch_size)


def _gpt(width: int, depth: int, heads: int) -> DecoderConfig:
    """GPT as Megatron trains it: dropout 0.1, learned positions, tied embeddings, 2,048 tokens."""
    return DecoderConfig(
        width=width, depth=depth, heads=heads, mlp_width=4 * width, vocabulary=51200, sequence=2048, dropout=0.1
    )  # fmt: skip


def _mpt(width: int, depth: int, heads: int) -> DecoderConfig:
    """MPT of MosaicML's llm-foundry: tied embeddings, learned positions, no dropout."""
    return DecoderConfig(
        width=width, depth=depth, heads=heads, mlp_width=4 * width, vocabulary=50368, sequence=2048
    )  # fmt: skip


def _llama(width: int, depth: int, heads: int, kv_heads: int, mlp_width: int) -> DecoderConfig:
    """Llama 3; the presets of other Llamas state what they change."""
    return DecoderConfig(
        width=width, depth=depth, heads=heads, kv_heads=kv_heads, mlp_width=mlp_width, mlp="swiglu",
        vocabulary=128256, sequence=8192, positions="rotary", norm="rms", bias=False, qkv_bias=False, tied=False,
    )  # fmt: skip


def _llama2(width: int, depth: int, heads: int, kv_heads: int, mlp_width: int) -> DecoderConfig:
    return replace(_llama(width, depth, heads, kv_heads, mlp_width), vocabulary=32000, sequence=4096)


def _t5(width: int, depth: int, heads: int, mlp_width: int, *, features: int = 64) -> Seq2SeqConfig:
    stack = Stack(
        width=width, depth=depth, heads=heads, head_features=features, mlp_width=mlp_width, mlp="relu",
        positions="relative", norm="rms", norm_eps=1e-6, bias=False, qkv_bias=False, dropout=0.1,
    )  # fmt: skip
    return Seq2SeqConfig(
        encoder=stack, decoder=stack, vocabulary=32128, sequence=512, decoder_sequence=512
    )  # fmt: skip


def _bert(width: int, depth: int, heads: int) -> EncoderConfig:
    return EncoderConfig(
        width=width, depth=depth, heads=heads, mlp_width=4 * width, norm_eps=1e-12, vocabulary=30522, sequence=512,
        embedding_norm=True, token_types=2, dropout=0.1,
    )  # fmt: skip


PRESETS: dict[str, ModelConfig] = {
    # Dosovitskiy et al. 2021 Table 1 (B, L, H); Touvron et al. 2021 Table 1 (Ti, S); Zhai et al. 2022 Table 2 (g).
    "vit-ti16": _vit(192, 12, 3, 768, 16),
    "vit-s16": _vit(384, 12, 6, 1536, 16),
    "vit-b16": _vit(768, 12, 12, 3072, 16),
    "vit-b32": _vit(768, 12, 12, 3072, 32),
    "vit-l16": _vit(1024, 24, 16, 4096, 16),
    "vit-h14": _vit(1280, 32, 16, 5120, 14),
    "vit-h16": _vit(1280, 32, 16, 5120, 16),
    "vit-g14": _vit(1408, 40, 16, 6144, 14),
    # Small enough to learn the embedded digits in a minute on a laptop: 8×8 pixels, 16 patches.
    "vit-digits": ViTConfig(
        image_size=8, patch_size=2, channels=1, width=96, depth=6, heads=3, mlp_width=384, classes=10,
        classifier="pooled",
    ),
    # Radford et al. 2019 Table 2, with the published vocabulary.
    "gpt2": DecoderConfig(dropout=0.1),
    "gpt2-xl": DecoderConfig(width=1600, depth=48, heads=25, mlp_width=6400, dropout=0.1),
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
    "llama3-8b": _llama(4096, 32, 32, 8, 14336),
    "llama3-70b": _llama(8192, 80, 64, 8, 28672),
    "llama3-405b": _llama(16384, 126, 128, 8, 53248),
    # BigScience Workshop 2022, section 3.2.
    "bloom-176b": DecoderConfig(
        width=14336, depth=70, heads=112, mlp_width=57344, vocabulary=250880, sequence=2048, positions="alibi",
        embedding_norm=True,
    ),
    # Jiang et al. 2024 Table 1.
    "mixtral-8x7b": DecoderConfig(
        width=4096, depth=32, heads=32, kv_heads=8, mlp_width=14336, mlp="swiglu", vocabulary=32000, sequence=4096,
        positions="rotary", norm="rms", bias=False, qkv_bias=False, tied=False, experts=8, experts_per_token=2,
    ),
    # Devlin et al. 2019, section 3.
    "bert-base": _bert(768, 12, 12),
    "bert-large": _bert(1024, 24, 16),
    # Raffel et al. 2020, section 3.1.2 and 3.7.
    "t5-small": _t5(512, 6, 8, 2048),
    "t5-base": _t5(768, 12, 12, 3072),
    "t5-large": _t5(1024, 24, 16, 4096),
    "t5-3b": _t5(1024, 24, 32, 16384, features=128),
    "t5-11b": _t5(1024, 24, 128, 65536, features=128),
}  # fmt: skip
