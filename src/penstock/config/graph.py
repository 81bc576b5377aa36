"""The graph of a model: its inputs, the runs of layers over them, and its heads.

Every configuration of a model has a `graph`. Whoever builds, cuts, predicts, serves or exports a model goes through
these lists and does not ask for the model's family.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar

from penstock.config.stack import Stack

H = TypeVar("H")
Stem = Literal["patchify", "conv"]
Before = Literal["norm", "tanh", "transform", "none"]
ImagePool = Literal["first", "mean", "both", "attention"]
Init = Literal["normal", "scaled", "fan_in", "xavier"]
NoiseKind = Literal["cosine", "linear", "flow"]
Target = Literal["v", "eps", "x0"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInput:
    """An input of token numbers, (B, N), each of which is a row of a table of vectors."""

    name: str = "tokens"
    """The model's argument."""
    vocabulary: int
    """Rows of the table."""
    length: int
    """Tokens of a sample."""
    table: str = "tokens"
    """The module that holds the table; inputs with the same one share it."""
    segments: int = 0
    """Rows of a second table, of kinds of segments; 0 is none."""
    scaled: bool = False
    """Whether vectors are multiplied by √width (Vaswani et al., NeurIPS 2017, section 3.4)."""
    ordered: bool = False
    """Whether its tokens see none that come later, in every run that they go through."""
    prefix: float = 0.0
    """Share of samples in training whose first tokens see each other all the same, as many as `prefixes` says."""
    share: float = 1.0
    """Samples of it that a micro-batch has, on average for each of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchInput:
    """An input of images, (B, C, S, S), whose patches are mapped to vectors."""

    name: str = "images"
    image_size: int
    """Pixels of a side."""
    patch_size: int
    channels: int
    stem: Stem = "patchify"
    """`patchify`: one linear map per patch. `conv`: 3×3 stride-2 convolutions (Xiao et al., NeurIPS 2021)."""
    class_token: bool = False
    """Whether a learned vector comes before the patches."""
    distil_token: bool = False
    """Whether another one comes behind it, of which a head learns from a teacher."""
    registers: int = 0
    """Learned vectors without positions that come next (Darcet et al., ICLR 2024)."""
    bias: bool = True
    """Whether the linear map has a bias."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, S, S), of one image."""
        return self.channels, self.image_size, self.image_size

    @property
    def patches(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def learned_tokens(self) -> int:
        """Tokens of a sample that come before its patches."""
        return self.class_token + self.distil_token + self.registers

    @property
    def length(self) -> int:
        """Tokens of a sample."""
        return self.patches + self.learned_tokens

    def stem_widths(self, width: int) -> tuple[int, ...]:
        """Output channels of each stride-2 convolution of the `conv` stem. They double up to the model's width."""
        halvings = self.patch_size.bit_length() - 1
        return tuple(max(8, width >> (halvings - 1 - i)) for i in range(halvings))


Input = TokenInput | PatchInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A vector of each sample, (B, D), that modulates the norms of runs and heads: the sum of the embeddings of its
    time in [0, 1], (B,), and of its class, (B,) (Peebles & Xie, ICCV 2023, "DiT", section 3.2, adaLN-Zero)."""

    name: str = "condition"
    """The module that makes it."""
    frequencies: int = 256
    """Sines and cosines by which a time is embedded."""
    classes: int = 0
    """Classes; the number after the last one stands for none of them. 0: samples have no classes."""
    dropout: float = 0.0
    """Share of samples in training whose class, or text, is left out."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Layers that run one after the other over the tokens of an input, or over what another run made of them."""

    name: str
    """The module that holds it."""
    stack: Stack
    reads: str
    """The input, or the earlier run, whose tokens it computes."""
    more_inputs: tuple[str, ...] = ()
    """Further inputs whose samples it computes behind those of the one that it reads, each with a mask of its own."""
    input: str = ""
    """The input whose samples it computes, where it reads a run over several inputs."""
    memories: tuple[str, ...] = ()
    """Earlier runs whose outputs its cross attention sees, one after the other; of several, those that are there, or
    of each sample the one that is asked for. Features that narrower ones lack are 0."""
    causal: bool = False
    """Whether a token sees itself and those before it only."""
    rows: int = 0
    """Rows in its table of learned positions."""
    max_tokens: int = 0
    """Tokens that it can be given."""
    embedding_norm: bool = False
    """Whether a norm comes before its first layer's."""
    modulated: bool = False
    """Whether the condition of a sample shifts, scales and gates its blocks."""
    last_norm: bool = True
    """Whether a pre-norm run ends with a norm; without one a head has it."""
    setting: str = "model"
    """The setting of the configuration that its stack is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WordHead:
    """A head: logits of each token over a vocabulary, (B, N, V)."""

    name: str = "head"
    """The module that holds its last linear."""
    run: str
    """The run that it reads."""
    vocabulary: int
    tied: str = ""
    """The table of tokens that is its weight; empty for a weight of its own."""
    bias: bool = False
    scaled: bool = False
    """Whether its inputs are divided by √width."""
    transform: bool = False
    """Whether a dense layer, its activation and a norm come before it (BERT)."""
    cap: float = 0.0
    """Logits z become c·tanh(z / c); 0: they stay as they are."""
    target_share: float = 1.0
    """Share of the tokens of its run whose words the loss asks for, where its task does not say so for all heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassHead:
    """A head: logits of each sample over classes, (B, classes)."""

    name: str = "head"
    run: str
    classes: int
    pool: ImagePool = "first"
    """The vector of a sample: that of its first token, the mean over tokens, or `both`, one after the other; or what a
    learned query attends to among all tokens, and a perceptron makes of that (`attention`; Zhai et al., CVPR 2022,
    "Scaling Vision Transformers", section 3.2)."""
    skipped: int = 0
    """Tokens at the beginning that are no part of the mean."""
    before: Before = "norm"
    """The layers before the last linear: a norm; a dense layer and tanh; a dense layer, its activation and a norm; or
    none."""
    norm_first: bool = False
    """Whether the norm acts on all tokens before the mean is taken."""
    dropout: float = 0.0
    distilled: bool = False
    """Whether a second linear reads the second token: logits are the mean of both, and a teacher is compared with the
    second's alone (Touvron et al., ICML 2021, "DeiT", section 4)."""

    @property
    def vectors(self) -> int:
        """Vectors of as many features as a token that make a sample's."""
        return 1 + (self.pool == "both")

    @property
    def linears(self) -> tuple[str, ...]:
        """The modules that hold its last linears: that of the vector, then the distilled one."""
        second = "distil_head" if self.name == "head" else f"{self.name}_distil_head"
        return (self.name, second) if self.distilled else (self.name,)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureHead:
    """A head without weights: each token's features, (B, N, D)."""

    name: str = "features"
    run: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelHead:
    """A head: an image of each sample, (B, C, S, S), of the form of an input of images; a patch from each token.

    Of a noisy image it predicts what `penstock.tasks.noise` describes."""

    name: str = "head"
    run: str
    predicts: Target = "v"
    schedule: NoiseKind = "cosine"
    min_snr: float | None = None
    """γ of the weights of the loss; None: all samples weigh the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorHead:
    """A head: a vector of each sample, to be compared with those of another such head. Their products are logits.

    Vectors have length 1, (B, features), times the learned factor where there is one. With an offset they have one
    feature more: the learned offset beside the factor, and 1 in the other head.
    """

    name: str
    run: str
    features: int
    pool: Literal["first", "last", "mean"] = "mean"
    """The vector of a sample is made of its first token, of its last that is no padding, or of the mean over tokens."""
    scale: float | None = None
    """The learned factor at first, an inverse temperature; none: there is no factor."""
    offset: float | None = None
    """The learned offset at first; none: there is no offset."""


Head = WordHead | ClassHead | FeatureHead | PixelHead | VectorHead


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The parts of a model. Runs are in the order in which they compute; each reads what comes before it."""

    inputs: tuple[Input, ...]
    runs: tuple[Run, ...]
    heads: tuple[Head, ...] = ()
    condition: Condition | None = None
    init: Init = "normal"
    """How weights are drawn: `normal` with deviation 0.02 (BERT, Llama, ViT); `scaled`: the same, and those that end
    residual branches divided by √(2·depth) (GPT-2); `fan_in`: deviation 1 / √inputs (T5); `xavier`: uniform by
    inputs and outputs (Glorot & Bengio, 2010)."""

    # -- parts by name and kind

    def run(self, name: str) -> Run:
        """The run of that name."""
        return next(run for run in self.runs if run.name == name)

    def input_of(self, run: Run) -> Input:
        """The input whose tokens a run computes, of several the first."""
        return self.inputs_through(run)[0]

    def inputs_through(self, run: Run) -> tuple[Input, ...]:
        """The inputs whose samples a run computes, in the order in which their samples come."""
        at: Run | None = run
        names: tuple[str, ...] = ()
        while at is not None and not names:
            source = at.reads
            names = (at.input,) * bool(at.input)
            more, at = at.more_inputs, next((other for other in self.runs if other.name == source), None)
        names = names or (source, *more)
        return tuple(one for name in names for one in self.inputs if one.name == name)

    def hides_later(self, run: Run, one: Input) -> bool:
        """Whether the tokens of an input see none that come later, in a run."""
        return run.causal or (isinstance(one, TokenInput) and one.ordered)

    def enters(self, run: Run) -> bool:
        """Whether a run reads an input, and not another run."""
        return any(one.name == run.reads for one in self.inputs)

    def heads_of(self, kind: type[H]) -> tuple[H, ...]:
        """The heads of one kind."""
        return tuple(head for head in self.heads if isinstance(head, kind))

    def inputs_of(self, kind: type[H]) -> tuple[H, ...]:
        """The inputs of one kind."""
        return tuple(one for one in self.inputs if isinstance(one, kind))

    def runs_of(self, heads: Container[str]) -> tuple[Run, ...]:
        """The runs that the heads of these names read, and those that these see as memories, in their order; not those
        between them and their inputs."""
        names = {head.run for head in self.heads if head.name in heads}
        for run in reversed(self.runs):
            at: Run | None = run if run.name in names else None
            while at is not None:
                names |= {*at.memories}
                source = at.reads
                at = next((other for other in self.runs if other.name == source), None)
        return tuple(run for run in self.runs if run.name in names)

    # -- sizes

    def length(self, run: Run) -> int:
        """Tokens of one sample that a run computes."""
        return self.input_of(run).length

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of one sample that each run computes."""
        return tuple(self.length(run) for run in self.runs)

    def samples(self, run: Run) -> float:
        """Samples that a run computes for each of a micro-batch, on average."""
        return sum(one.share if isinstance(one, TokenInput) else 1.0 for one in self.inputs_through(run))

    @property
    def width(self) -> int:
        """Features of a token of the first run."""
        return self.runs[0].stack.width

    def width_of(self, one: Input) -> int:
        """Features of a token of an input: those of the run that reads it."""
        reading = (run.stack.width for run in self.runs if one.name in (run.reads, *run.more_inputs))
        return next(reading, self.width)

    def memory_width(self, run: Run) -> int:
        """Features of a token that a run's cross attention sees, the most of several memories; 0 where it has none."""
        return max([0, *(self.run(name).stack.width for name in run.memories)])

    def width_before(self, run: Run) -> int:
        """Features of a token that a run reads."""
        return next((one.stack.width for one in self.runs if one.name == run.reads), run.stack.width)

    @cached_property
    def main(self) -> Run:
        """The run that the last head reads: its tokens are those that are counted."""
        return self.run(self.heads[-1].run) if self.heads else self.runs[-1]

    # -- what the model is for

    @cached_property
    def vision(self) -> bool:
        """Whether it takes images and nothing else."""
        return all(isinstance(one, PatchInput) for one in self.inputs)

    @property
    def images(self) -> PatchInput:
        """The first input of images, of a model that has one."""
        return self.inputs_of(PatchInput)[0]

    @cached_property
    def words(self) -> WordHead | None:
        """The head for words that text is read from: the last of a causal run, else the last."""
        heads = self.heads_of(WordHead)
        causal = [head for head in heads if self.run(head.run).causal]
        return (causal or heads or (None,))[-1]

    @cached_property
    def classes(self) -> ClassHead | None:
        """The first head for classes, if there is one."""
        return next(iter(self.heads_of(ClassHead)), None)

    @cached_property
    def pixels(self) -> PixelHead | None:
        """The first head for images, if there is one."""
        return next(iter(self.heads_of(PixelHead)), None)

    @property
    def tied(self) -> dict[str, str]:
        """Names of the weights of heads that are tables of tokens, with the names of these."""
        return {f"{head.name}.weight": f"{head.tied}.weight" for head in self.heads_of(WordHead) if head.tied}

    @cached_property
    def writer(self) -> Run | None:
        """The causal run from which words are read: it continues a text token by token. None where there is none."""
        run = None if self.words is None else self.run(self.words.run)
        return run if run is not None and run.causal else None

    @cached_property
    def text(self) -> Input | None:
        """The input of texts that the writer continues."""
        return None if self.writer is None else self.input_of(self.writer)

    @cached_property
    def written(self) -> tuple[Run, ...]:
        """The runs that a continued text goes through, from its input to the writer."""
        path: list[Run] = []
        name = "" if self.writer is None else self.writer.name
        while at := next((run for run in self.runs if run.name == name), None):
            path.insert(0, at)
            name = at.reads
        return tuple(path)

    @cached_property
    def remembered(self) -> tuple[Run, ...]:
        """The runs whose outputs are computed once before a text is written: those that its runs' cross attention
        sees, with all that they read."""
        wanted = {name for run in self.written for name in run.memories}
        runs: list[Run] = []
        for run in reversed(self.runs):
            if run.name in wanted:
                runs.insert(0, run)
                wanted |= {run.reads, *run.memories}
        return tuple(runs)

    @cached_property
    def generates(self) -> bool:
        """Whether texts can be continued with it: words are read from a causal run, which sees one memory at most, made
        of one input of tokens."""
        memories = {run.memories for run in self.written if run.memories}
        sources = {self.input_of(run) for run in self.remembered}
        alone = all(len(names) == 1 for names in memories) and max(len(memories), len(sources)) <= 1
        return self.writer is not None and alone and all(isinstance(one, TokenInput) for one in sources)

    @cached_property
    def padded(self) -> str:
        """The input that lengths are of unless they are given by name: the first whose padding a run, or a vector,
        would see."""
        every = ((run, one) for run in self.runs for one in self.inputs_through(run))
        looked = {name for run in self.runs for name in run.memories} | {
            head.run for head in self.heads_of(VectorHead)
        }
        seen = (
            one for run, one in every
            if isinstance(one, TokenInput) and (run.name in looked or not self.hides_later(run, one))
        )  # fmt: skip
        return next((one.name for one in seen), "")

    @cached_property
    def form(self) -> str:
        """The inputs that the last head is made from, in words, with `causal` before those of a causal run; and the
        number of heads where there are several. Images of which an image is made are noisy, whatever else is seen."""
        run = self.main
        if self.pixels is not None and len(self.heads) == 1:
            return "noisy images"
        kinds = [*(self.run(name) for name in run.memories), run]
        inputs = " and ".join(
            "images" if isinstance(self.input_of(one), PatchInput) else "tokens" for one in kinds
        )
        inputs = f"causal {inputs}" if run.causal else inputs
        return f"{inputs} with {len(self.heads)} heads" if len(self.heads) > 1 else inputs

    @cached_property
    def routed(self) -> bool:
        """Whether experts, or groups of them, are given with each sample."""
        return any(run.stack.router == "given" for run in self.runs if run.stack.experts)

    @cached_property
    def ranges(self) -> int:
        """Labels of samples that are told apart where experts are given: equal ranges of times, of a model that
        denoises."""
        mixed = (run.stack for run in self.runs if run.stack.experts and run.stack.router == "given")
        counts = (
            one.labels or (one.router_groups if one.router_groups > 1 else one.experts) for one in mixed
        )
        return max(counts, default=max((run.stack.labels for run in self.runs), default=0))

    @cached_property
    def labelled(self) -> bool:
        """Whether each sample has a label by which visits to experts are counted, or which chooses its expert."""
        return self.routed or any(run.stack.labels for run in self.runs if run.stack.experts)

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """The model's arguments in their order: its inputs, then what describes them, then what is asked for."""
        text = bool(self.inputs_of(TokenInput))
        crossed = any(run.memories for run in self.runs)
        seen = bool(self.padded)
        return (
            *(one.name for one in self.inputs),
            *(() if self.condition is None else ("times", "classes")[: 1 + (self.condition.classes > 0)]),
            *(("lengths",) if seen else ()),
            *(("segments",) if seen and not crossed else ()),
            *(("documents",) if text and not crossed else ()),
            *(("targets", "rows") if text and self.pixels is None else ()),
            *(("prefixes",) if any(one.prefix for one in self.inputs_of(TokenInput)) else ()),
            *(("smoothing", "past") if self.writer is not None else ()),
            *(("sees",) if any(len(run.memories) > 1 for run in self.runs) else ()),
            *(("routes",) if self.labelled else ()),
            *(("token_weights",) if any(run.modulated and run.memories for run in self.runs) else ()),
            *(("by_sample",) if self.words is not None else ()),
        )

    def ordered(self, **values: Any) -> tuple[Any, ...]:
        """The model's arguments by name in their order, up to the last that is given; it takes no others."""
        every = [values.get(name) for name in self.arguments]
        while every[-1] is None:
            every.pop()
        return tuple(every)
