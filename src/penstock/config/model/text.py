"""Text models of one stack or two: decoders, encoders, encoder–decoders."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal

from penstock.config.convert import Positive, Range
from penstock.config.graph import Before, ClassHead, FeatureHead, Graph, Head, Init, Run, TokenInput, WordHead
from penstock.config.model.family import EncoderHead, ModelFamily, Pooler, Tokens, Words
from penstock.config.stack import Stack


@dataclass(frozen=True, kw_only=True)
class TextFamily(ModelFamily):
    """Fields of all text models besides their blocks."""

    vocabulary: Words = 50257
    sequence: Tokens = 1024
    """Tokens of a sample; for an encoder–decoder, those of the encoder."""
    max_positions: Tokens | None = None
    """Rows in the table of learned positions; none: `sequence`."""
    embedding_norm: bool = False
    """Whether a norm follows the embeddings."""
    tied: bool = True
    """Whether the output projection is the token embedding."""
    output_bias: bool = False
    """Whether the output projection has a bias."""
    scale_embeddings: bool = False
    """Whether token embeddings are multiplied by √width (Vaswani et al., NeurIPS 2017, section 3.4)."""
    scale_outputs: bool = False
    """Whether the input of the output projection is divided by √width, as in T5 with `tied`."""
    logit_cap: Positive | None = None
    """The cap c of logits z over words: c·tanh(z / c) (Gemma Team, 2024, "Gemma 2", section 2); none: no cap."""
    init: Init = "normal"
    """How weights are initialised: `normal` with deviation 0.02 (BERT, Llama); `scaled`: the same, with the last
    linears of residual branches divided by √(2·depth) (GPT-2); `fan_in`: deviation 1 / √inputs (T5); `xavier`: uniform
    by inputs and outputs (Glorot & Bengio, 2010)."""

    def with_lengths(self, *lengths: int) -> Any:
        return replace(self, sequence=lengths[0])

    def _run(self, name: str, stack: Stack, reads: str, length: int, **changes: Any) -> Run:
        return Run(
            name=name, stack=stack, reads=reads, rows=self.max_positions or self.sequence,
            max_tokens=self.max_positions or length, embedding_norm=self.embedding_norm, **changes,
        )  # fmt: skip

    def _input(self, name: str, length: int, segments: int = 0) -> TokenInput:
        return TokenInput(
            name=name, vocabulary=self.vocabulary, length=length, scaled=self.scale_embeddings,
            segments=segments,
        )  # fmt: skip

    def _words(self, run: str, *, transform: bool = False) -> WordHead:
        return WordHead(
            run=run, vocabulary=self.vocabulary, tied="tokens" if self.tied else "", bias=self.output_bias,
            scaled=self.scale_outputs, transform=transform, cap=self.logit_cap or 0.0,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(Stack, TextFamily):
    """A causal language model (Radford et al., 2019, "Language Models are Unsupervised Multitask Learners")."""

    family: Literal["decoder"] = "decoder"
    saved_as: Literal["phi3"] | None = None
    """The model_type in transformers' config.json under which the model is saved, if several compute the same but name
    and join weights differently; none: the first of these."""

    @cached_property
    def graph(self) -> Graph:
        """Tokens, one causal run, words."""
        run = self._run("decoder", self, "tokens", self.sequence, causal=True)
        return Graph(
            inputs=(self._input("tokens", self.sequence),), runs=(run,), heads=(self._words("decoder"),),
            init=self.init,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(Stack, TextFamily):
    """A bidirectional encoder with a head for masked words (Devlin et al., NAACL 2019, "BERT")."""

    family: Literal["encoder"] = "encoder"
    token_types: Annotated[int, Range(0, 1 << 24)] = 0
    """Rows in the table of segment embeddings; 0 means no table."""
    head: EncoderHead = "words"
    """Output of the model: logits of each token over the vocabulary (`words`), logits of each sample over `classes`,
    read from its first token, or each token's features (`none`)."""
    classes: Words = 2
    pooler: Pooler = "tanh"
    """Layers before `classes`: a dense layer and tanh, as in BERT, or those before `words`, a dense layer, the
    activation and a norm (`norm`), as in ModernBERT."""
    output_bias: bool = True

    def with_classes(self, count: int) -> Any:
        return replace(self, head="classes", classes=count)

    @cached_property
    def graph(self) -> Graph:
        """Tokens, one run, and the head that `head` says."""
        run = self._run("encoder", self, "tokens", self.sequence)
        head: Head = FeatureHead(run="encoder")
        if self.head == "words":
            head = self._words("encoder", transform=True)
        elif self.head == "classes":
            before: Before = "tanh" if self.pooler == "tanh" else "transform"
            head = ClassHead(run="encoder", classes=self.classes, before=before, dropout=self.dropout)
        return Graph(
            inputs=(self._input("tokens", self.sequence, self.token_types),), runs=(run,), heads=(head,),
            init=self.init,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Seq2SeqConfig(TextFamily):
    """An encoder–decoder, whose decoder blocks also attend to the encoder's output (Raffel et al., JMLR
    2020)."""

    family: Literal["seq2seq"] = "seq2seq"
    encoder: Stack = field(default_factory=Stack)
    decoder: Stack = field(default_factory=Stack)
    decoder_sequence: Tokens = 1024
    """Tokens of a sample in the decoder."""

    @cached_property
    def graph(self) -> Graph:
        """A source, a run over it; a target, a causal run that also attends to the first; words."""
        encoder = self._run("encoder", self.encoder, "source", self.sequence, setting="model.encoder")
        decoder = self._run(
            "decoder", self.decoder, "target", self.decoder_sequence, setting="model.decoder", causal=True,
            memories=("encoder",),
        )  # fmt: skip
        return Graph(
            inputs=(self._input("source", self.sequence), self._input("target", self.decoder_sequence)),
            runs=(encoder, decoder), heads=(self._words("decoder"),), init=self.init,
        )  # fmt: skip

    def with_lengths(self, *lengths: int) -> Any:
        return replace(self, sequence=lengths[0], decoder_sequence=lengths[1])
