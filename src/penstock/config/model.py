"""The configuration of models: their family and sizes, but not how they run.

`ModelConfig` is a union of one dataclass per family, distinguished by `family`. All families use the sizes of
a `Stack` of blocks. Code that needs only these calls `stacks(config)` and does not depend on the family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, cast

from penstock.boundary.files import quoted
from penstock.config.convert import (
    Checked,
    NotNegative,
    Positive,
    Probability,
    Range,
    Share,
    nearest,
    word,
)
from penstock.config.graph import (
    Before,
    ClassHead,
    Condition,
    FeatureHead,
    Graph,
    Head,
    Init,
    NoiseKind,
    PatchInput,
    PixelHead,
    Run,
    Stem,
    Target,
    TokenInput,
    VectorHead,
    WordHead,
)
from penstock.config.kinds import add_arm, dataclasses_of, family_of
from penstock.config.stack import Mlp, Rotary, Router, Stack
from penstock.errors import ConfigError

Classifier = Literal["token", "pooled"]
PoolNorm = Literal["before", "after"]
Pooler = Literal["tanh", "norm"]
EncoderHead = Literal["words", "classes", "none"]
Branch = Literal["understanding", "generating"]
Pixels = Annotated[int, Range(1, 1 << 16)]
Words = Annotated[int, Range(1, 1 << 24)]
Tokens = Annotated[int, Range(1, 1 << 28)]


class ModelFamily(Checked, where="model"):
    """The base of the configurations of all families: frozen dataclasses with a field `family` and a `graph`."""

    @classmethod
    def parse(cls, name: str) -> ModelConfig:
        """The preset called `name`, of any family. Raises `ConfigError` naming the nearest."""
        return preset(name)

    @cached_property
    def graph(self) -> Graph:
        """The parts of the model."""
        raise NotImplementedError

    def _problems(self) -> Iterator[str]:
        yield from self.graph.problems()

    def with_lengths(self, *lengths: int) -> Any:
        """The same model for samples of so many tokens in each of its inputs. Images have the tokens that they have."""
        return self

    def with_labels(self, count: int) -> Any:
        """The same model for samples of so many labels, by which mixtures count visits; without mixtures, itself."""
        return self

    def with_classes(self, count: int) -> Any:
        """The same model with a head for so many classes of texts. Raises ConfigError where it cannot have one."""
        raise ConfigError(
            f"model.family {family_of(type(self))} has no head for classes of texts; choose another model."
        )

    def telling(self) -> Any:
        """The same model without what its head for classes does not need."""
        return self

    def branch(self, name: str) -> Any:
        """The model of one of its branches alone, in a family that has no others. Raises ConfigError for a name that is
        none of them, and where no such family has its form. Of two heads it keeps that for words."""
        raise ConfigError(f"model.family {family_of(type(self))} has no branches; leave {quoted(name)} out.")

    def short_form(self) -> str:
        """The name of the equal preset, or `custom`."""
        return next((name for name, preset in PRESETS.items() if preset == self), "custom")


def _patch_problems(image_size: int, patch_size: int) -> Iterator[str]:
    if image_size % patch_size:
        down = image_size // patch_size * patch_size
        near = f"{down} or {down + patch_size}" if down else f"{patch_size}"
        yield (
            f"model.image_size {image_size} is not a multiple of model.patch_size {patch_size}; "
            f"the nearest multiples are {near}."
        )


@dataclass(frozen=True, kw_only=True)
class ViTConfig(Stack, ModelFamily):
    """A Vision Transformer (Dosovitskiy et al., ICLR 2021, "An Image is Worth 16x16 Words", Table 1).

    Image and patch sizes count pixels.
    """

    RENAMED: ClassVar[dict[str, str]] = {"activation": "mlp"}
    """Old names of settings, mapped to their present names."""

    family: Literal["vit"] = "vit"
    image_size: Pixels = 224
    patch_size: Pixels = 16
    channels: Annotated[int, Range(1, 1 << 12)] = 3
    classes: Words = 1000
    classifier: Classifier = "token"
    """Input of the head: a learned class token (`token`), or the mean over patches (`pooled`), which means 196 tokens
    instead of 197."""
    stem: Stem = "patchify"
    """`patchify`: one linear map per patch. `conv`: 3×3 stride-2 convolutions (Xiao et al., NeurIPS 2021)."""
    pool_norm: PoolNorm = "before"
    """Whether the final norm acts on the tokens before pooling, or on the pooled vector (timm's
    `fc_norm`)."""
    norm_eps: Positive = 1e-6
    attention_dropout: Probability | None = 0.0
    mlp_dropout: Probability | None = None

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        yield from _patch_problems(self.image_size, self.patch_size)
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

    @cached_property
    def graph(self) -> Graph:
        """Patches, one run, classes."""
        token = self.classifier == "token"
        images = PatchInput(
            image_size=self.image_size, patch_size=self.patch_size, channels=self.channels, stem=self.stem,
            class_token=token,
        )  # fmt: skip
        run = Run(
            name="encoder", stack=self, reads="images", rows=self.tokens, most=self.tokens, last_norm=False
        )
        head = ClassHead(
            run="encoder", classes=self.classes, pool="first" if token else "mean",
            norm_first=not token and self.pool_norm == "before",
        )  # fmt: skip
        return Graph(inputs=(images,), runs=(run,), heads=(head,))


@dataclass(frozen=True, kw_only=True)
class _Text(ModelFamily):
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
    """Whether what the output projection reads is divided by √width, as in T5 with `tied`."""
    init: Init = "normal"
    """How weights are drawn: `normal` with deviation 0.02 (BERT, Llama); `scaled`: the same, and those that end
    residual branches divided by √(2·depth) (GPT-2); `fan_in`: deviation 1 / √inputs (T5); `xavier`: uniform by
    inputs and outputs (Glorot & Bengio, 2010)."""

    def _run(self, name: str, stack: Stack, reads: str, length: int, **changes: Any) -> Run:
        return Run(
            name=name, stack=stack, reads=reads, rows=self.max_positions or self.sequence,
            most=self.max_positions or length, embedding_norm=self.embedding_norm, **changes,
        )  # fmt: skip

    def _input(self, name: str, length: int, segments: int = 0) -> TokenInput:
        return TokenInput(
            name=name,
            vocabulary=self.vocabulary,
            length=length,
            scaled=self.scale_embeddings,
            segments=segments,
        )

    def _words(self, run: str, *, transform: bool = False) -> WordHead:
        return WordHead(
            run=run, vocabulary=self.vocabulary, tied="tokens" if self.tied else "", bias=self.output_bias,
            scaled=self.scale_outputs, transform=transform,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _OneStack(Stack, _Text):
    """A text model with one stack of blocks."""

    def with_lengths(self, *lengths: int) -> Any:
        return replace(self, sequence=lengths[0])

    def with_labels(self, count: int) -> Any:
        return replace(self, labels=count) if self.experts else self

    @property
    def tokens(self) -> int:
        """Tokens of one sample that the blocks process."""
        return self.sequence


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(_OneStack):
    """A causal language model (Radford et al., 2019, "Language Models are Unsupervised Multitask Learners")."""

    family: Literal["decoder"] = "decoder"

    @cached_property
    def graph(self) -> Graph:
        """Tokens, one causal run, words."""
        run = self._run("decoder", self, "tokens", self.sequence, causal=True)
        return Graph(
            inputs=(self._input("tokens", self.sequence),), runs=(run,), heads=(self._words("decoder"),),
            init=self.init,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(_OneStack):
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
class Seq2SeqConfig(_Text):
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

    def with_labels(self, count: int) -> Any:
        encoder, decoder = (
            replace(side, labels=count) if side.experts else side for side in (self.encoder, self.decoder)
        )
        return replace(self, encoder=encoder, decoder=decoder)

    @property
    def tokens(self) -> int:
        """Tokens of one sample that the encoder processes."""
        return self.sequence


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig(Stack, ModelFamily):
    """A diffusion Transformer (Peebles & Xie, ICCV 2023, "Scalable Diffusion Models with Transformers"): from noisy
    images or latents, their times, and classes or texts, it predicts what the noise hides.

    Image and patch sizes count pixels, or places of a latent. With experts the times are cut into equal ranges, one for
    each expert, as in ERNIE-ViLG 2.0 (Feng et al., CVPR 2023, section 2.3, "mixture of denoising experts").
    """

    family: Literal["diffusion"] = "diffusion"
    image_size: Pixels = 32
    patch_size: Pixels = 2
    channels: Annotated[int, Range(1, 1 << 12)] = 4
    """Channels of an image, or of a latent."""
    classes: Annotated[int, Range(0, 1 << 24)] = 1000
    """Classes of images by which they are made; 0: none."""
    condition_dropout: Probability = 0.1
    """Share of training images whose class or text is left out, so that guidance can do without (Ho & Salimans,
    2022)."""
    predicts: Target = "v"
    """Target of the loss: the noise (`eps`), the image (`x0`), or a mix of both that is never hard at either end of
    time (`v`, Salimans & Ho, ICLR 2022)."""
    schedule: NoiseKind = "cosine"
    """How noise grows with time: `cosine`, `linear` (DDPM) or `flow` (rectified flow): see `penstock.tasks.noise`."""
    min_snr: Positive | None = None
    """Largest weight of the loss of an image, a signal-to-noise ratio (Hang et al., ICCV 2023; 5 is usual); none: all
    images weigh the same."""
    text: Stack | None = None
    """Encoder of texts, to whose tokens the blocks over images attend; none: there are no texts."""
    vocabulary: Words = 368
    """Rows in the table of the texts' tokens."""
    sequence: Tokens = 32
    """Tokens of a text."""
    text_norm: bool = False
    """Whether a norm follows the embeddings of texts, as in BERT."""
    text_causal: bool = False
    """Whether a text's tokens see none that come later, as in CLIP."""
    mlp: Mlp = "gelu_tanh"
    norm_eps: Positive = 1e-6
    router: Router = "given"

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        yield from _patch_problems(self.image_size, self.patch_size)

    @property
    def tokens(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    @cached_property
    def graph(self) -> Graph:
        """Noisy images, a modulated run over their patches, images; before them texts and a run over these."""
        images = PatchInput(image_size=self.image_size, patch_size=self.patch_size, channels=self.channels)
        denoiser = Run(
            name="denoiser", stack=self, reads="images", rows=self.tokens, most=self.tokens, last_norm=False,
            modulated=True, memories=() if self.text is None else ("text",),
        )  # fmt: skip
        head = PixelHead(run="denoiser", predicts=self.predicts, schedule=self.schedule, min_snr=self.min_snr)
        condition = Condition(classes=self.classes, dropout=self.condition_dropout)
        if self.text is None:
            return Graph(inputs=(images,), runs=(denoiser,), heads=(head,), condition=condition)
        tokens = TokenInput(vocabulary=self.vocabulary, length=self.sequence)
        text = Run(
            name="text", stack=self.text, reads="tokens", rows=self.sequence, most=self.sequence,
            setting="model.text", embedding_norm=self.text_norm, causal=self.text_causal,
        )  # fmt: skip
        return Graph(inputs=(images, tokens), runs=(text, denoiser), heads=(head,), condition=condition)


@dataclass(frozen=True, kw_only=True)
class MultimodalConfig(_Text):
    """Images and texts in one space, and a writer that sees either (Yu et al., TMLR 2022, "CoCa"; Shan et al., 2022,
    "ERNIE-UniX2")."""

    family: Literal["multimodal"] = "multimodal"
    image_size: Pixels = 224
    patch_size: Pixels = 16
    channels: Annotated[int, Range(1, 1 << 12)] = 3
    classifier: Classifier = "pooled"
    """An image's vector is made of the mean over patches, or of a learned class token (`token`)."""
    vision_norm: bool = False
    """Whether a norm comes before the first block over images, as in CLIP."""
    text_causal: bool = False
    """Whether a text's tokens see none that come later, so that its vector is made of the last, as in CLIP."""
    vision: Stack = field(default_factory=Stack)
    text: Stack = field(default_factory=Stack)
    writer: Stack = field(default_factory=Stack)
    writer_sequence: Tokens = 1024
    """Tokens of a sample that is written."""
    features: Words = 512
    """Features of the vectors that images and texts are compared by."""
    contrast: Literal["softmax", "sigmoid"] = "softmax"
    """How vectors are compared: each finds its own among all of the batch (`softmax`; Radford et al., ICML 2021,
    "CLIP"), or each pair is told to belong together or not (`sigmoid`; Zhai et al., ICCV 2023, "SigLIP")."""
    contrast_weight: NotNegative = 1.0
    """Factor of the contrast in the loss."""
    words_weight: NotNegative = 0.25
    """Factor of the loss of a text that is written, the sum over its tokens."""

    @cached_property
    def graph(self) -> Graph:
        """Images, a run; a source, a run; a target, a causal run that sees either; vectors of both, and words."""
        token = self.classifier == "token"
        images = PatchInput(
            image_size=self.image_size, patch_size=self.patch_size, channels=self.channels, class_token=token
        )
        vision = Run(
            name="vision", stack=self.vision, reads="images", setting="model.vision", rows=images.length,
            most=images.length, embedding_norm=self.vision_norm,
        )  # fmt: skip
        text = self._run(
            "text", self.text, "source", self.sequence, setting="model.text", causal=self.text_causal
        )
        writer = self._run(
            "writer", self.writer, "target", self.writer_sequence, setting="model.writer", causal=True,
            memories=("vision", "text"),
        )  # fmt: skip
        scale, offset = (1 / 0.07, None) if self.contrast == "softmax" else (10.0, -10.0)
        vectors: dict[str, Any] = {"features": self.features, "offset": offset}
        heads = (
            VectorHead(
                name="image_vector", run="vision", scale=scale, pool="first" if token else "mean", **vectors
            ),
            VectorHead(
                name="text_vector", run="text", pool="last" if self.text_causal else "mean", **vectors
            ),
            self._words("writer"),
        )
        source, target = self._input("source", self.sequence), self._input("target", self.writer_sequence)
        return Graph(
            inputs=(images, source, target), runs=(vision, text, writer), heads=heads, init=self.init
        )

    def _run(self, name: str, stack: Stack, reads: str, length: int, **changes: Any) -> Run:
        rows = self.max_positions or max(self.sequence, self.writer_sequence)
        return replace(super()._run(name, stack, reads, length, **changes), rows=rows)

    def with_lengths(self, *lengths: int) -> Any:
        return replace(self, sequence=lengths[1], writer_sequence=lengths[2])

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        yield from _patch_problems(self.image_size, self.patch_size)

    @property
    def tokens(self) -> int:
        """Tokens of a source."""
        return self.sequence


@dataclass(frozen=True, kw_only=True)
class UniversalConfig(_Text):
    """One body with two branches: an encoder that understands, a decoder that generates (Sun et al., 2021, "ERNIE 3.0",
    section 3.1).

    The body computes the texts of both at once, each under its own mask: those to understand see all of their tokens,
    those to continue none that come later, so that no layer tells a token of what it is to be asked for.
    """

    BRANCHES: ClassVar[tuple[Branch, ...]] = ("understanding", "generating")

    family: Literal["universal"] = "universal"
    shared: Stack = field(default_factory=Stack)
    understanding: Stack = field(default_factory=Stack)
    generating: Stack = field(default_factory=Stack)
    branches: tuple[Branch, ...] = BRANCHES
    """The branches that there are. A model of one of them reads `tokens` alone."""
    head: Literal["words", "classes", "both"] = "words"
    """Outputs of the branch that understands: logits of each token over the vocabulary (`words`), logits of each sample
    over `classes`, read from its first token, or `both`."""
    classes: Words = 2
    words_weight: NotNegative = 1.0
    """Weight of the loss of masked words."""
    classes_weight: NotNegative = 1.0
    """Weight of the loss of classes."""
    next_weight: NotNegative = 1.0
    """Weight of the loss of the next token."""
    continued: Share = 1.0
    """Share of a batch's samples whose next tokens are asked for."""
    masked: Share = 1.0
    """Share of a batch's samples, counted from its end, whose words are masked. With `continued`, 1 and 1 ask for both
    of every sample, and 0.5 and 0.5 for one of each."""
    prefix: Share = 0.0
    """Share of the samples to continue whose beginning is seen whole, at any length, so that only the rest is asked for
    (Raffel et al., JMLR 2020, "T5", section 3.2.1, "prefix LM")."""
    token_types: Annotated[int, Range(0, 1 << 24)] = 0
    """Rows in the table of segment embeddings of texts to understand; 0 means no table."""
    output_bias: bool = False

    def _problems(self) -> Iterator[str]:
        if not self.branches or len(set(self.branches)) < len(self.branches):
            yield f"model.branches is {word(self.branches)}, but must name each branch once, and one at least."
            return
        if len(self.branches) == 2 and min(self.continued, self.masked) == 0:
            yield (
                "model.continued and model.masked must both be above 0 in a model of two branches; to leave one out, "
                "name the other alone in model.branches."
            )
        yield from super()._problems()

    @cached_property
    def graph(self) -> Graph:
        """Tokens to continue, and tokens to understand; one run over both; a run and its heads for each."""
        understands, both = "understanding" in self.branches, len(self.branches) == 2
        generates = "generating" in self.branches
        read = "hidden" if both else "tokens"
        tokens = replace(self._input("tokens", self.sequence), ordered=generates)
        tokens = replace(tokens, prefix=self.prefix) if generates else tokens
        hidden = self._input(read, self.sequence, self.token_types)
        if both:
            tokens, hidden = replace(tokens, share=self.continued), replace(hidden, share=self.masked)
        wide = self.shared.width
        shared = self._run(
            "shared", self.shared, "tokens", self.sequence, setting="model.shared",
            also=("hidden",) if both else (), causal=not understands,
            # A branch of as many features goes on where the body ends, as if both were one stack.
            last_norm=any(getattr(self, name).width != wide for name in self.branches),
        )  # fmt: skip
        runs, heads = [shared], list[Head]()
        for name in self.BRANCHES:
            if name in self.branches:
                of = {"of": read if name == "understanding" else "tokens"} if both else {}
                stack = getattr(self, name)
                run = self._run(name, stack, "shared", self.sequence, setting=f"model.{name}", **of)
                runs.append(replace(run, causal=name == "generating", embedding_norm=False))
        if understands and self.head != "words":
            before: Before = "tanh"
            dropout = self.understanding.dropout
            heads.append(
                ClassHead(
                    name="kind", run="understanding", classes=self.classes, before=before, dropout=dropout
                )
            )
        if understands and self.head != "classes":
            masked = replace(self._words("understanding", transform=True), name="masked")
            # A task that asks for masked words alone says so itself.
            heads.append(replace(masked, target_share=0.15) if generates or heads else masked)
        if generates:
            heads.append(replace(self._words("generating"), name="next"))
        inputs = ((tokens,) * generates) + ((hidden,) * understands)
        return Graph(inputs=inputs, runs=tuple(runs), heads=tuple(heads), init=self.init)

    def with_lengths(self, *lengths: int) -> Any:
        return replace(self, sequence=lengths[0])

    def with_classes(self, count: int) -> Any:
        if "understanding" not in self.branches:
            raise ConfigError("model.branches lacks understanding, which classes are told by; add it.")
        return replace(self, head="classes", classes=count)

    def telling(self) -> Any:
        return replace(self, head="classes", branches=("understanding",))

    def with_labels(self, count: int) -> Any:
        return with_stacks(self, lambda stack: replace(stack, labels=count) if stack.experts else stack)

    @property
    def tokens(self) -> int:
        """Tokens of one sample that the body processes."""
        return self.sequence

    def branch(self, name: str) -> Any:
        if name not in self.branches:
            raise ConfigError(f"The model has no branch {quoted(name)}; choose {' or '.join(self.branches)}.")
        stack = getattr(self, name)
        differing = [
            one.name
            for one in fields(Stack)
            if one.name != "depth" and getattr(stack, one.name) != getattr(self.shared, one.name)
        ]
        if differing:
            raise ConfigError(
                f"model.{name} and model.shared differ in {', '.join(differing)}, so that they are no one stack of "
                "blocks, as an encoder or a decoder is; keep both branches in one folder, or train them alike."
            )
        sizes = {one.name: getattr(stack, one.name) for one in fields(Stack)}
        sizes["depth"] = self.shared.depth + stack.depth
        common = {one.name: getattr(self, one.name) for one in fields(_Text)}
        if name == "generating":
            return DecoderConfig(**sizes, **common)
        return EncoderConfig(
            **sizes,
            **common,
            head="classes" if self.head == "classes" else "words",
            classes=self.classes,
            token_types=self.token_types,
        )


ModelConfig = (
    ViTConfig
    | DecoderConfig
    | EncoderConfig
    | Seq2SeqConfig
    | DiffusionConfig
    | MultimodalConfig
    | UniversalConfig
)
"""The configuration of a model of any family."""
TextConfig = DecoderConfig | EncoderConfig | Seq2SeqConfig
"""The same of families that transformers has models of."""


FAMILIES: dict[str, type] = {family_of(arm): arm for arm in dataclasses_of(ModelConfig)}
"""The configurations of models by family."""


def enrol(family: type[ModelFamily]) -> type[ModelFamily]:
    """Make a family of your own known, so that its configurations are parsed, saved and read again. Usable as a
    decorator of its dataclass."""
    FAMILIES[family_of(family)] = family
    add_arm(ViTConfig, family)
    return family


def stacks(config: ModelConfig) -> tuple[Stack, ...]:
    """The stack of each run of a model, in the order in which they compute."""
    return tuple(run.stack for run in config.graph.runs)


def with_stacks(config: ModelConfig, change: Callable[[Stack], Any]) -> ModelConfig:
    """The same model with what `change` makes of each of its settings that is a stack."""
    values = {one.name: getattr(config, one.name) for one in fields(config)}
    inner = {name: change(value) for name, value in values.items() if isinstance(value, Stack)}
    outer: Any = config
    if isinstance(config, Stack):
        # Its own sizes must suit those of stacks inside it, which are left out meanwhile.
        without: dict[str, Any] = dict.fromkeys(inner)
        outer = change(replace(config, **without) if inner else config)
    return replace(outer, **inner) if inner else outer  # type: ignore[no-any-return]


def vocabulary_of(config: ModelConfig) -> int:
    """Rows of a model's largest table of tokens; 0 without one."""
    return max((one.vocabulary for one in config.graph.inputs_of(TokenInput)), default=0)


def preset(name: str) -> ModelConfig:
    """The preset called `name`, of any family. Raises `ConfigError` naming the nearest."""
    if name not in PRESETS:
        raise ConfigError(
            f"There is no model preset {quoted(name)}.{nearest(name, PRESETS)} Presets are {', '.join(PRESETS)}."
        )
    return PRESETS[name]


def option_words(config: ModelConfig) -> list[str]:
    """The command-line words for a model: the nearest preset of its family, and an option for each changed
    field."""
    near = (
        [name, *changes(preset, config, "model")]
        for name, preset in PRESETS.items()
        if type(preset) is type(config)
    )
    own = ["--model.family", config.family, *changes(type(config)(), config, "model")]
    return min(near, key=len, default=own)


def title(config: ModelConfig) -> str:
    """The model's name for a headline: `vit-s16 (classifier pooled)`."""
    name, *changes = option_words(config)
    name = config.family if name.startswith("--") else name
    # A list of layers is too long for a headline.
    changed = ", ".join(change.removeprefix("--model.").partition(" '[")[0] for change in changes)
    return f"{name} ({changed})" if changed else name


def changes(before: Any, after: Any, path: str) -> Iterator[str]:
    """An option, with its value, for each field below `path` in which two configurations of one class differ."""
    for one in fields(after):
        old, new = getattr(before, one.name), getattr(after, one.name)
        if is_dataclass(new) and old is None:
            # Any option of a part makes it.
            inside = f"{path}.{one.name}"
            first = fields(new)[0].name
            made = list(changes(cast(Any, type(new))(), new, inside))
            yield from made or [f"--{inside}.{first} {word(getattr(new, first))}"]
        elif is_dataclass(new):
            yield from changes(old, new, f"{path}.{one.name}")
        elif new != old:
            yield f"--{path}.{one.name} {word(new)}"


def _dit(width: int, depth: int, heads: int) -> DiffusionConfig:
    """DiT over latents of 256 × 256 pixels, without its learned variances; patches of 2 × 2."""
    return DiffusionConfig(
        width=width, depth=depth, heads=heads, mlp_width=4 * width, predicts="eps", schedule="linear"
    )


def _vit(width: int, depth: int, heads: int, mlp_width: int, patch_size: int) -> ViTConfig:
    return ViTConfig(width=width, depth=depth, heads=heads, mlp_width=mlp_width, patch_size=patch_size)


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
    return replace(
        DecoderConfig(
            width=width, depth=depth, heads=heads, kv_heads=kv_heads, mlp_width=mlp_width, mlp="swiglu",
            vocabulary=128256, sequence=8192, positions="rotary", rotary=Rotary(base=500000.0), norm="rms",
            bias=False, qkv_bias=False, tied=False,
        ),
        **changes,
    )  # fmt: skip


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


def _qwen_moe(
    width: int, depth: int, heads: int, kv_heads: int, mlp_width: int, **changes: Any
) -> DecoderConfig:
    sizes = {"head_features": 128, "experts": 128, "experts_per_token": 8, "balance": 0.001, "tied": False}
    return replace(_qwen(width, depth, heads, kv_heads, mlp_width, qk_norm=True), **{**sizes, **changes})


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
    # Riquelme et al. 2021, "V-MoE", Table 1 and section 3.1: every second block has 32 experts.
    "vit-moe-s32": replace(_vit(512, 8, 8, 2048, 32), **_VIT_MOE),
    "vit-moe-b16": replace(_vit(768, 12, 12, 3072, 16), **_VIT_MOE),
    "vit-moe-l16": replace(_vit(1024, 24, 16, 4096, 16), **_VIT_MOE),
    # Small enough to learn the embedded digits in a minute on a laptop: 8×8 pixels, 16 patches.
    "vit-digits": ViTConfig(
        image_size=8, patch_size=2, channels=1, width=96, depth=6, heads=3, mlp_width=384, classes=10,
        classifier="pooled",
    ),
    # The experts of every second block choose their patches.
    "vit-moe-tiny": ViTConfig(
        image_size=32, patch_size=8, width=128, depth=4, heads=4, mlp_width=256, classes=10, classifier="pooled",
        experts=4, experts_per_token=2, expert_every=2, router="expert_choice",
    ),
    # Peebles & Xie 2023, Table 1.
    "dit-s2": _dit(384, 12, 6),
    "dit-b2": _dit(768, 12, 12),
    "dit-l2": _dit(1024, 24, 16),
    "dit-xl2": _dit(1152, 28, 16),
    # Feng et al. 2023, "ERNIE-ViLG 2.0", section 3.1: 10 experts, 24 B parameters in all, of which 1.3 B encode texts.
    # Theirs is a U-Net, whose widths and depths are not published: this is a Transformer of as many parameters.
    "ernie-vilg2-24b": DiffusionConfig(
        width=2048, depth=24, heads=16, mlp_width=21504, classes=0, image_size=128, channels=4, patch_size=2,
        predicts="eps", schedule="linear", experts=10, vocabulary=50000, sequence=77,
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
    "qwen3-moe-tiny": _qwen_moe(
        128, 4, 4, 2, 352, vocabulary=2048, sequence=128, head_features=32, experts=8, experts_per_token=2,
        expert_width=96,
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
