"""Language models as data: dense decoders and encoders, encoder–decoders, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from penstock.config.convert import check_fields, nearest
from penstock.errors import ConfigError

TransformerFamily = Literal["decoder", "encoder", "seq2seq"]
Mlp = Literal["gelu", "relu", "swiglu", "geglu"]
Norm = Literal["layer", "rms"]
Positions = Literal["learned", "rotary", "alibi", "relative", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """A Transformer over tokens (Vaswani et al., NeurIPS 2017), in the forms that are trained today.

    Sizes count tokens or features. In a `seq2seq`, `depth` and `sequence` are the encoder's, `decoder_depth` and
    `decoder_sequence` the decoder's, whose blocks attend to the encoder's output as well.
    """

    family: TransformerFamily = "decoder"
    width: int = 768
    depth: int = 12
    heads: int = 12
    kv_heads: int | None = None
    """Heads of keys and values where queries share them (Ainslie et al., EMNLP 2023); none: as many as `heads`."""
    head_features: int | None = None
    """Features of one head; none: `width / heads`."""
    mlp_width: int = 3072
    mlp: Mlp = "gelu"
    """`swiglu` and `geglu` have a third weight matrix, the gate (Shazeer, 2020)."""
    vocabulary: int = 50257
    sequence: int = 1024
    decoder_depth: int = 0
    decoder_sequence: int = 0
    positions: Positions = "learned"
    max_positions: int | None = None
    """Rows of the table of learned positions; none: `sequence`."""
    embedding_norm: bool = False
    """Whether a norm follows the embeddings."""
    token_types: int = 0
    """Rows of the table of segment embeddings; 0 is none."""
    norm: Norm = "layer"
    bias: bool = True
    """Whether linear layers have biases."""
    tied: bool = True
    """Whether the output projection is the token embedding."""
    dropout: float = 0.0
    """Of attention probabilities and of both branches."""
    experts: int = 0
    """Experts of a mixture's MLP; 0 is dense (Shazeer et al., ICLR 2017)."""
    experts_per_token: int = 1
    shared_experts: int = 0
    """Experts that every token visits."""
    expert_width: int | None = None
    """Hidden width of one expert; none: `mlp_width`."""
    expert_every: int = 1
    """Each so-manieth block is a mixture, the others are dense."""
    capacity: float = 1.0
    """Tokens an expert makes room for, as a multiple of an even share; 1 where none are dropped or padded."""

    @classmethod
    def parse(cls, name: str) -> TransformerConfig:
        """The preset called `name`. Raises `ConfigError` naming the nearest."""
        if name not in TRANSFORMERS:
            raise ConfigError(
                f"There is no model preset {name!r}.{nearest(name, TRANSFORMERS)} "
                f"Presets are {', '.join(TRANSFORMERS)}."
            )
        return TRANSFORMERS[name]

    def short_form(self) -> str:
        """The name of the preset that this is, or `custom`."""
        return next((name for name, preset in TRANSFORMERS.items() if preset == self), "custom")

    def __post_init__(self) -> None:
        problems = check_fields(self, "model") or list(self._problems())
        if problems:
            raise ConfigError(problems)

    def _problems(self) -> Iterator[str]:
        sizes = ["width", "depth", "heads", "mlp_width", "vocabulary", "sequence", "expert_every"]
        if self.family == "seq2seq":
            sizes += ["decoder_depth", "decoder_sequence"]
        if self.experts:
            sizes += ["experts_per_token"]
        small = [name for name in sizes if getattr(self, name) < 1]
        yield from (f"model.{name} is {getattr(self, name)}, but must be at least 1." for name in small)
        if small:
            return
        if self.head_features is None and self.width % self.heads:
            yield (
                f"model.width {self.width} cannot be split over model.heads {self.heads}; use a number of heads that "
                f"divides {self.width}, or give model.head_features."
            )
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            yield (
                f"model.kv_heads is {self.kv_heads}, but must divide model.heads {self.heads}, "
                "because each serves as many query heads."
            )
        if self.experts and self.experts_per_token > self.experts:
            yield (
                f"model.experts_per_token is {self.experts_per_token}, but there are only "
                f"{self.experts} model.experts to send a token to."
            )
        if not 0.0 <= self.dropout < 1.0:
            yield f"model.dropout is {self.dropout}, but is a probability in [0, 1)."
        if self.capacity < 1.0:
            yield f"model.capacity is {self.capacity}, but an even share is 1, so it must be at least that."
        if self.family != "seq2seq" and (self.decoder_depth or self.decoder_sequence):
            yield (
                "model.decoder_depth and model.decoder_sequence belong to model.family=seq2seq; "
                f"leave them 0 in a {self.family}."
            )

    @property
    def head_width(self) -> int:
        """Features of one attention head."""
        return self.head_features or self.width // self.heads

    @property
    def tokens(self) -> int:
        """Tokens of one sample that the (first) stack of blocks sees."""
        return self.sequence

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate."""
        return self.mlp in ("swiglu", "geglu")


def _gpt(width: int, depth: int, heads: int, *, vocabulary: int = 51200) -> TransformerConfig:
    """GPT as Megatron trains it: dropout 0.1, learned positions, tied embeddings, 2,048 tokens."""
    return TransformerConfig(
        width=width, depth=depth, heads=heads, mlp_width=4 * width, vocabulary=vocabulary, sequence=2048, dropout=0.1
    )  # fmt: skip


def _mpt(width: int, depth: int, heads: int) -> TransformerConfig:
    """MPT of MosaicML's llm-foundry: tied embeddings, learned positions, no dropout."""
    return TransformerConfig(
        width=width, depth=depth, heads=heads, mlp_width=4 * width, vocabulary=50368, sequence=2048
    )  # fmt: skip


def _llama(
    width: int, depth: int, heads: int, kv_heads: int, mlp_width: int, *, vocabulary: int = 128256,
    sequence: int = 8192,
) -> TransformerConfig:  # fmt: skip
    return TransformerConfig(
        width=width, depth=depth, heads=heads, kv_heads=kv_heads, mlp_width=mlp_width, mlp="swiglu",
        vocabulary=vocabulary, sequence=sequence, positions="rotary", norm="rms", bias=False, tied=False,
    )  # fmt: skip


def _t5(width: int, depth: int, heads: int, mlp_width: int, *, features: int = 64) -> TransformerConfig:
    return TransformerConfig(
        family="seq2seq", width=width, depth=depth, heads=heads, head_features=features, mlp_width=mlp_width,
        mlp="relu", vocabulary=32128, sequence=512, decoder_depth=depth, decoder_sequence=512, positions="relative",
        norm="rms", bias=False, dropout=0.1,
    )  # fmt: skip


def _bert(width: int, depth: int, heads: int) -> TransformerConfig:
    return TransformerConfig(
        family="encoder", width=width, depth=depth, heads=heads, mlp_width=4 * width, vocabulary=30522, sequence=512,
        embedding_norm=True, token_types=2, dropout=0.1,
    )  # fmt: skip


TRANSFORMERS: dict[str, TransformerConfig] = {
    # Radford et al. 2019 Table 2, with the published vocabulary.
    "gpt2": TransformerConfig(dropout=0.1),
    "gpt2-xl": TransformerConfig(width=1600, depth=48, heads=25, mlp_width=6400, dropout=0.1),
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
    "llama2-7b": _llama(4096, 32, 32, 32, 11008, vocabulary=32000, sequence=4096),
    "llama2-13b": _llama(5120, 40, 40, 40, 13824, vocabulary=32000, sequence=4096),
    "llama2-70b": _llama(8192, 80, 64, 8, 28672, vocabulary=32000, sequence=4096),
    "llama3-8b": _llama(4096, 32, 32, 8, 14336),
    "llama3-70b": _llama(8192, 80, 64, 8, 28672),
    "llama3-405b": _llama(16384, 126, 128, 8, 53248),
    # BigScience Workshop 2022, section 3.2.
    "bloom-176b": TransformerConfig(
        width=14336, depth=70, heads=112, mlp_width=57344, vocabulary=250880, sequence=2048, positions="alibi",
        embedding_norm=True,
    ),
    # Jiang et al. 2024 Table 1.
    "mixtral-8x7b": TransformerConfig(
        width=4096, depth=32, heads=32, kv_heads=8, mlp_width=14336, mlp="swiglu", vocabulary=32000, sequence=4096,
        positions="rotary", norm="rms", bias=False, tied=False, experts=8, experts_per_token=2,
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
